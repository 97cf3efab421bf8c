// Plain text as bytes: the last part is held out, sequences of the rest are drawn at random.
//
// Which bytes sequence i of step s holds is a pure function of (seed, s, i), so neither the number of ranks nor the
// microbatches change what a step trains on. Read once, then shared by all ranks: const calls from any thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp::app {

struct TextDatasetOptions {
  std::int64_t context = 128;  // tokens a sequence
  double validation_fraction = 0.05;
  std::uint64_t seed = 0;
};

// int64 tensors (sequence, position); a target is the byte after its token.
struct TextBatch {
  at::Tensor tokens, targets;
};

class TextDataset {
 public:
  static constexpr std::int64_t kVocabulary = 256;

  // The files joined in the order given. Throws UsageError naming a file that is missing, unreadable or empty, and
  // texts too short for one sequence.
  TextDataset(const std::vector<std::string>& files, const TextDatasetOptions& options);

  // Sequences [first, first + count) of a step.
  [[nodiscard]] TextBatch train_batch(std::int64_t step, std::int64_t first, std::int64_t count) const;

  // Sequences [first, first + count) out of `total` that lie evenly over the held-out text.
  [[nodiscard]] TextBatch validation_batch(std::int64_t first, std::int64_t count, std::int64_t total) const;

  [[nodiscard]] std::string_view train_text() const { return std::string_view(text_).substr(0, train_size_); }
  [[nodiscard]] std::string_view validation_text() const { return std::string_view(text_).substr(train_size_); }

 private:
  TextDatasetOptions options_;
  std::string text_;
  std::size_t train_size_ = 0;
};

}  // namespace fsdp::app
