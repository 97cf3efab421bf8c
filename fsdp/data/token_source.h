// One file, or pair of files, as a row of tokens: an .idx/.bin pair, or any other file as bytes, a byte a token.
//
// Mapped, not read: a source costs no memory of its own. Const calls from any thread.
#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <span>
#include <string>
#include <variant>

#include "fsdp/data/indexed_file.h"
#include "fsdp/data/mapped_file.h"
#include "fsdp/data/token_dtype.h"

namespace fsdp::data {

class TokenSource {
 public:
  static constexpr std::int64_t kAnyVocabulary = std::numeric_limits<std::int64_t>::max();

  // A path that ends in .idx or .bin, or for which PATH.idx exists, is an indexed pair; any other is a file of bytes
  // and one document. Throws UsageError when it cannot be used.
  explicit TokenSource(const std::filesystem::path& path, std::int64_t vocabulary = kAnyVocabulary);

  [[nodiscard]] const std::string& name() const { return name_; }  // as it was given
  [[nodiscard]] bool is_indexed() const { return std::holds_alternative<IndexedFile>(file_); }
  [[nodiscard]] TokenDtype dtype() const { return dtype_; }
  [[nodiscard]] std::int64_t token_count() const { return token_count_; }
  [[nodiscard]] std::int64_t sequence_count() const;
  [[nodiscard]] std::int64_t document_count() const;
  // In tokens, ascending; document_start(document_count()) is token_count(). Documents may be empty.
  [[nodiscard]] std::int64_t document_start(std::int64_t document) const;
  // The first document that begins at `token` or after it; document_count() when none does.
  [[nodiscard]] std::int64_t document_from(std::int64_t token) const;
  // Tokens [first, first + out.size()). Throws UsageError naming file, position and byte of a token that is negative or
  // beyond the vocabulary.
  void read(std::int64_t first, std::span<std::int64_t> out) const;

 private:
  [[nodiscard]] std::span<const std::byte> bytes() const;
  [[nodiscard]] const std::filesystem::path& path() const;  // of the tokens

  std::string name_;
  std::int64_t vocabulary_;
  std::variant<IndexedFile, MappedFile> file_;
  TokenDtype dtype_;
  std::int64_t token_count_;
};

}  // namespace fsdp::data
