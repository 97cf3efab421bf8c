// What is stored where: the tensors of a checkpoint, or of plain .safetensors files, with the pieces they lie in.
//
// A checkpoint is a folder with one .safetensors file a rank, each with that rank's pieces, and index.json, which is
// written last: a folder without it is no checkpoint. Keys: "weights/NAME", "optimizer/STATE/NAME", "buffers/NAME",
// "tensors/NAME" (what a program added). Of plain files all tensors are weights.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "fsdp/layout/global_layout.h"

namespace fsdp::checkpoint {

inline constexpr const char* kIndexFile = "index.json";
inline constexpr const char* kPiecesFormat = "pieces of a libfsdp checkpoint: see index.json";  // in a rank's file
inline constexpr std::int64_t kChecksumBlock = 16 << 20;                                        // bytes

struct StoredPiece {
  int file = 0;                          // index into TensorIndex::files
  std::int64_t offset = 0;               // byte of the file
  ElementRange elements;                 // of the whole tensor, in the order of its strides
  std::vector<std::uint64_t> checksums;  // XXH3 of every kChecksumBlock bytes, the last shorter; empty: unknown
};

struct StoredTensor {
  std::string dtype;                  // as in safetensors
  std::vector<std::int64_t> sizes;    // of the whole tensor
  std::vector<std::int64_t> strides;  // in elements
  std::vector<StoredPiece> pieces;    // ascending; they cover the tensor once
  [[nodiscard]] std::int64_t elements() const;
  [[nodiscard]] bool row_major() const;
};

struct StoredFile {
  std::filesystem::path path;
  std::int64_t bytes = 0;
};

class TensorIndex {
 public:
  // A checkpoint's folder, a .safetensors file, or a folder with model.safetensors or model.safetensors.index.json
  // (several files). Throws UsageError naming what is missing, cut short, damaged or made by a newer version.
  [[nodiscard]] static TensorIndex open(const std::filesystem::path& path);
  [[nodiscard]] static bool is_checkpoint(const std::filesystem::path& folder);

  [[nodiscard]] const std::filesystem::path& path() const { return path_; }
  [[nodiscard]] const std::map<std::string, StoredTensor>& tensors() const { return tensors_; }  // [key]
  [[nodiscard]] const StoredTensor* find(const std::string& key) const;
  [[nodiscard]] const std::vector<StoredFile>& files() const { return files_; }
  [[nodiscard]] int ranks() const { return ranks_; }  // that wrote it; 0: plain files
  // What the program that saved it said ("step", ...).
  [[nodiscard]] const std::map<std::string, std::string>& attributes() const { return attributes_; }
  [[nodiscard]] std::int64_t bytes() const;                                // of all files
  [[nodiscard]] std::int64_t fingerprint() const { return fingerprint_; }  // equal where the same was opened

  // Joins what each rank says of its file (describe_rank) and writes index.json beside the files.
  static void write(const std::filesystem::path& folder, int ranks,
                    const std::map<std::string, std::string>& attributes);
  // What `write` reads of a rank: the file's name and bytes, and its tensors, with file 0.
  static void describe_rank(const std::filesystem::path& folder, int rank, std::int64_t bytes,
                            const std::map<std::string, StoredTensor>& tensors);
  [[nodiscard]] static std::filesystem::path rank_file(const std::filesystem::path& folder, int rank);

 private:
  void read_checkpoint();
  void add_plain_file(const std::filesystem::path& path, const std::vector<std::string>* names);
  void check_files() const;
  void check_pieces();

  std::filesystem::path path_;
  std::vector<StoredFile> files_;
  std::map<std::string, StoredTensor> tensors_;
  std::map<std::string, std::string> attributes_;
  int ranks_ = 0;
  std::int64_t fingerprint_ = 0;
};

// Strides of a contiguous tensor of these sizes.
[[nodiscard]] std::vector<std::int64_t> row_major_strides(const std::vector<std::int64_t>& sizes);

}  // namespace fsdp::checkpoint
