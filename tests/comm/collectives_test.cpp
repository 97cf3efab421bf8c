// Values: what each collective leaves in every buffer, on every backend.
#include <limits>

#include "fsdp/comm/communicator.h"
#include "tests/comm/conformance.h"

namespace fsdp::testing {
namespace {

class Collectives : public Conformance {};
class CollectivesWithPeers : public Conformance {};
INSTANTIATE_TEST_SUITE_P(Backends, Collectives, ::testing::ValuesIn(worlds_from(1)), world_name);
INSTANTIATE_TEST_SUITE_P(Backends, CollectivesWithPeers, ::testing::ValuesIn(worlds_from(2)), world_name);

TEST_P(Collectives, EachRankKnowsItsPlace) {
  on_all_ranks([](Member& m) {
    EXPECT_EQ(m.communicator.size(), GetParam());
    EXPECT_EQ(m.communicator.rank(), m.world.rank());
    EXPECT_EQ(m.communicator.name(), "all");
    EXPECT_EQ(m.world.backend_name(), backend_under_test());
    const auto ranks = m.side.gather(m.rank, m.rank);
    for (int r = 0; r < m.size; ++r) EXPECT_EQ(ranks[r], r);
  });
}

TEST_P(Collectives, AllGatherPlacesEveryShareInRankOrder) {
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

TEST_P(Collectives, ReduceScatterSumsItsShareInRankOrder) {
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

TEST_P(Collectives, AllReduceSumsInRankOrderOnEveryRank) {
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

TEST_P(Collectives, AllReduceFindsTheMaximum) {
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

TEST_P(Collectives, TheMaximumOfANotANumberIsNotANumberFromWhicheverRank) {
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

TEST_P(Collectives, LowPrecisionSumsAreRoundedOnce) {
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

TEST_P(Collectives, BroadcastReachesAllFromEachRoot) {
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

TEST_P(Collectives, AllToAllMovesUnevenAndEmptyParts) {
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

TEST_P(CollectivesWithPeers, MessagesTravelAroundARingInOrder) {
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

}  // namespace
}  // namespace fsdp::testing
