// Reads the tokens of an .idx/.bin pair (fsdp/data/indexed_format.h).
//
// Both files are mapped, and everything the .idx says is checked when it is opened: in one pass over it, without
// reading the tokens. No table is kept in memory. Const calls from any thread; the files must not change meanwhile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>

#include "fsdp/data/mapped_file.h"
#include "fsdp/data/token_dtype.h"

namespace fsdp::data {

class IndexedFile {
 public:
  // The prefix, or the path of either file. Throws UsageError naming file, byte offset, what was expected and what
  // came.
  explicit IndexedFile(const std::filesystem::path& path);

  [[nodiscard]] const std::filesystem::path& bin_path() const { return bin_.path(); }
  [[nodiscard]] TokenDtype dtype() const { return dtype_; }
  [[nodiscard]] std::int64_t token_count() const { return token_count_; }
  [[nodiscard]] std::int64_t sequence_count() const { return sequence_count_; }
  [[nodiscard]] std::int64_t document_count() const { return document_count_; }
  // In tokens; document_start(document_count()) is token_count().
  [[nodiscard]] std::int64_t document_start(std::int64_t document) const;
  // All tokens as they lie in the .bin.
  [[nodiscard]] std::span<const std::byte> tokens() const { return bin_.bytes(); }
  // Tokens [first, first + out.size()); throws UsageError when they are not all there.
  void read(std::int64_t first, std::span<std::int64_t> out) const;

 private:
  void check_header();
  void check_sequences();  // gives token_count_
  void check_documents() const;
  void check_bin() const;
  [[noreturn]] void refuse(std::int64_t offset, const std::string& what) const;  // in the .idx
  template <typename T>
  [[nodiscard]] T at(std::int64_t offset) const;  // unaligned, of the .idx

  MappedFile idx_, bin_;
  TokenDtype dtype_ = TokenDtype::uint16;
  std::int64_t token_count_ = 0, sequence_count_ = 0, document_count_ = 0;
  std::int64_t pointers_ = 0, documents_ = 0;  // byte offsets of these tables in the .idx
};

}  // namespace fsdp::data
