#include "fsdp/data/token_dataset.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/data/hash.h"
#include "fsdp/data/permutation.h"

namespace fsdp::data {
namespace {

constexpr std::uint64_t kShuffle = 1, kShift = 2;  // what a number is drawn for

// floor(a * b / c) without overflow; all are at least 0.
std::int64_t scale(std::int64_t a, std::int64_t b, std::int64_t c) {
  using Wide = unsigned __int128;
  return static_cast<std::int64_t>(static_cast<Wide>(a) * static_cast<Wide>(b) / static_cast<Wide>(c));
}

}  // namespace

TokenDataset::TokenDataset(const std::vector<std::string>& files, const TokenDatasetOptions& options)
    : options_(options) {
  FSDP_CHECK(!files.empty(), UsageError, "expected at least one file of tokens");
  FSDP_CHECK(options.context >= 1, UsageError, "a context of {} tokens: expected 1 or more", options.context);
  FSDP_CHECK(options.validation_fraction > 0 && options.validation_fraction < 1, UsageError,
             "a validation fraction of {}: expected more than 0 and less than 1", options.validation_fraction);
  FSDP_CHECK(options.weights.empty() || options.weights.size() == files.size(), UsageError,
             "expected one weight a file: {} for {} files", options.weights.size(), files.size());
  for (const auto& file : files) {
    Part part{TokenSource(file, options.vocabulary)};
    part.split = choose_split(part.source);
    check_part(part.source, "training", part.split);
    check_part(part.source, "validation", part.held_out());
    part.windows = (part.split - 1) / options.context;
    part.slack = (part.split - 1) % options.context;
    parts_.push_back(std::move(part));
  }
  auto weights = options.weights;
  if (weights.empty()) {
    for (const auto& part : parts_) weights.push_back(static_cast<double>(part.split));
  }
  mixture_.emplace(weights);
}

std::int64_t TokenDataset::choose_split(const TokenSource& source) const {
  const auto tokens = source.token_count();
  const auto wanted = static_cast<std::int64_t>(static_cast<double>(tokens) * (1.0 - options_.validation_fraction));
  if (source.document_count() < 2) return wanted;
  // Between two documents, when that leaves a sequence on both sides and about as much held out as was asked for.
  const auto asked = tokens - wanted;
  const auto least = std::max(options_.context + 1, tokens - 2 * asked);
  const auto most = std::min(tokens - options_.context - 1, tokens - asked / 2);
  const auto above = source.document_start(source.document_from(std::max(wanted, least)));
  const auto below_limit = std::min(wanted, most);
  auto document = source.document_from(below_limit);
  if (source.document_start(document) > below_limit) --document;
  const auto below = document < 0 ? 0 : source.document_start(document);
  const bool above_fits = above <= most, below_fits = below >= least && below <= most;
  if (above_fits && (!below_fits || above - wanted < wanted - below)) return above;
  return below_fits ? below : wanted;
}

void TokenDataset::check_part(const TokenSource& source, const char* part, std::int64_t tokens) const {
  FSDP_CHECK(
      tokens >= options_.context + 1, UsageError,
      "{}: {} of {} tokens are for {}, but one sequence needs context + 1 = {}; give more text, a shorter context "
      "or another validation fraction (it is {})",
      source.name(), tokens, source.token_count(), part, options_.context + 1, options_.validation_fraction);
}

TokenDataset::Window TokenDataset::train_window(std::int64_t position) const {
  const auto [source, number] = mixture_->at(position);
  const auto& part = parts_[static_cast<std::size_t>(source)];
  const auto epoch = number / part.windows;
  const auto key = [&](std::uint64_t purpose) {
    return hash({options_.seed, static_cast<std::uint64_t>(source), static_cast<std::uint64_t>(epoch), purpose});
  };
  const auto window = Permutation(part.windows, key(kShuffle))(number % part.windows);
  // Windows lie side by side; where the first one begins changes, so that no token is left out in every epoch.
  const auto shift = key(kShift) % static_cast<std::uint64_t>(part.slack + 1);
  return {&part.source, window * options_.context + static_cast<std::int64_t>(shift)};
}

TokenDataset::Window TokenDataset::validation_window(std::int64_t sample, std::int64_t total) const {
  const auto all = validation_tokens();
  std::int64_t held_out = 0, begin = 0;  // tokens and samples of the parts before
  for (const auto& part : parts_) {
    held_out += part.held_out();
    const auto end = scale(total, held_out, all);
    if (sample < end) {
      const auto last = part.held_out() - options_.context - 1, intervals = end - begin - 1;
      return {&part.source, part.split + (intervals == 0 ? 0 : scale(last, sample - begin, intervals))};
    }
    begin = end;
  }
  detail::fail<InternalError>("internal error: validation sequence {} of {} lies nowhere", sample, total);
}

template <typename Ignore>
void TokenDataset::find_document_starts(const Window& window, const Ignore& ignore) const {
  const auto& source = *window.source;
  const auto documents = source.document_count();
  std::int64_t before = window.first;
  for (auto document = source.document_from(window.first + 1); document < documents; ++document) {
    const auto start = source.document_start(document);
    if (start > window.first + options_.context) return;
    if (start != before) ignore(start - window.first - 1);  // empty documents begin where the next one does
    before = start;
  }
}

template <typename Locate>
TokenBatch TokenDataset::read(std::int64_t count, const Locate& locate) const {
  FSDP_CHECK(count >= 0, UsageError, "a batch of {} sequences", count);
  const auto context = options_.context;
  const auto elements = static_cast<std::size_t>(count * context);
  TokenBatch batch{count, context, std::vector<std::int64_t>(elements), std::vector<std::int64_t>(elements)};
  for (std::int64_t i = 0; i < count; ++i) {
    const Window window = locate(i);
    const auto row = [&](std::vector<std::int64_t>& all) {
      return std::span(all).subspan(static_cast<std::size_t>(i * context), static_cast<std::size_t>(context));
    };
    window.source->read(window.first, row(batch.tokens));
    const auto targets = row(batch.targets);
    window.source->read(window.first + 1, targets);
    if (options_.mask_document_starts) {
      find_document_starts(window, [&](std::int64_t at) { targets[static_cast<std::size_t>(at)] = kIgnoredTarget; });
    }
  }
  return batch;
}

TokenBatch TokenDataset::train_batch(std::int64_t first_position, std::int64_t count) const {
  return read(count, [&](std::int64_t i) { return train_window(first_position + i); });
}

std::int64_t TokenDataset::count_targets(std::int64_t first_position, std::int64_t count) const {
  std::int64_t targets = count * options_.context;
  if (!options_.mask_document_starts) return targets;
  for (std::int64_t i = 0; i < count; ++i) {
    find_document_starts(train_window(first_position + i), [&](std::int64_t) { --targets; });
  }
  return targets;
}

TokenBatch TokenDataset::validation_batch(std::int64_t first, std::int64_t count, std::int64_t total) const {
  FSDP_CHECK(first >= 0 && count >= 0 && first <= total - count, UsageError,
             "{} validation sequences from {} on were asked for, out of {}", count, first, total);
  return read(count, [&](std::int64_t i) { return validation_window(first + i, total); });
}

std::int64_t TokenDataset::train_tokens() const {
  std::int64_t tokens = 0;
  for (const auto& part : parts_) tokens += part.split;
  return tokens;
}

std::int64_t TokenDataset::validation_tokens() const {
  std::int64_t tokens = 0;
  for (const auto& part : parts_) tokens += part.held_out();
  return tokens;
}

bool TokenDataset::bytes_only() const {
  return std::ranges::all_of(parts_, [](const Part& part) { return part.source.dtype() == TokenDtype::uint8; });
}

std::string TokenDataset::describe() const {
  auto text = fmt::format("{} file{} of tokens: {} for training, {} held out", parts_.size(),
                          parts_.size() == 1 ? "" : "s", train_tokens(), validation_tokens());
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    const auto& part = parts_[i];
    const auto& source = part.source;
    const auto documents = source.document_count();
    text += fmt::format("\n  {}: {} of {}, {} document{}, {} tokens for training, {} held out, share {:.4g} %",
                        source.name(), source.is_indexed() ? "indexed pair" : "bytes", to_string(source.dtype()),
                        documents, documents == 1 ? "" : "s", part.split, part.held_out(),
                        100 * mixture_->share(static_cast<std::int64_t>(i)));
    if (!options_.weights.empty()) text += fmt::format(" (weight {})", options_.weights[i]);
  }
  return text;
}

}  // namespace fsdp::data
