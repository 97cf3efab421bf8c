#include "apps/fsdp/text_dataset.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <fstream>

#include "fsdp/base/check.h"

namespace fsdp::app {
namespace {

// The finaliser of splitmix64: a bijection that scatters neighbouring numbers.
std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

std::string read_file(const std::string& path) {
  FSDP_CHECK(std::filesystem::exists(path), UsageError, "data.files: {} does not exist", path);
  FSDP_CHECK(std::filesystem::is_regular_file(path), UsageError, "data.files: {} is not a file", path);
  const auto size = std::filesystem::file_size(path);
  FSDP_CHECK(size > 0, UsageError, "data.files: {} is empty", path);
  std::string text(size, '\0');
  std::ifstream file(path, std::ios::binary);
  file.read(text.data(), static_cast<std::streamsize>(size));
  FSDP_CHECK(file.good(), UsageError, "data.files: {} cannot be read", path);
  return text;
}

TextBatch make_batch(std::string_view text, const std::vector<std::size_t>& starts, std::int64_t context) {
  const auto sequences = static_cast<std::int64_t>(starts.size());
  TextBatch batch{at::empty({sequences, context}, at::kLong), at::empty({sequences, context}, at::kLong)};
  auto* token = batch.tokens.mutable_data_ptr<std::int64_t>();
  auto* target = batch.targets.mutable_data_ptr<std::int64_t>();
  const auto byte = [](char c) { return static_cast<std::int64_t>(static_cast<unsigned char>(c)); };
  for (const auto start : starts) {
    const auto bytes = text.substr(start, static_cast<std::size_t>(context) + 1);
    token = std::transform(bytes.begin(), bytes.end() - 1, token, byte);
    target = std::transform(bytes.begin() + 1, bytes.end(), target, byte);
  }
  return batch;
}

}  // namespace

TextDataset::TextDataset(const std::vector<std::string>& files, const TextDatasetOptions& options) : options_(options) {
  for (const auto& file : files) text_ += read_file(file);
  train_size_ = static_cast<std::size_t>(static_cast<double>(text_.size()) * (1.0 - options.validation_fraction));
  const auto check = [&](const char* part, std::size_t size) {
    FSDP_CHECK(size >= static_cast<std::size_t>(options.context) + 1, UsageError,
               "data.files: {} of {} bytes of {} are for {}, but one sequence needs run.context + 1 = {}; give more "
               "text or a shorter context",
               size, text_.size(), files.empty() ? "no file" : files.front(), part, options.context + 1);
  };
  check("training", train_text().size());
  check("validation", validation_text().size());
}

TextBatch TextDataset::train_batch(std::int64_t step, std::int64_t first, std::int64_t count) const {
  const auto choices = train_size_ - static_cast<std::size_t>(options_.context);
  std::vector<std::size_t> starts;
  for (std::int64_t i = first; i < first + count; ++i) {
    starts.push_back(mix(mix(mix(options_.seed) + static_cast<std::uint64_t>(step)) + static_cast<std::uint64_t>(i)) %
                     choices);
  }
  return make_batch(train_text(), starts, options_.context);
}

TextBatch TextDataset::validation_batch(std::int64_t first, std::int64_t count, std::int64_t total) const {
  const auto last = validation_text().size() - static_cast<std::size_t>(options_.context) - 1;
  std::vector<std::size_t> starts;
  for (std::int64_t i = first; i < first + count; ++i) {
    starts.push_back(total == 1 ? 0 : last * static_cast<std::size_t>(i) / static_cast<std::size_t>(total - 1));
  }
  return make_batch(validation_text(), starts, options_.context);
}

}  // namespace fsdp::app
