// The pair of files in which Megatron-LM keeps tokens: NAME.bin with nothing but tokens, NAME.idx with where each
// sequence and document begins. Little endian; offsets in bytes:
//
//   0  magic   9  u64 version   17  u8 dtype   18  u64 sequences S   26  u64 document entries D
//   34  i32 tokens of each sequence [S]; i64 byte offset of each sequence in the .bin [S]; i64 documents [D]
//
// Document d is the sequences [documents[d], documents[d + 1]): the first entry is 0, the last is S.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string_view>

namespace fsdp::data {

inline constexpr std::string_view kIndexMagic("MMIDIDX\0\0", 9);
inline constexpr std::uint64_t kIndexVersion = 1;
inline constexpr std::int64_t kVersionOffset = 9;
inline constexpr std::int64_t kDtypeOffset = 17;
inline constexpr std::int64_t kSequencesOffset = 18;
inline constexpr std::int64_t kDocumentsOffset = 26;
inline constexpr std::int64_t kIndexHeader = 34;

struct IndexedPaths {
  std::filesystem::path idx, bin;
};

// Of a prefix, or of either file: the ending .idx or .bin may be given or not.
[[nodiscard]] inline IndexedPaths indexed_paths(std::filesystem::path path) {
  if (path.extension() == ".idx" || path.extension() == ".bin") path.replace_extension();
  auto with = [&](const char* ending) { return std::filesystem::path(path.native() + ending); };
  return {with(".idx"), with(".bin")};
}

}  // namespace fsdp::data
