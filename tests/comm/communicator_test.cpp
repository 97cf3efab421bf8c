#include "fsdp/comm/communicator.h"

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "fsdp/base/error.h"
#include "fsdp/mesh/device_mesh.h"
#include "fsdp/mesh/run_ranks.h"
#include "fsdp/mesh/world.h"

namespace fsdp::testing {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using ::testing::AllOf;
using ::testing::HasSubstr;

// ---- Conformance: what every backend that moves data must do. A backend joins by one function that calls `rank_main`
// once a rank and throws the first error.

using RunRanks = void (*)(int size, const std::function<void(World)>& rank_main, const WorldOptions& options);

struct Subject {
  const char* backend;
  RunRanks run;
  int world;
};

void PrintTo(const Subject& subject, std::ostream* out) { *out << subject.world << " ranks on " << subject.backend; }

std::vector<Subject> subjects(int smallest_world) {
  std::vector<Subject> all;
  for (int world = smallest_world; world <= 5; ++world) all.push_back({"threads", &run_ranks, world});
  return all;
}

std::vector<int> everyone(const World& world) {
  std::vector<int> ranks(static_cast<std::size_t>(world.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// One rank's view of a test: a stream and a communicator over all ranks.
struct Member {
  explicit Member(World w, const std::string& name = "all")
      : world(std::move(w)),
        rank(static_cast<int>(world.rank().value())),
        size(world.size()),
        stream(world.runtime()->make_stream(name)),
        communicator(world.create_communicator(everyone(world), name)) {}

  World world;
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
std::string failure_of(const Stream& stream) {
  try {
    stream.synchronize();
  } catch (const CommunicationError& error) {
    return error.what();
  } catch (const std::exception& error) {
    return std::string("another error: ") + error.what();
  }
  return "no error";
}

class Conformance : public ::testing::TestWithParam<Subject> {
 protected:
  // A test body for one rank; every collective of it runs on `Member::stream`.
  static void on_all_ranks(const std::function<void(Member&)>& body, const WorldOptions& options = {.deadline = 10s}) {
    GetParam().run(
        GetParam().world,
        [&](World world) {
          Member member(std::move(world));
          body(member);
          member.stream.synchronize();
        },
        options);
  }
};

class ConformanceWithPeers : public Conformance {};

std::string subject_name(const ::testing::TestParamInfo<Subject>& info) {
  return std::string(info.param.backend) + "_" + std::to_string(info.param.world);
}

INSTANTIATE_TEST_SUITE_P(Backends, Conformance, ::testing::ValuesIn(subjects(1)), subject_name);
INSTANTIATE_TEST_SUITE_P(Backends, ConformanceWithPeers, ::testing::ValuesIn(subjects(2)), subject_name);

TEST_P(Conformance, KnowsItsPlace) {
  std::vector<std::atomic<int>> seen(static_cast<std::size_t>(GetParam().world));
  on_all_ranks([&](Member& m) {
    EXPECT_EQ(m.communicator.size(), GetParam().world);
    EXPECT_EQ(m.communicator.rank(), m.world.rank());
    EXPECT_EQ(m.communicator.name(), "all");
    ++seen[m.rank];
  });
  for (const auto& count : seen) EXPECT_EQ(count, 1);
}

TEST_P(Conformance, AllGatherPlacesEveryShareInRankOrder) {
  on_all_ranks([](Member& m) {
    for_each_dtype([&](auto type) {
      using T = decltype(type);
      for (auto count : counts<T>()) {
        const auto mine = values<T>(m.rank, count);
        std::vector<T> expected, all(count * m.size), in_place(count * m.size);
        for (int r = 0; r < m.size; ++r) {
          const auto share = values<T>(r, count);
          expected.insert(expected.end(), share.begin(), share.end());
        }
        m.communicator.all_gather(mine.data(), all.data(), Elements(count), dtype_of<T>(), m.stream, "out of place");
        std::copy(mine.begin(), mine.end(), in_place.begin() + m.rank * count);
        m.communicator.all_gather(in_place.data() + m.rank * count, in_place.data(), Elements(count), dtype_of<T>(),
                                  m.stream, "in place");
        m.stream.synchronize();
        EXPECT_EQ(difference(all, expected), "") << count;
        EXPECT_EQ(difference(in_place, expected), "") << count << " in place";
      }
    });
  });
}

TEST_P(Conformance, ReduceScatterSumsItsShareInRankOrder) {
  on_all_ranks([](Member& m) {
    for_each_dtype([&](auto type) {
      using T = decltype(type);
      for (auto count : counts<T>()) {
        auto send = values<T>(m.rank, count * m.size);
        const auto untouched = send;
        std::vector<T> share(count), expected(count);
        for (std::int64_t i = 0; i < count; ++i) expected[i] = sum_in_rank_order<T>(m.size, m.rank * count + i);
        m.communicator.reduce_scatter(send.data(), share.data(), Elements(count), dtype_of<T>(), m.stream,
                                      "out of place");
        m.stream.synchronize();
        EXPECT_EQ(difference(share, expected), "") << count;
        EXPECT_EQ(difference(send, untouched), "") << count;
        m.communicator.reduce_scatter(send.data(), send.data() + m.rank * count, Elements(count), dtype_of<T>(),
                                      m.stream, "in place");
        m.stream.synchronize();
        EXPECT_EQ(
            difference(std::vector<T>(send.begin() + m.rank * count, send.begin() + (m.rank + 1) * count), expected),
            "")
            << count << " in place";
      }
    });
  });
}

TEST_P(Conformance, AllReduceSumsInRankOrderOnEveryRank) {
  on_all_ranks([](Member& m) {
    for_each_dtype([&](auto type) {
      using T = decltype(type);
      for (auto count : counts<T>()) {
        auto send = values<T>(m.rank, count);
        std::vector<T> sums(count), expected(count);
        for (std::int64_t i = 0; i < count; ++i) expected[i] = sum_in_rank_order<T>(m.size, i);
        m.communicator.all_reduce(send.data(), sums.data(), Elements(count), dtype_of<T>(), ReduceOp::sum, m.stream,
                                  "out of place");
        m.communicator.all_reduce(send.data(), send.data(), Elements(count), dtype_of<T>(), ReduceOp::sum, m.stream,
                                  "in place");
        m.stream.synchronize();
        EXPECT_EQ(difference(sums, expected), "") << count;
        EXPECT_EQ(difference(send, expected), "") << count << " in place";
      }
    });
  });
}

TEST_P(Conformance, AllReduceFindsTheMaximum) {
  on_all_ranks([](Member& m) {
    for_each_dtype([&](auto type) {
      using T = decltype(type);
      for (auto count : counts<T>()) {
        auto data = values<T>(m.rank, count);
        std::vector<T> expected(count);
        for (std::int64_t i = 0; i < count; ++i) {
          expected[i] = value<T>(0, i);
          for (int r = 1; r < m.size; ++r)
            expected[i] =
                static_cast<T>(std::max(static_cast<Wide<T>>(expected[i]), static_cast<Wide<T>>(value<T>(r, i))));
        }
        m.communicator.all_reduce(data.data(), data.data(), Elements(count), dtype_of<T>(), ReduceOp::max, m.stream,
                                  "max");
        m.stream.synchronize();
        EXPECT_EQ(difference(data, expected), "") << count;
      }
    });
  });
}

TEST_P(Conformance, TheMaximumOfANotANumberIsNotANumberFromWhicheverRank) {
  on_all_ranks([](Member& m) {
    for (int root = 0; root < m.size; ++root) {
      float data[2] = {m.rank == root ? std::numeric_limits<float>::quiet_NaN() : 1e9f, static_cast<float>(m.rank)};
      m.communicator.all_reduce(data, data, Elements(2), c10::kFloat, ReduceOp::max, m.stream, "max");
      m.stream.synchronize();
      EXPECT_TRUE(data[0] != data[0]) << root;
      EXPECT_EQ(data[1], static_cast<float>(m.size - 1));
    }
  });
}

TEST_P(Conformance, LowPrecisionSumsAreRoundedOnce) {
  on_all_ranks([](Member& m) {
    // 256 + 1 + 1 ...: each step alone rounds back to 256 in bf16; 2048 likewise in fp16.
    c10::BFloat16 brain = m.rank == 0 ? 256.0f : 1.0f;
    c10::Half half = m.rank == 0 ? 2048.0f : 1.0f;
    m.communicator.all_reduce(&brain, &brain, Elements(1), c10::kBFloat16, ReduceOp::sum, m.stream, "bf16");
    m.communicator.all_reduce(&half, &half, Elements(1), c10::kHalf, ReduceOp::sum, m.stream, "fp16");
    m.stream.synchronize();
    EXPECT_EQ(static_cast<float>(brain), static_cast<float>(c10::BFloat16(256.0f + static_cast<float>(m.size - 1))));
    EXPECT_EQ(static_cast<float>(half), static_cast<float>(c10::Half(2048.0f + static_cast<float>(m.size - 1))));
    if (m.size >= 3) {
      EXPECT_GT(static_cast<float>(brain), 256.0f);
      EXPECT_GT(static_cast<float>(half), 2048.0f);
    }
  });
}

TEST(ConformanceValues, GiveOtherBitsWhenSummedInAnotherOrder) {
  int different = 0;
  for (std::int64_t i = 0; i < 2049; ++i) {
    float backwards = value<float>(4, i);
    for (int r = 3; r >= 0; --r) backwards += value<float>(r, i);
    different += backwards != sum_in_rank_order<float>(5, i);
  }
  EXPECT_GT(different, 100);
}

TEST_P(Conformance, BroadcastReachesAllFromEachRoot) {
  on_all_ranks([](Member& m) {
    for_each_dtype([&](auto type) {
      using T = decltype(type);
      for (auto count : counts<T>()) {
        for (int root = 0; root < m.size; ++root) {
          auto data = m.rank == root ? values<T>(root + 10, count) : values<T>(m.rank, count);
          m.communicator.broadcast(data.data(), Elements(count), dtype_of<T>(), Rank(root), m.stream, "weights");
          m.stream.synchronize();
          EXPECT_EQ(difference(data, values<T>(root + 10, count)), "") << count << " from " << root;
        }
      }
    });
  });
}

TEST_P(Conformance, AllToAllMovesUnevenAndEmptyParts) {
  on_all_ranks([](Member& m) {
    for (std::int64_t scale : {0, 1, 3, 997}) {
      const auto part = [&](int from, int to) { return (from + 2 * to) % 3 * scale; };  // a third of the parts is empty
      std::vector<std::int64_t> send_counts, receive_counts;
      std::vector<double> send, expected;
      for (int r = 0; r < m.size; ++r) {
        send_counts.push_back(part(m.rank, r));
        receive_counts.push_back(part(r, m.rank));
        for (std::int64_t i = 0; i < part(m.rank, r); ++i)
          send.push_back(m.rank * 1e6 + r * 1e4 + static_cast<double>(i));
        for (std::int64_t i = 0; i < part(r, m.rank); ++i)
          expected.push_back(r * 1e6 + m.rank * 1e4 + static_cast<double>(i));
      }
      std::vector<double> received(expected.size(), -1.0);
      m.communicator.all_to_all_v(send.data(), send_counts, received.data(), receive_counts, c10::kDouble, m.stream,
                                  "tokens");
      m.stream.synchronize();
      EXPECT_EQ(difference(received, expected), "") << scale;
    }
  });
}

TEST_P(ConformanceWithPeers, MessagesTravelAroundARingInOrder) {
  on_all_ranks(
      [](Member& m) {
        const Stream receiving = m.world.runtime()->make_stream("receiving");
        const int next = (m.rank + 1) % m.size, previous = (m.rank + m.size - 1) % m.size;
        for (std::int64_t count : {301, 1, 0, -1}) {  // -1: one element, with messages allowed to run inline
          if (count < 0) {
            count = 1;
            m.communicator.set_inline_limit(Bytes(64 * 1024));
          }
          constexpr int kMessages = 5;
          std::vector<std::vector<std::int64_t>> out, in;
          for (int i = 0; i < kMessages; ++i) {
            out.push_back(values<std::int64_t>(m.rank * 10 + i, count));
            in.emplace_back(count);
          }
          for (int i = 0; i < kMessages; ++i) {
            m.communicator.send(out[i].data(), Elements(count), c10::kLong, Rank(next), m.stream, "ring");
            m.communicator.receive(in[i].data(), Elements(count), c10::kLong, Rank(previous), receiving, "ring");
          }
          m.stream.synchronize();
          receiving.synchronize();
          for (int i = 0; i < kMessages; ++i)
            EXPECT_EQ(difference(in[i], values<std::int64_t>(previous * 10 + i, count)), "") << i;
        }
      },
      {.deadline = 2s});
}

TEST_P(ConformanceWithPeers, CallsOnlyEnqueueWhateverTheirSize) {
  std::atomic<int> returned = 0;
  on_all_ranks(
      [&](Member& m) {
        const float mine = 0;
        std::vector<float> all(m.size);
        for (int i = 0; i < 3; ++i) {
          // The others come only after rank 0's call has returned.
          for (int seen = returned; m.rank != 0 && seen <= i; seen = returned) returned.wait(seen);
          if (i == 0) m.communicator.all_gather(&mine, all.data(), Elements(1), c10::kFloat, m.stream, "one");
          if (i == 1) m.communicator.all_gather(&mine, all.data(), Elements(0), c10::kFloat, m.stream, "none");
          if (i == 2) m.communicator.barrier(m.stream, "barrier");
          if (m.rank == 0) {
            ++returned;
            returned.notify_all();
          }
          EXPECT_EQ(failure_of(m.stream), "no error");
        }
        m.stream.reset();
      },
      {.deadline = 500ms});
}

TEST_P(Conformance, NobodyLeavesABarrierBeforeTheLastHasCome) {
  std::atomic<int> arrived = 0;
  on_all_ranks([&](Member& m) {
    for (int round = 1; round <= 50; ++round) {
      ++arrived;
      m.communicator.barrier(m.stream, "round");
      m.stream.synchronize();
      EXPECT_GE(arrived.load(), round * m.size);
      m.communicator.barrier(m.stream, "next round");
      m.stream.synchronize();
    }
  });
}

TEST_P(Conformance, ManyOperationsInFlightOnTwoCommunicatorsAndTwoStreams) {
  on_all_ranks([](Member& m) {
    Member other(m.world, "other");
    constexpr int kRounds = 100;
    constexpr std::int64_t kCount = 33;
    std::vector<std::vector<float>> gathered(kRounds, std::vector<float>(kCount * m.size)), reduced(kRounds),
        mine(kRounds);
    for (int i = 0; i < kRounds; ++i) {
      mine[i] = values<float>(m.rank + 10 * i, kCount);
      reduced[i] = mine[i];
    }
    for (int i = 0; i < kRounds; ++i) {
      m.communicator.all_gather(mine[i].data(), gathered[i].data(), Elements(kCount), c10::kFloat, m.stream, "gather");
      other.communicator.all_reduce(reduced[i].data(), reduced[i].data(), Elements(kCount), c10::kFloat, ReduceOp::sum,
                                    other.stream, "reduce");
    }
    m.stream.synchronize();
    other.stream.synchronize();
    for (int i = 0; i < kRounds; ++i) {
      std::vector<float> shares, sums = values<float>(10 * i, kCount);
      for (int r = 0; r < m.size; ++r) {
        const auto share = values<float>(r + 10 * i, kCount);
        shares.insert(shares.end(), share.begin(), share.end());
        for (std::int64_t e = 0; r > 0 && e < kCount; ++e) sums[e] += share[e];
      }
      EXPECT_EQ(difference(gathered[i], shares), "") << i;
      EXPECT_EQ(difference(reduced[i], sums), "") << i;
    }
  });
}

TEST_P(Conformance, OperationsOnOneStreamSeeEachOthersResults) {
  on_all_ranks([](Member& m) {
    std::int64_t number = m.rank == 0 ? 1 : 0;
    for (int i = 0; i < 20; ++i)
      m.communicator.all_reduce(&number, &number, Elements(1), c10::kLong, ReduceOp::sum, m.stream, "grow");
    m.stream.synchronize();
    std::int64_t expected = 1;
    for (int i = 1; i < 20; ++i) expected *= m.size;
    EXPECT_EQ(number, expected);
  });
}

TEST_P(Conformance, SmallOperationsMayRunInlineWithTheSameResult) {
  on_all_ranks([](Member& m) {
    m.communicator.set_inline_limit(Bytes(1024));
    for (std::int64_t count : {1, 16, 256, 257, 5000, 3}) {
      auto data = values<float>(m.rank, count);
      m.communicator.all_reduce(data.data(), data.data(), Elements(count), c10::kFloat, ReduceOp::sum, m.stream,
                                "mixed");
      std::vector<float> expected(count);
      for (std::int64_t i = 0; i < count; ++i) expected[i] = sum_in_rank_order<float>(m.size, i);
      m.stream.synchronize();
      EXPECT_EQ(difference(data, expected), "") << count;
    }
  });
}

TEST_P(Conformance, SubgroupsWorkSideBySide) {
  on_all_ranks([](Member& m) {
    std::vector<int> ranks;  // even and odd ranks apart
    for (int r = m.rank % 2; r < m.size; r += 2) ranks.push_back(r);
    const Communicator half = m.world.create_communicator(ranks, "half");
    std::int64_t number = m.rank + 1, expected = 0;
    for (int r : ranks) expected += r + 1;
    half.all_reduce(&number, &number, Elements(1), c10::kLong, ReduceOp::sum, m.stream, "half");
    m.stream.synchronize();
    EXPECT_EQ(number, expected);
  });
}

TEST_P(Conformance, SpansCarryLabelSequenceBytesAndTimes) {
  on_all_ranks([](Member& m) {
    auto recorder = std::make_shared<trace::Recorder>();
    m.world.runtime()->set_recorder(recorder);
    std::vector<float> data(12 * m.size);
    m.communicator.all_gather(data.data() + 12 * m.rank, data.data(), Elements(12), c10::kFloat, m.stream, "first");
    m.communicator.barrier(m.stream, "second");
    m.stream.synchronize();
    m.world.runtime()->set_recorder(nullptr);
    const auto spans = recorder->spans();
    ASSERT_EQ(spans.size(), 2u);
    EXPECT_STREQ(spans[0].name, "first");
    EXPECT_EQ(spans[0].kind, trace::Kind::all_gather);
    EXPECT_EQ(spans[0].bytes, 12 * 4 * m.size);
    EXPECT_EQ(spans[0].sequence, 1);
    EXPECT_EQ(spans[0].stream, m.stream.id());
    EXPECT_LE(spans[0].begin, spans[0].end);
    EXPECT_LE(spans[0].end, spans[1].begin);
    EXPECT_EQ(spans[1].kind, trace::Kind::barrier);
    EXPECT_EQ(spans[1].sequence, 2);
  });
}

// ---- Errors: ranks that disagree, stay away or fail. Every rank must learn of it, with names, and nothing hangs.

TEST_P(ConformanceWithPeers, DifferentCountsFailOnEveryRankWithBoth) {
  on_all_ranks([](Member& m) {
    std::vector<float> data(100);
    const bool last = m.rank == m.size - 1;
    m.communicator.all_reduce(data.data(), data.data(), Elements(last ? 5 : 4), c10::kFloat, ReduceOp::sum, m.stream,
                              "layers.0:reduce");
    EXPECT_THAT(failure_of(m.stream),
                AllOf(HasSubstr("ranks run different operations"),
                      HasSubstr("rank 0 all_reduce \"layers.0:reduce\" #1 of 4 Float"),
                      HasSubstr("rank " + std::to_string(m.size - 1) + " all_reduce \"layers.0:reduce\" #1 of 5 Float"),
                      HasSubstr("same order")));
    m.stream.reset();
  });
}

TEST_P(ConformanceWithPeers, DifferentOperationsDtypesRootsAndLabelsFailOnEveryRankWithBoth) {
  on_all_ranks([](Member& m) {
    std::vector<double> data(100);
    const bool odd = m.rank == m.size - 1;
    const std::string other = "rank " + std::to_string(m.size - 1) + " ";
    const auto expect_both = [&](const std::string& first, const std::string& second) {
      EXPECT_THAT(failure_of(m.stream), AllOf(HasSubstr("rank 0 " + first), HasSubstr(other + second)));
      m.stream.reset();
      m.communicator.reset();
    };
    const Elements one(1);
    if (odd)
      m.communicator.barrier(m.stream, "x");
    else
      m.communicator.broadcast(data.data(), one, c10::kFloat, Rank(0), m.stream, "x");
    expect_both("broadcast \"x\" #1 of 1 Float", "barrier \"x\" #1");

    m.communicator.all_gather(data.data(), data.data() + 10, one, odd ? c10::kFloat : c10::kDouble, m.stream,
                              "unshard");
    expect_both("all_gather \"unshard\" #1 of 1 Double", "all_gather \"unshard\" #1 of 1 Float");

    m.communicator.all_gather(data.data(), data.data() + 10, one, c10::kFloat, m.stream, odd ? "layers.1" : "layers.0");
    expect_both("all_gather \"layers.0\" #1", "all_gather \"layers.1\" #1");

    m.communicator.broadcast(data.data(), one, c10::kFloat, Rank(odd ? 1 : 0), m.stream, "roots");
    expect_both("broadcast \"roots\" #1", "broadcast \"roots\" #1");

    m.communicator.all_reduce(data.data(), data.data(), one, c10::kFloat, odd ? ReduceOp::max : ReduceOp::sum, m.stream,
                              "operators");
    expect_both("all_reduce \"operators\" #1", "all_reduce \"operators\" #1");

    // The right thing still works after all that.
    data[0] = 1;
    m.communicator.all_reduce(data.data(), data.data(), one, c10::kDouble, ReduceOp::sum, m.stream, "sum");
    m.stream.synchronize();
    EXPECT_EQ(data[0], m.size);
  });
}

TEST_P(ConformanceWithPeers, AllToAllCountsThatDoNotAgreeNameTheTwoRanks) {
  on_all_ranks([](Member& m) {
    std::vector<float> data(100), received(100);
    std::vector<std::int64_t> send(m.size, 2), receive(m.size, 2);
    if (m.rank == 1) receive[0] = 3;
    m.communicator.all_to_all_v(data.data(), send, received.data(), receive, c10::kFloat, m.stream, "tokens");
    EXPECT_THAT(failure_of(m.stream),
                AllOf(HasSubstr("\"tokens\""), HasSubstr("rank 0 sends 2 elements to rank 1, which expects 3")));
    m.stream.reset();
  });
}

TEST_P(ConformanceWithPeers, MessagesOfAnotherLengthThanExpectedNameBoth) {
  on_all_ranks([](Member& m) {
    std::vector<float> data(10);
    if (m.rank == 0)
      m.communicator.send(data.data(), Elements(3), c10::kFloat, Rank(1), m.stream, "left");
    else if (m.rank == 1)
      m.communicator.receive(data.data(), Elements(4), c10::kFloat, Rank(0), m.stream, "right");
    else
      return;
    EXPECT_THAT(failure_of(m.stream), AllOf(HasSubstr("rank 0 sends send_recv \"left\" #1 of 3 Float"),
                                            HasSubstr("rank 1 expects send_recv \"right\" #1 of 4 Float")));
    m.stream.reset();
  });
}

// Lets the absent rank stay away until the others have failed; gives up long after their deadline, so that a deadline
// that is not kept fails the test instead of hanging it.
class Absence {
 public:
  explicit Absence(int others) : others_(others) {}
  void failed() {
    std::lock_guard lock(mutex_);
    --others_;
    changed_.notify_all();
  }
  void stay_away(const Communicator& communicator) {
    std::unique_lock lock(mutex_);
    if (changed_.wait_for(lock, 3s, [&] { return others_ == 0; })) return;
    communicator.abort("the test's patience is at its end");
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int others_;
};

TEST_P(ConformanceWithPeers, ARankThatNeverComesIsNamedOnEveryOtherRank) {
  Absence absence(GetParam().world - 1);
  on_all_ranks(
      [&](Member& m) {
        m.communicator.barrier(m.stream, "together");
        m.stream.synchronize();
        if (m.rank == m.size - 1) return absence.stay_away(m.communicator);
        float data = 0;
        m.communicator.all_reduce(&data, &data, Elements(1), c10::kFloat, ReduceOp::sum, m.stream, "layers.3:reduce");
        EXPECT_THAT(failure_of(m.stream),
                    AllOf(HasSubstr("all_reduce \"layers.3:reduce\" #2 of 1 Float"), HasSubstr("waited 200 ms"),
                          HasSubstr("missing ranks: " + std::to_string(m.size - 1))));
        m.stream.reset();
        absence.failed();
      },
      {.deadline = 200ms});
}

TEST_P(ConformanceWithPeers, AMessageThatNeverComesNamesItsRank) {
  Absence absence(1);
  on_all_ranks(
      [&](Member& m) {
        if (m.rank == 1) return absence.stay_away(m.communicator);
        if (m.rank != 0) return;
        float data = 0;
        m.communicator.receive(&data, Elements(1), c10::kFloat, Rank(1), m.stream, "activation");
        EXPECT_THAT(failure_of(m.stream),
                    AllOf(HasSubstr("send_recv \"activation\" #1 of 1 Float"), HasSubstr("waited 200 ms for rank 1")));
        m.stream.reset();
        absence.failed();
      },
      {.deadline = 200ms});
}

TEST_P(Conformance, AnErrorThatARankThrowsComesBackAndFreesTheOthers) {
  struct OutOfData : std::runtime_error {
    using std::runtime_error::runtime_error;
  };
  const int failing = GetParam().world - 1;
  std::atomic<int> freed = 0;
  try {
    on_all_ranks([&](Member& m) {
      if (m.rank == failing) throw OutOfData("no more text");
      m.communicator.barrier(m.stream, "step");
      try {
        m.stream.synchronize();
      } catch (const CommunicationError& error) {
        EXPECT_THAT(error.what(), AllOf(HasSubstr("barrier \"step\" #1"),
                                        HasSubstr("rank " + std::to_string(failing) + " failed: no more text")));
        ++freed;
        throw;
      }
    });
    FAIL() << "no error";
  } catch (const OutOfData& error) {
    EXPECT_STREQ(error.what(), "no more text");
  }
  EXPECT_EQ(freed, GetParam().world - 1);
}

TEST_P(Conformance, AbortEndsWhatIsPendingWithItsReason) {
  on_all_ranks([](Member& m) {
    m.communicator.barrier(m.stream, "together");
    m.stream.synchronize();
    const Stream aborted = m.world.runtime()->make_stream("aborted");
    if (m.size == 1 || m.rank != 0)
      m.communicator.barrier(aborted, "step");  // pending where there are peers to wait for
    if (m.rank == 0) m.communicator.abort("the user pressed Ctrl-C");
    if (m.size == 1) m.communicator.barrier(aborted, "step");
    if (m.size > 1 && m.rank == 0) return;
    EXPECT_THAT(failure_of(aborted), HasSubstr("the user pressed Ctrl-C"));
  });
}

TEST_P(ConformanceWithPeers, AnAbortReachesRanksThatJoinAfterTheAbortingOneHasLeft) {
  std::atomic<bool> left = false;
  GetParam().run(GetParam().world,
                 [&](World world) {
                   const Stream stream = world.runtime()->make_stream("s");
                   if (world.rank() == Rank(0)) {
                     world.create_communicator(everyone(world), "all").abort("out of memory");
                     left = true;
                     left.notify_all();
                     return;
                   }
                   left.wait(false);
                   const Communicator all = world.create_communicator(everyone(world), "all");
                   all.barrier(stream, "step");
                   EXPECT_THAT(failure_of(stream), HasSubstr("out of memory"));
                 },
                 {.deadline = 500ms});
}

TEST_P(Conformance, ResetByAllRanksMakesAFailedCommunicatorUsable) {
  on_all_ranks([](Member& m) {
    for (int round = 0; round < 3; ++round) {
      m.communicator.barrier(m.stream, "good");
      m.stream.synchronize();
      m.communicator.abort("round");
      m.communicator.barrier(m.stream, "bad");
      EXPECT_THAT(failure_of(m.stream), HasSubstr("round"));
      m.stream.reset();
      m.communicator.reset();
      std::int64_t number = m.rank;
      m.communicator.all_reduce(&number, &number, Elements(1), c10::kLong, ReduceOp::sum, m.stream, "again");
      m.stream.synchronize();
      EXPECT_EQ(number, m.size * (m.size - 1) / 2);
      Member guard(m.world, "guard");  // nobody aborts the next round while another is in this one
      guard.communicator.barrier(guard.stream, "between rounds");
      guard.stream.synchronize();
    }
  });
}

TEST_P(ConformanceWithPeers, AResetThatOneRankMissesNamesIt) {
  on_all_ranks(
      [](Member& m) {
        if (m.rank == 1) return;
        try {
          m.communicator.reset();
          ADD_FAILURE() << "no error";
        } catch (const CommunicationError& error) {
          EXPECT_THAT(error.what(), AllOf(HasSubstr("reset of communicator all waited 200 ms"),
                                          HasSubstr("ranks that did not reset: "), HasSubstr("1")));
        }
      },
      {.deadline = 200ms});
}

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const UsageError& error) {
    return error.what();
  } catch (const std::exception& error) {
    return std::string("another error: ") + error.what();
  }
  return "accepted";
}

TEST_P(Conformance, BadArgumentsAreRefusedBeforeAnythingHappens) {
  on_all_ranks([](Member& m) {
    float data[8] = {};
    const auto& c = m.communicator;
    const auto size = std::to_string(m.size);
    EXPECT_EQ(refusal([&] { c.all_gather(data, data, Elements(-1), c10::kFloat, m.stream, "g"); }),
              "all_gather \"g\" on communicator all: expected a count of 0 or more elements, got -1");
    EXPECT_EQ(refusal([&] { c.broadcast(data, Elements(1), c10::kFloat, Rank(m.size), m.stream, "b"); }),
              "broadcast \"b\" on communicator all: expected a rank from 0 to " + std::to_string(m.size - 1) +
                  ", got " + size);
    EXPECT_THAT(refusal([&] { c.send(data, Elements(1), c10::kFloat, Rank(-1), m.stream, "s"); }),
                HasSubstr("expected a rank from 0 to"));
    EXPECT_EQ(refusal([&] { c.send(data, Elements(1), c10::kFloat, c.rank(), m.stream, "s"); }),
              "send \"s\" on communicator all: rank " + std::to_string(m.rank) + " cannot send to itself");
    EXPECT_EQ(refusal([&] { c.receive(data, Elements(1), c10::kFloat, c.rank(), m.stream, "r"); }),
              "receive \"r\" on communicator all: rank " + std::to_string(m.rank) + " cannot receive from itself");
    const std::vector<std::int64_t> right(m.size, 0), longer(m.size + 1, 0);
    auto negative = right;
    negative.back() = -2;
    EXPECT_EQ(refusal([&] { c.all_to_all_v(data, longer, data, right, c10::kFloat, m.stream, "t"); }),
              "all_to_all_v \"t\" on communicator all: expected " + size + " send counts (one per rank), got " +
                  std::to_string(m.size + 1));
    EXPECT_THAT(refusal([&] { c.all_to_all_v(data, right, data, negative, c10::kFloat, m.stream, "t"); }),
                HasSubstr("the receive count of rank " + std::to_string(m.size - 1) + " is -2"));
    EXPECT_THAT(refusal([&] { c.barrier(Stream(), "w"); }), HasSubstr("the stream was never created"));
    // Nothing of it was counted or enqueued: the ranks still agree on the sequence.
    c.barrier(m.stream, "after");
    m.stream.synchronize();
    if (m.rank == 0) return;
    EXPECT_THAT(refusal([&] { (void)m.world.create_communicator(std::vector<int>{0}, "others"); }),
                HasSubstr("is not among its ranks"));
  });
}

TEST(Communicator, OneThatWasNeverCreatedRefusesEveryOperation) {
  const Communicator none;
  const Stream stream = make_cpu_runtime()->compute_stream();
  float data[4] = {};
  const Elements one(1);
  EXPECT_FALSE(none);
  EXPECT_THAT(refusal([&] { none.barrier(stream, "x"); }),
              HasSubstr("barrier \"x\": this communicator was never created"));
  EXPECT_THAT(refusal([&] { none.all_reduce(data, data, one, c10::kFloat, ReduceOp::sum, stream, "x"); }),
              HasSubstr("never created"));
  EXPECT_THAT(refusal([&] { none.broadcast(data, one, c10::kFloat, Rank(0), stream, "x"); }),
              HasSubstr("never created"));
}

TEST(SimulatedCommunicator, CostsLatencyAndBytesOverTheLink) {
  CostModel costs;
  costs.link_bytes_per_second = 1e9;  // one byte a nanosecond
  costs.collective_latency = 500;
  for (int size : {2, 4, 7}) {
    World world = World::simulated(size, costs);
    const Stream stream = world.runtime()->make_stream("link");
    const Communicator c = world.create_communicator(everyone(world), "all");
    const auto cost = [&](const std::function<void()>& call) {
      const auto before = stream.now();
      call();
      return stream.now() - before;
    };
    const Elements count(1000 * size);
    const auto bytes = count.value() * 4;
    EXPECT_EQ(cost([&] { c.all_gather(nullptr, nullptr, count, c10::kFloat, stream, "g"); }), 500 + bytes * (size - 1));
    EXPECT_EQ(cost([&] { c.reduce_scatter(nullptr, nullptr, count, c10::kFloat, stream, "r"); }),
              500 + bytes * (size - 1));
    EXPECT_EQ(cost([&] { c.all_reduce(nullptr, nullptr, count, c10::kFloat, ReduceOp::sum, stream, "a"); }),
              500 + 2 * bytes * (size - 1) / size);
    EXPECT_EQ(cost([&] { c.broadcast(nullptr, count, c10::kBFloat16, Rank(1), stream, "b"); }), 500 + bytes / 2);
    EXPECT_EQ(cost([&] { c.barrier(stream, "w"); }), 500);
    std::vector<std::int64_t> parts(size, 10);
    parts[0] = 1'000'000;  // its own part stays
    EXPECT_EQ(cost([&] { c.all_to_all_v(nullptr, parts, nullptr, parts, c10::kDouble, stream, "t"); }),
              500 + 8 * 10 * (size - 1));
    EXPECT_EQ(world.runtime()->compute_stream().now(), 0) << "compute pays nothing";
  }
}

TEST(SimulatedCommunicator, OneRankPaysNothing) {
  World world = World::simulated(1);
  const Stream stream = world.runtime()->make_stream("link");
  const Communicator c = world.create_communicator(everyone(world), "alone");
  c.all_gather(nullptr, nullptr, Elements(1 << 20), c10::kFloat, stream, "g");
  EXPECT_EQ(stream.now(), 0);
}

TEST(RunRanks, SharesTheCoresAndGivesEachRankItsOwnWorld) {
  std::atomic<int> sum = 0;
  const int threads = at::get_num_threads();
  run_ranks(3, [&](World world) {
    EXPECT_EQ(world.size(), 3);
    EXPECT_EQ(world.backend_name(), "threads");
    EXPECT_EQ(at::get_num_threads(), std::max(1, threads / 3));
    sum += 1 << world.rank().value();
  });
  EXPECT_EQ(sum, 7);
}

TEST(RunRanks, RefusesImpossibleNumbersOfRanks) {
  for (int size : {0, -1, 257}) {
    EXPECT_EQ(refusal([&] { run_ranks(size, [](World) {}); }),
              "expected 1 to 256 in-process ranks, got " + std::to_string(size));
  }
}

TEST(RunRanks, KeepsErrorsThatAreNoStandardExceptions) {
  EXPECT_THROW(run_ranks(2,
                         [](World world) {
                           if (world.rank() == Rank(1)) throw 42;
                         }),
               int);
}

TEST(RunRanks, RanksThatMadeDifferentNumbersOfGroupsStillMeetInACommonOne) {
  run_ranks(3,
            [](World world) {
              Stream stream = world.runtime()->make_stream("s");
              if (world.rank() != Rank(0)) (void)world.create_communicator(std::vector<int>{1, 2}, "pair");
              const Communicator all = world.create_communicator(std::vector<int>{0, 1, 2}, "all");
              std::int64_t one = 1;
              all.all_reduce(&one, &one, Elements(1), c10::kLong, ReduceOp::sum, stream, "count");
              EXPECT_EQ(failure_of(stream), "no error");
              EXPECT_EQ(one, 3);
              stream.reset();
            },
            {.deadline = 500ms});
}

}  // namespace
}  // namespace fsdp::testing
