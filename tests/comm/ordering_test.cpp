// Streams, order and groups: who waits for whom, on every backend.
#include <memory>

#include "fsdp/comm/communicator.h"
#include "fsdp/trace/recorder.h"
#include "tests/comm/conformance.h"

namespace fsdp::testing {
namespace {

class Ordering : public Conformance {};
class OrderingWithPeers : public Conformance {};
INSTANTIATE_TEST_SUITE_P(Backends, Ordering, ::testing::ValuesIn(worlds_from(1)), world_name);
INSTANTIATE_TEST_SUITE_P(Backends, OrderingWithPeers, ::testing::ValuesIn(worlds_from(2)), world_name);

TEST_P(OrderingWithPeers, CallsOnlyEnqueueWhateverTheirSize) {
  on_all_ranks(
      [](Member& m) {
        const float mine = 0;
        std::vector<float> all(m.size);
        for (int i = 0; i < 3; ++i) {
          if (m.rank != 0) m.side.meet(m.rank);  // the others come only after rank 0's call has returned
          if (i == 0) m.communicator.all_gather(&mine, all.data(), Elements(1), c10::kFloat, m.stream, "one");
          if (i == 1) m.communicator.all_gather(&mine, all.data(), Elements(0), c10::kFloat, m.stream, "none");
          if (i == 2) m.communicator.barrier(m.stream, "barrier");
          if (m.rank == 0) m.side.meet(m.rank);
          EXPECT_EQ(failure_of(m.stream), "no error");
        }
        m.stream.reset();
      },
      {.deadline = 500ms});
}

TEST_P(Ordering, NobodyLeavesABarrierBeforeTheLastHasCome) {
  const auto now = [] {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  };
  on_all_ranks([&](Member& m) {
    for (int round = 1; round <= 50; ++round) {
      const auto came = now();  // one clock for all processes of a machine
      m.communicator.barrier(m.stream, "round");
      m.stream.synchronize();
      const auto left = now();
      const auto arrivals = m.side.gather(m.rank, came);
      EXPECT_GE(left, *std::ranges::max_element(arrivals));
    }
  });
}

TEST_P(Ordering, ManyOperationsInFlightOnTwoCommunicatorsAndTwoStreams) {
  on_all_ranks([](Member& m) {
    Member other(m.world, m.side, "other");
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

TEST_P(Ordering, OperationsOnOneStreamSeeEachOthersResults) {
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

TEST_P(Ordering, SmallOperationsMayRunInlineWithTheSameResult) {
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

TEST_P(Ordering, SubgroupsWorkSideBySide) {
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

TEST_P(Ordering, SpansCarryLabelSequenceBytesAndTimes) {
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

}  // namespace
}  // namespace fsdp::testing
