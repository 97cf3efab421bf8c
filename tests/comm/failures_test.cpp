// Ranks that disagree, stay away or fail: every rank learns of it, with names, and nothing hangs. On every backend.
#include <atomic>
#include <stdexcept>

#include "fsdp/comm/communicator.h"
#include "tests/comm/conformance.h"

namespace fsdp::testing {
namespace {

class Failures : public Conformance {};
class FailuresWithPeers : public Conformance {};
INSTANTIATE_TEST_SUITE_P(Backends, Failures, ::testing::ValuesIn(worlds_from(1)), world_name);
INSTANTIATE_TEST_SUITE_P(Backends, FailuresWithPeers, ::testing::ValuesIn(worlds_from(2)), world_name);

TEST_P(FailuresWithPeers, DifferentCountsFailOnEveryRankWithBoth) {
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

TEST_P(FailuresWithPeers, DifferentOperationsDtypesRootsAndLabelsFailOnEveryRankWithBoth) {
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

TEST_P(FailuresWithPeers, AllToAllCountsThatDoNotAgreeNameTheTwoRanks) {
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

TEST_P(FailuresWithPeers, MessagesOfAnotherLengthThanExpectedNameBoth) {
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

// The absent rank waits on the side until the others have failed: a deadline that is not kept fails the test there.

TEST_P(FailuresWithPeers, ARankThatNeverComesIsNamedOnEveryOtherRank) {
  on_all_ranks(
      [](Member& m) {
        m.communicator.barrier(m.stream, "together");
        m.stream.synchronize();
        if (m.rank == m.size - 1) return m.side.meet(m.rank);
        float data = 0;
        m.communicator.all_reduce(&data, &data, Elements(1), c10::kFloat, ReduceOp::sum, m.stream, "layers.3:reduce");
        EXPECT_THAT(failure_of(m.stream),
                    AllOf(HasSubstr("all_reduce \"layers.3:reduce\" #2 of 1 Float"), HasSubstr("waited 200 ms"),
                          HasSubstr("missing ranks: " + std::to_string(m.size - 1))));
        m.stream.reset();
        m.side.meet(m.rank);
      },
      {.deadline = 200ms});
}

TEST_P(FailuresWithPeers, AMessageThatNeverComesNamesItsRank) {
  on_all_ranks(
      [](Member& m) {
        if (m.rank == 0) {
          float data = 0;
          m.communicator.receive(&data, Elements(1), c10::kFloat, Rank(1), m.stream, "activation");
          EXPECT_THAT(failure_of(m.stream), AllOf(HasSubstr("send_recv \"activation\" #1 of 1 Float"),
                                                  HasSubstr("waited 200 ms for rank 1")));
          m.stream.reset();
        }
        m.side.meet(m.rank);
      },
      {.deadline = 200ms});
}

TEST_P(Failures, AnErrorThatARankThrowsComesBackAndFreesTheOthers) {
  struct OutOfData : std::runtime_error {
    using std::runtime_error::runtime_error;
  };
  const int failing = GetParam() - 1;
  std::atomic<int> freed = 0;
  const auto run = [&] {
    on_all_ranks([&](Member& m) {
      if (m.rank == failing) throw OutOfData("no more text");
      m.communicator.barrier(m.stream, "step");
      try {
        m.stream.synchronize();
      } catch (const AbortedError& error) {
        EXPECT_THAT(error.what(), AllOf(HasSubstr("barrier \"step\" #1"),
                                        HasSubstr("rank " + std::to_string(failing) + " failed: no more text")));
        ++freed;
        throw;
      }
    });
  };
  if (!ranks_are_processes()) {
    EXPECT_THROW(run(), OutOfData);
    EXPECT_EQ(freed, GetParam() - 1);
  } else if (own_process_rank() == failing) {
    EXPECT_THROW(run(), OutOfData);
  } else if (own_process_rank() < failing) {
    EXPECT_THROW(run(), AbortedError);
    EXPECT_EQ(freed, 1);
  } else {
    run();
  }
}

TEST_P(Failures, AbortEndsWhatIsPendingWithItsReason) {
  on_all_ranks([](Member& m) {
    m.communicator.barrier(m.stream, "together");
    m.stream.synchronize();
    m.side.meet(m.rank);  // nobody aborts while another is still in it
    const Stream aborted = m.world.runtime()->make_stream("aborted");
    if (m.size == 1 || m.rank != 0)
      m.communicator.barrier(aborted, "step");  // pending where there are peers to wait for
    if (m.rank == 0) m.communicator.abort("the user pressed Ctrl-C");
    if (m.size == 1) m.communicator.barrier(aborted, "step");
    if (m.size > 1 && m.rank == 0) return;
    EXPECT_THAT(failure_of(aborted), HasSubstr("the user pressed Ctrl-C"));
  });
}

TEST_P(FailuresWithPeers, AnAbortReachesRanksThatJoinAfterTheAbortingOneHasLeft) {
  run_on_ranks(GetParam(),
               [](World world, SideChannel& side) {
                 const Stream stream = world.runtime()->make_stream("s");
                 const int rank = static_cast<int>(world.rank().value());
                 if (rank == 0) {
                   world.create_communicator(everyone(world), "all").abort("out of memory");
                   return side.meet(rank);
                 }
                 side.meet(rank);
                 const Communicator all = world.create_communicator(everyone(world), "all");
                 all.barrier(stream, "step");
                 EXPECT_THAT(failure_of(stream), HasSubstr("out of memory"));
                 stream.reset();
               },
               {.deadline = 500ms});
}

TEST_P(Failures, ResetByAllRanksMakesAFailedCommunicatorUsable) {
  on_all_ranks([](Member& m) {
    for (int round = 0; round < 3; ++round) {
      m.communicator.barrier(m.stream, "good");
      m.stream.synchronize();
      m.side.meet(m.rank);  // nobody aborts while another is still in it
      m.communicator.abort("round");
      m.communicator.barrier(m.stream, "bad");
      EXPECT_THAT(failure_of(m.stream), HasSubstr("round"));
      m.stream.reset();
      m.communicator.reset();
      std::int64_t number = m.rank;
      m.communicator.all_reduce(&number, &number, Elements(1), c10::kLong, ReduceOp::sum, m.stream, "again");
      m.stream.synchronize();
      EXPECT_EQ(number, m.size * (m.size - 1) / 2);
      m.side.meet(m.rank);  // nobody aborts the next round while another is in this one
    }
  });
}

TEST_P(FailuresWithPeers, WhatWasPendingAtAnAbortIsForgottenByTheReset) {
  on_all_ranks([](Member& m) {
    float data = 1;
    if (m.rank != 0) {
      m.communicator.barrier(m.stream, "lost");  // rank 0 never joins it
      EXPECT_THAT(failure_of(m.stream), HasSubstr("given up"));
      m.stream.reset();
    } else {
      m.communicator.abort("given up");
    }
    m.side.meet(m.rank);
    m.communicator.reset();
    m.communicator.all_reduce(&data, &data, Elements(1), c10::kFloat, ReduceOp::sum, m.stream, "again");
    m.stream.synchronize();
    EXPECT_EQ(data, static_cast<float>(m.size));
  });
}

TEST_P(FailuresWithPeers, AResetThatOneRankMissesNamesIt) {
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

TEST_P(Failures, BadArgumentsAreRefusedBeforeAnythingHappens) {
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

}  // namespace
}  // namespace fsdp::testing
