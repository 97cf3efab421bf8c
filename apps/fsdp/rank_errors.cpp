#include "apps/fsdp/rank_errors.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "apps/fsdp/silent_exit.h"
#include "fsdp/base/error.h"

namespace fsdp::app {
namespace {

constexpr std::size_t kLongest = 2048;  // bytes of a rank's text
constexpr int kUsage = 2;

}  // namespace

std::string merge_errors(const std::vector<std::string>& errors) {
  std::map<std::string, std::vector<std::size_t>> ranks_of;
  for (std::size_t r = 0; r < errors.size(); ++r) ranks_of[errors[r]].push_back(r);
  std::string result;
  for (const auto& [text, ranks] : ranks_of) {
    if (text.empty()) continue;
    if (!result.empty()) result += "; ";
    result += ranks.size() == errors.size()
                  ? text
                  : fmt::format("on rank{} {}: {}", ranks.size() > 1 ? "s" : "", fmt::join(ranks, ", "), text);
  }
  return result;
}

void settle_errors(const World& world, const std::string& own) {
  std::vector<int> ranks(static_cast<std::size_t>(world.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  const auto communicator = world.create_communicator(ranks, "errors");
  const auto stream = world.runtime()->make_stream("errors");
  std::string mine = own.substr(0, kLongest);
  mine.resize(kLongest, '\0');
  std::string all(kLongest * ranks.size(), '\0');
  communicator.all_gather(mine.data(), all.data(), Elements(kLongest), c10::kByte, stream, "errors");
  stream.synchronize();
  std::vector<std::string> errors;
  for (const int r : ranks) errors.emplace_back(all.substr(r * kLongest, kLongest).c_str());
  const std::string merged = merge_errors(errors);
  if (merged.empty()) return;
  if (world.rank() != Rank(0)) throw SilentExit{kUsage};
  throw UsageError(merged);
}

}  // namespace fsdp::app
