// Writes the tokens of documents as an .idx/.bin pair (fsdp/data/indexed_format.h).
//
// Streams: memory does not grow with the number of tokens or documents. Both files are written as .part and take their
// names when both are whole, the .idx last; a writer that ends before leaves nothing. One thread.
#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "fsdp/data/part_file.h"
#include "fsdp/data/token_dtype.h"

namespace fsdp::data {

struct IndexedWriterOptions {
  std::int64_t vocabulary = 0;      // ids are below; 0: whatever the type holds, `dtype` is needed then
  std::optional<TokenDtype> dtype;  // empty: the smallest for the vocabulary
  bool overwrite = false;
  std::int64_t longest_sequence = std::numeric_limits<std::int32_t>::max();  // longer documents are several sequences
};

class IndexedWriter {
 public:
  // The prefix, or the path of either file. Throws UsageError when one of them exists and `overwrite` is not set.
  IndexedWriter(const std::filesystem::path& path, const IndexedWriterOptions& options);

  // More tokens of the document that is open. Throws UsageError naming document and position of a token that is
  // negative, beyond the vocabulary or does not fit; nothing was written then.
  void append(std::span<const std::int64_t> tokens);
  // The next token begins a new document. Without tokens: an empty document.
  void end_document();
  void append_document(std::span<const std::int64_t> tokens) {
    append(tokens);
    end_document();
  }
  // Both files take their names. Throws Error when the disk is full or fails, UsageError when there are no tokens.
  void finish();

  [[nodiscard]] TokenDtype dtype() const { return dtype_; }
  [[nodiscard]] std::int64_t document_count() const { return documents_; }
  [[nodiscard]] std::int64_t token_count() const { return tokens_; }
  [[nodiscard]] const std::filesystem::path& bin_path() const { return bin_.path(); }
  [[nodiscard]] const std::filesystem::path& idx_path() const { return idx_.path(); }

 private:
  void end_sequence();
  void write_pointers();   // after the sizes, from them
  void write_documents();  // after the pointers
  void write_header();

  IndexedWriterOptions options_;
  TokenDtype dtype_;
  std::int64_t largest_;  // token id
  PartFile idx_, bin_;    // the .idx holds the sizes until finish()
  std::int64_t tokens_ = 0, documents_ = 0, sequences_ = 0;
  std::int64_t document_tokens_ = 0, sequence_tokens_ = 0;  // of those that are open
  std::vector<std::int64_t> continued_;  // sequences that do not begin a document, ascending: one per 2^31 tokens
  std::vector<std::byte> bytes_;         // scratch
};

}  // namespace fsdp::data
