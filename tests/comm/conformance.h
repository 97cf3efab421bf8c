// What every backend that moves data must do, for tests that run over all of them.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <type_traits>
#include <vector>

#include "fsdp/base/error.h"
#include "fsdp/mesh/world.h"
#include "tests/support/ranks.h"

namespace fsdp::testing {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using ::testing::AllOf;
using ::testing::HasSubstr;

inline std::vector<int> everyone(const World& world) {
  std::vector<int> ranks(static_cast<std::size_t>(world.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// One rank's view of a test: a stream and a communicator over all ranks.
struct Member {
  explicit Member(World w, SideChannel& side_channel, const std::string& name = "all")
      : world(std::move(w)),
        side(side_channel),
        rank(static_cast<int>(world.rank().value())),
        size(world.size()),
        stream(world.runtime()->make_stream(name)),
        communicator(world.create_communicator(everyone(world), name)) {}

  World world;
  SideChannel& side;
  int rank, size;
  Stream stream;
  Communicator communicator;
};

template <typename T>
constexpr c10::ScalarType dtype_of() {
  if constexpr (std::is_same_v<T, float>)
    return c10::kFloat;
  else if constexpr (std::is_same_v<T, double>)
    return c10::kDouble;
  else if constexpr (std::is_same_v<T, c10::BFloat16>)
    return c10::kBFloat16;
  else if constexpr (std::is_same_v<T, c10::Half>)
    return c10::kHalf;
  else
    return c10::kLong;
}

template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, c10::BFloat16> || std::is_same_v<T, c10::Half>, float, T>;

// Values of mixed size and sign, so that another order of summation gives other bits.
template <typename T>
T value(int rank, std::int64_t index) {
  const auto hash =
      static_cast<std::uint32_t>(index * 2654435761u + static_cast<std::uint32_t>(rank) * 40503u + 12345u) ^
      static_cast<std::uint32_t>(index >> 3);
  const int whole = static_cast<int>(hash % 2001) - 1000;
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(whole) * 1'000'000'007;
  else
    return static_cast<T>(static_cast<float>(whole) * (hash % 3 == 0 ? 1e-3f : hash % 3 == 1 ? 1.0f / 7 : 13.7f));
}

template <typename T>
std::vector<T> values(int rank, std::int64_t count) {
  std::vector<T> result(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) result[i] = value<T>(rank, i);
  return result;
}

// The sum that the contract promises: rank order, low precision in fp32 and rounded once.
template <typename T>
T sum_in_rank_order(int size, std::int64_t index) {
  auto total = static_cast<Wide<T>>(value<T>(0, index));
  for (int r = 1; r < size; ++r) total += static_cast<Wide<T>>(value<T>(r, index));
  return static_cast<T>(total);
}

// Empty text when the bits are equal.
template <typename T>
std::string difference(const std::vector<T>& actual, const std::vector<T>& expected) {
  if (actual.size() != expected.size()) return "sizes differ";
  for (std::size_t i = 0; i < actual.size(); ++i) {
    if (std::memcmp(&actual[i], &expected[i], sizeof(T)) == 0) continue;
    return "element " + std::to_string(i) + " is " + std::to_string(static_cast<double>(actual[i])) + ", expected " +
           std::to_string(static_cast<double>(expected[i]));
  }
  return "";
}

template <typename F>
void for_each_dtype(F&& function) {
  function(float{});
  function(double{});
  function(c10::BFloat16{});
  function(c10::Half{});
  function(std::int64_t{});
}

// Elements a rank: none, one, odd, more than one block of the reduction, large (for one dtype, to keep the suite
// short).
template <typename T>
std::vector<std::int64_t> counts() {
  std::vector<std::int64_t> list = {0, 1, 2, 7, 129, 2049};
  if (std::is_same_v<T, float>) list.push_back(1 << 18);
  return list;
}

// The message of the CommunicationError that ends the work on a stream.
inline std::string failure_of(const Stream& stream) {
  try {
    stream.synchronize();
  } catch (const CommunicationError& error) {
    return error.what();
  } catch (const std::exception& error) {
    return std::string("another error: ") + error.what();
  }
  return "no error";
}

class Conformance : public ::testing::TestWithParam<int> {  // the number of ranks
 protected:
  // A test body for one rank; every collective of it runs on `Member::stream`.
  static void on_all_ranks(const std::function<void(Member&)>& body, const WorldOptions& options = {.deadline = 10s}) {
    run_on_ranks(
        GetParam(),
        [&](World world, SideChannel& side) {
          Member member(std::move(world), side);
          body(member);
          member.stream.synchronize();
        },
        options);
  }
};

class ConformanceWithPeers : public Conformance {};

inline std::string world_name(const ::testing::TestParamInfo<int>& info) {
  return backend_under_test() + "_" + std::to_string(info.param);
}

// The worlds of at least `smallest` ranks.
inline std::vector<int> worlds_from(int smallest) {
  std::vector<int> sizes = world_sizes_under_test();
  std::erase_if(sizes, [&](int size) { return size < smallest; });
  return sizes;
}

// The message of the UsageError with which a call is refused.
inline std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const UsageError& error) {
    return error.what();
  } catch (const std::exception& error) {
    return std::string("another error: ") + error.what();
  }
  return "accepted";
}

}  // namespace fsdp::testing
