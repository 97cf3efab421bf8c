#include "apps/fsdp/rank_errors.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <sstream>

#include "apps/fsdp/silent_exit.h"
#include "fsdp/base/error.h"

namespace fsdp::app {
namespace {

constexpr int kUsage = 2;
constexpr std::size_t kMostDifferences = 5;  // told; the first ones are enough to see what happened

// Every rank's text, [rank], on all ranks.
std::vector<std::string> gather(const World& world, const std::string& own) {
  std::vector<int> ranks(static_cast<std::size_t>(world.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  const World hosts = world.host();
  const auto communicator = hosts.create_communicator(ranks, "settle");
  const auto stream = hosts.runtime()->make_stream("settle");
  auto longest = static_cast<std::int64_t>(own.size());
  communicator.all_reduce(&longest, &longest, Elements(1), c10::kLong, ReduceOp::max, stream, "settle lengths");
  stream.synchronize();
  std::string mine = own;
  mine.resize(static_cast<std::size_t>(longest), '\0');
  std::string all(mine.size() * ranks.size(), '\0');
  communicator.all_gather(mine.data(), all.data(), Elements(longest), c10::kByte, stream, "settle texts");
  stream.synchronize();
  std::vector<std::string> texts;
  for (const int r : ranks) {
    const auto text = all.substr(static_cast<std::size_t>(r) * mine.size(), mine.size());
    texts.push_back(text.substr(0, text.find('\0')));
  }
  return texts;
}

void stop_if(const World& world, const std::string& message) {
  if (message.empty()) return;
  if (world.rank() != Rank(0)) throw SilentExit{kUsage};
  throw UsageError(message);
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

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

std::string describe_differences(const std::vector<std::string>& texts) {
  const auto expected = lines_of(texts[0]);
  std::vector<std::string> differences;
  for (std::size_t r = 1; r < texts.size(); ++r) {
    if (texts[r] == texts[0]) continue;
    const auto lines = lines_of(texts[r]);
    for (std::size_t i = 0; i < std::max(lines.size(), expected.size()); ++i) {
      const std::string mine = i < lines.size() ? lines[i] : "nothing";
      const std::string first = i < expected.size() ? expected[i] : "nothing";
      if (mine != first) differences.push_back(fmt::format("{} on rank 0, {} on rank {}", first, mine, r));
    }
  }
  if (differences.empty()) return "";
  const bool more = differences.size() > kMostDifferences;
  if (more) differences.resize(kMostDifferences);
  return fmt::format("the ranks were started with different settings or data: {}{}", fmt::join(differences, "; "),
                     more ? "; and more" : "");
}

void settle_errors(const World& world, const std::string& own) { stop_if(world, merge_errors(gather(world, own))); }

void settle_differences(const World& world, const std::string& own) {
  stop_if(world, describe_differences(gather(world, own)));
}

}  // namespace fsdp::app
