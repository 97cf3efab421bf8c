// Token files to train on: a part of each is held out, the rest is shuffled anew each epoch and mixed by weights.
//
// A training sample has a position, step * batch + its number in the step. What a position holds is a pure function of
// files, options and that number: it depends neither on ranks nor on microbatches, and a run resumes by asking for the
// next position. Nothing is read until it is asked for, and there is no table of samples. Const calls from any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/data/mixture.h"
#include "fsdp/data/token_batch.h"
#include "fsdp/data/token_source.h"

namespace fsdp::data {

struct TokenDatasetOptions {
  std::int64_t context = 128;         // tokens a sequence
  double validation_fraction = 0.05;  // of each file, from its end
  std::uint64_t seed = 0;
  std::int64_t vocabulary = 256;      // ids are below
  std::vector<double> weights;        // [file], of any scale; empty: in proportion to the training tokens
  bool mask_document_starts = false;  // no loss for the first token of a document after another document's last
};

class TokenDataset {
 public:
  // Files as TokenSource takes them. Throws UsageError naming a file that cannot be used or is too short for a sequence
  // in either part, and for options that do not fit.
  TokenDataset(const std::vector<std::string>& files, const TokenDatasetOptions& options);

  // Training samples [first_position, first_position + count).
  [[nodiscard]] TokenBatch train_batch(std::int64_t first_position, std::int64_t count) const;
  // How many of their targets are not kIgnoredTarget; reads no tokens.
  [[nodiscard]] std::int64_t count_targets(std::int64_t first_position, std::int64_t count) const;
  // Sequences [first, first + count) out of `total` that lie evenly over what is held out of all files.
  [[nodiscard]] TokenBatch validation_batch(std::int64_t first, std::int64_t count, std::int64_t total) const;

  [[nodiscard]] std::int64_t train_tokens() const;
  [[nodiscard]] std::int64_t validation_tokens() const;
  // Every token is a byte of text: all files are read as bytes, or hold one byte a token.
  [[nodiscard]] bool bytes_only() const;
  // One line in all, then one a file; no newline at the end.
  [[nodiscard]] std::string describe() const;

 private:
  struct Part {
    TokenSource source;
    std::int64_t split = 0;    // tokens before it are for training, the rest is held out
    std::int64_t windows = 0;  // training samples of an epoch
    std::int64_t slack = 0;    // training tokens that one epoch leaves out
    [[nodiscard]] std::int64_t held_out() const { return source.token_count() - split; }
  };
  struct Window {
    const TokenSource* source;
    std::int64_t first;  // token
  };

  [[nodiscard]] std::int64_t choose_split(const TokenSource& source) const;
  void check_part(const TokenSource& source, const char* part, std::int64_t tokens) const;
  [[nodiscard]] Window train_window(std::int64_t position) const;
  [[nodiscard]] Window validation_window(std::int64_t sample, std::int64_t total) const;
  template <typename Locate>
  [[nodiscard]] TokenBatch read(std::int64_t count, const Locate& locate) const;
  // Calls ignore(i) for each target i of the window that begins another document.
  template <typename Ignore>
  void find_document_starts(const Window& window, const Ignore& ignore) const;

  TokenDatasetOptions options_;
  std::vector<Part> parts_;
  std::optional<Mixture> mixture_;  // always there after the constructor
};

}  // namespace fsdp::data
