#include "apps/fsdp/data_inspect.h"

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <unordered_set>

#include "fsdp/base/check.h"
#include "fsdp/data/token_source.h"

namespace fsdp::app {
namespace {

struct Lengths {
  std::int64_t shortest = 0, longest = 0;  // tokens of a document
};

Lengths measure_documents(const data::TokenSource& source) {
  Lengths lengths{source.token_count(), 0};
  std::int64_t start = 0;
  for (std::int64_t document = 0; document < source.document_count(); ++document) {
    const auto end = source.document_start(document + 1);
    lengths.shortest = std::min(lengths.shortest, end - start);
    lengths.longest = std::max(lengths.longest, end - start);
    start = end;
  }
  return lengths;
}

struct Ids {
  std::int64_t largest = 0, distinct = 0;
};

Ids scan_tokens(const data::TokenSource& source) {
  constexpr std::int64_t kBlock = 1 << 16, kInBitmap = std::int64_t{1} << 28;  // a bitmap of at most 32 MiB
  std::vector<bool> seen(1 << 16);
  std::unordered_set<std::int64_t> seen_beyond;
  std::vector<std::int64_t> block;
  Ids ids;
  for (std::int64_t first = 0; first < source.token_count(); first += kBlock) {
    block.resize(static_cast<std::size_t>(std::min(kBlock, source.token_count() - first)));
    source.read(first, block);
    ids.largest = std::max(ids.largest, std::ranges::max(block));
    const auto needed = static_cast<std::size_t>(std::min(ids.largest + 1, kInBitmap));
    if (seen.size() < needed) seen.resize(std::max(needed, 2 * seen.size()));
    for (const auto token : block) {
      if (token < kInBitmap) {
        seen[static_cast<std::size_t>(token)] = true;
      } else {
        seen_beyond.insert(token);
      }
    }
  }
  ids.distinct = std::ranges::count(seen, true) + static_cast<std::int64_t>(seen_beyond.size());
  return ids;
}

}  // namespace

std::string data_inspect(const DataInspectOptions& options) {
  FSDP_CHECK(!options.files.empty(), UsageError, "expected the prefix of at least one pair of token files");
  std::string text;
  for (const auto& file : options.files) {
    const data::TokenSource source(file);
    const auto lengths = measure_documents(source);
    const auto ids = scan_tokens(source);
    const auto mean = static_cast<double>(source.token_count()) / static_cast<double>(source.document_count());
    if (!text.empty()) text += "\n";
    if (options.json) {
      text += nlohmann::ordered_json{{"file", file},
                                     {"kind", source.is_indexed() ? "indexed" : "bytes"},
                                     {"dtype", data::to_string(source.dtype())},
                                     {"documents", source.document_count()},
                                     {"sequences", source.sequence_count()},
                                     {"tokens", source.token_count()},
                                     {"shortest_document", lengths.shortest},
                                     {"mean_document", mean},
                                     {"longest_document", lengths.longest},
                                     {"largest_token", ids.largest},
                                     {"distinct_tokens", ids.distinct}}
                  .dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
      continue;
    }
    text += fmt::format(
        "{}: {} of {}\n"
        "  tokens     {}\n"
        "  documents  {}, shortest {}, mean {:.1f}, longest {} tokens\n"
        "  sequences  {}\n"
        "  token ids  {} distinct, the largest is {}",
        file, source.is_indexed() ? "indexed pair" : "bytes", data::to_string(source.dtype()), source.token_count(),
        source.document_count(), lengths.shortest, mean, lengths.longest, source.sequence_count(), ids.distinct,
        ids.largest);
  }
  return text;
}

}  // namespace fsdp::app
