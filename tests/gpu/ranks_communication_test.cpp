// What moves between GPU ranks: collectives, and reductions through an inbox.
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/zeros.h>

#include "tests/gpu/ranks.h"

namespace fsdp::testing {
namespace {

TEST(GpuRanks, CollectivesMoveTheRightData) {
  const auto group = world().create_communicator(all_ranks(), "test");
  const Stream stream = world().runtime()->make_stream("test");
  const auto run = [&](const auto& body) {
    Event ready;
    world().runtime()->compute_stream().record(ready);
    stream.wait(ready);
    body();
    stream.synchronize();
  };
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kLong}) {
    const std::int64_t n = 1000;
    at::Tensor own = at::full({n}, rank() + 1, on_gpu(dtype)), all = at::zeros({n * size()}, on_gpu(dtype));
    run([&] { group.all_gather(own.data_ptr(), all.data_ptr(), Elements(n), dtype, stream, "gather"); });
    for (int r = 0; r < size(); ++r)
      EXPECT_TRUE(at::equal(all.slice(0, r * n, (r + 1) * n), at::full_like(own, r + 1)));
    const int sum = size() * (size() + 1) / 2;
    at::Tensor whole = at::full({n * size()}, rank() + 1, on_gpu(dtype)), share = at::zeros({n}, on_gpu(dtype));
    run([&] { group.reduce_scatter(whole.data_ptr(), share.data_ptr(), Elements(n), dtype, stream, "reduce"); });
    EXPECT_TRUE(at::equal(share, at::full_like(share, sum)));
    run([&] {
      group.all_reduce(whole.data_ptr(), whole.data_ptr(), Elements(n), dtype, ReduceOp::max, stream, "max");
    });
    EXPECT_TRUE(at::equal(whole.slice(0, 0, n), at::full_like(own, size())));
    run([&] { group.broadcast(own.data_ptr(), Elements(n), dtype, Rank(size() - 1), stream, "broadcast"); });
    EXPECT_TRUE(at::equal(own, at::full_like(own, size())));
  }
  // Rank r sends r + to elements to each.
  std::vector<std::int64_t> sends, receives;
  std::int64_t out = 0, in = 0;
  for (int r = 0; r < size(); ++r) {
    sends.push_back(rank() + r + 1);
    receives.push_back(r + rank() + 1);
    out += sends.back();
    in += receives.back();
  }
  at::Tensor from = at::full({out}, rank(), on_gpu()), to = at::zeros({in}, on_gpu());
  run([&] { group.all_to_all_v(from.data_ptr(), sends, to.data_ptr(), receives, at::kFloat, stream, "exchange"); });
  std::int64_t begin = 0;
  for (int r = 0; r < size(); ++r) {
    EXPECT_TRUE(at::equal(to.slice(0, begin, begin + receives[r]), at::full({receives[r]}, r, on_gpu())));
    begin += receives[r];
  }
  if (size() > 1) {
    at::Tensor message = at::full({5}, rank(), on_gpu());
    run([&] {
      if (rank() == 0) group.send(message.data_ptr(), Elements(5), at::kFloat, Rank(1), stream, "message");
      if (rank() == 1) group.receive(message.data_ptr(), Elements(5), at::kFloat, Rank(0), stream, "message");
    });
    if (rank() == 1) {
      EXPECT_EQ(message[4].item<float>(), 0.0f);
    }
  }
  run([&] { group.barrier(stream, "barrier"); });
}

// The same inbox again and again, with ranks late before they send and before they add, and what was sent written over
// at once: nothing is added that was not there yet, or is of another reduction.
TEST(GpuRanks, ReductionsThroughAnInboxHoldWhateverRankIsLate) {
  constexpr int kRounds = 60;
  Runtime& runtime = *world().runtime();
  const auto group = world().create_communicator(all_ranks(), "inbox", GroupUse::reduce);
  const Stream stream = runtime.make_stream("reduce");
  std::string why;
  const auto inbox = group.backend()->make_inbox(Bytes(4 << 20), *runtime.kernels(), why);
  ASSERT_NE(inbox, nullptr) << why;
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const std::int64_t share : {1, 1000, 1 << 20}) {
      at::Tensor send = at::empty({share * size()}, on_gpu(dtype));
      std::vector<at::Tensor> sums;
      for (int round = 0; round < kRounds; ++round) sums.push_back(at::full({share}, 0.5, on_gpu()));
      runtime.compute_stream().synchronize();
      stream.enqueue([&] {
        for (int round = 0; round < kRounds; ++round) {
          const bool late = (round + rank()) % size() == 0;
          send.fill_(rank() + round % 50);  // small integers: exact in both dtypes
          if (late) runtime.kernels()->spin(200'000, 1);
          const SumDestination to{
              .data = sums[round].data_ptr(), .divisor = 2, .dtype = at::kFloat, .overwrite = round % 2 == 0};
          group.reduce_scatter(send.data_ptr(), to, Elements(share), dtype, *inbox, stream, "reduce");
          if (late && round % 3 == 0) runtime.kernels()->spin(200'000, 1);
        }
      });
      stream.synchronize();
      for (int round = 0; round < kRounds; ++round) {
        const double sum = size() * (size() - 1) / 2 + size() * (round % 50);
        const at::Tensor expected = at::full({share}, sum / 2 + (round % 2 == 0 ? 0 : 0.5), on_gpu());
        ASSERT_TRUE(at::equal(sums[round], expected)) << "round " << round << " of " << share << " elements";
      }
    }
  }
}

}  // namespace
}  // namespace fsdp::testing
