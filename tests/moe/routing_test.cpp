// Router, permutation, grouped products and the exchange of tokens, against plain arithmetic.
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include "fsdp/fsdp.h"
#include "fsdp/moe/expert_exchange.h"
#include "fsdp/moe/permutation.h"
#include "fsdp/moe/router.h"
#include "tests/support/train.h"

namespace fsdp::moe {
namespace {

using fsdp::testing::random;

TEST(Router, TakesTheBestExpertsAndCountsThem) {
  const at::Tensor logits = random({50, 6}, 1).set_requires_grad(true);
  const Routing routing = route(logits, {.experts = 6, .top_k = 3});
  const at::Tensor probabilities = at::softmax(logits.detach(), -1);
  for (std::int64_t t = 0; t < 50; ++t) {
    std::vector<std::pair<float, std::int64_t>> order;
    for (std::int64_t e = 0; e < 6; ++e) order.emplace_back(-probabilities[t][e].item<float>(), e);
    std::sort(order.begin(), order.end());
    float sum = 0;
    for (int k = 0; k < 3; ++k) sum -= order[k].first;
    for (int k = 0; k < 3; ++k) {
      EXPECT_EQ(routing.experts[t][k].item<std::int64_t>(), order[k].second);
      EXPECT_NEAR(routing.weights[t][k].item<float>(), -order[k].first / sum, 1e-6);
    }
  }
  EXPECT_EQ(routing.load.sum().item<std::int64_t>(), 150);
  for (std::int64_t e = 0; e < 6; ++e)
    EXPECT_EQ(routing.load[e].item<std::int64_t>(), (routing.experts == e).sum().item<std::int64_t>());
  EXPECT_FALSE(routing.auxiliary_loss.defined());
  EXPECT_THROW(route(logits, {.experts = 5, .top_k = 2}), UsageError);
  EXPECT_THROW(route(logits, {.experts = 6, .top_k = 7}), UsageError);
}

TEST(Router, ABiasChangesTheChoiceAndNotTheWeights) {
  const at::Tensor logits = random({20, 4}, 2);
  const at::Tensor bias = at::tensor({0.0f, 0.0f, 5.0f, 0.0f});
  const Routing routing = route(logits, {.experts = 4, .top_k = 1, .normalize = false}, bias);
  EXPECT_TRUE(at::equal(routing.experts, at::full({20, 1}, 2, at::kLong)));
  EXPECT_TRUE(at::allclose(routing.weights.squeeze(1), at::softmax(logits, -1).select(1, 2)));
  at::Tensor moved = at::zeros({4});
  update_expert_bias(moved, routing.load, 0.5);
  EXPECT_TRUE(at::equal(moved, at::tensor({0.5f, 0.5f, -0.5f, 0.5f})));
}

TEST(Router, TheAuxiliaryLossIsLeastForEqualLoadsAndAttachesItsGradient) {
  const double coefficient = 0.3;
  const auto loss_of = [&](const at::Tensor& logits) {
    return route(logits, {.experts = 4, .top_k = 1, .auxiliary_loss = coefficient}).auxiliary_loss;
  };
  at::Tensor balanced = at::full({4, 4}, -10.0f), skewed = at::full({4, 4}, -10.0f);
  for (int t = 0; t < 4; ++t) {
    balanced[t][t] = 10.0f;
    skewed[t][0] = 10.0f;
  }
  EXPECT_NEAR(loss_of(balanced).item<double>(), coefficient, 1e-4);
  EXPECT_NEAR(loss_of(skewed).item<double>(), 4 * coefficient, 1e-4);
  // As if scale * loss had been added to what x leads to.
  const at::Tensor a = random({9, 4}, 3).set_requires_grad(true), b = a.detach().clone().set_requires_grad(true);
  const at::Tensor x = random({9, 2}, 4);
  (attach_loss(x.clone().set_requires_grad(true), loss_of(a), 0.25) * 2).sum().backward();
  (loss_of(b) * 0.25).backward();
  EXPECT_TRUE(at::equal(a.grad(), b.grad()));
}

TEST(Permutation, SortsStablyAndComesBack) {
  for (const std::int64_t top_k : {1, 2, 3}) {
    const at::Tensor experts =
        at::randint(5, {17, top_k}, at::detail::createCPUGenerator(1), at::TensorOptions(at::kLong));
    const Permutation p = sort_by_expert(experts);
    const at::Tensor sorted = experts.reshape({-1}).index_select(0, p.order);
    for (std::int64_t i = 1; i < sorted.size(0); ++i) {
      const auto before = sorted[i - 1].item<std::int64_t>(), now = sorted[i].item<std::int64_t>();
      EXPECT_TRUE(before < now ||
                  (before == now && p.order[i - 1].item<std::int64_t>() < p.order[i].item<std::int64_t>()));
    }
    const at::Tensor x = random({17, 6}, 2).set_requires_grad(true), plain = x.detach().clone().set_requires_grad(true);
    const at::Tensor rows = permute(x, p), expected = plain.index_select(0, p.order.floor_divide(top_k));
    EXPECT_TRUE(at::equal(rows, expected));
    const at::Tensor scale = random({17 * top_k, 6}, 3);
    (rows * scale).sum().backward();
    (expected * scale).sum().backward();
    EXPECT_TRUE(at::allclose(x.grad(), plain.grad(), 1e-6, 1e-6));
    const at::Tensor home = unpermute(rows.detach(), p);
    EXPECT_TRUE(at::allclose(home, x.detach() * static_cast<double>(top_k)));
    const at::Tensor weights = random({17, top_k}, 5).set_requires_grad(true);
    permute_weights(weights, p).mul(at::arange(17 * top_k)).sum().backward();
    EXPECT_TRUE(at::equal(weights.grad().reshape({-1}).to(at::kLong), p.inverse));
  }
}

TEST(GroupedLinear, EqualsALinearMapForEachPart) {
  for (const std::vector<std::int64_t>& rows : {std::vector<std::int64_t>{3, 0, 4, 1}, {0, 0, 0, 0}, {8, 0, 0, 0}}) {
    const std::int64_t n = rows[0] + rows[1] + rows[2] + rows[3];
    const at::Tensor x = random({n, 5}, 1).set_requires_grad(true), w = random({4, 3, 5}, 2).set_requires_grad(true);
    const at::Tensor x2 = x.detach().clone().set_requires_grad(true), w2 = w.detach().clone().set_requires_grad(true);
    std::vector<at::Tensor> parts;
    std::int64_t begin = 0;
    for (int i = 0; i < 4; begin += rows[i++])
      parts.push_back(at::mm(x2.narrow(0, begin, rows[i]), w2.select(0, i).t()));
    const at::Tensor y = grouped_linear(x, w, {rows, {}}), expected = at::cat(parts);
    EXPECT_TRUE(at::equal(y, expected));
    const at::Tensor scale = random({n, 3}, 3);
    (y * scale).sum().backward();
    (expected * scale).sum().backward();
    EXPECT_TRUE(at::equal(x.grad(), x2.grad()));
    EXPECT_TRUE(at::allclose(w.grad(), w2.grad(), 1e-6, 1e-6));
  }
  EXPECT_THROW(grouped_linear(random({3, 5}, 1), random({2, 3, 5}, 2), {{1, 1}, {}}), UsageError);
  EXPECT_THROW(grouped_linear(random({3, 5}, 1), random({2, 3, 4}, 2), {{1, 2}, {}}), UsageError);
}

TEST(GroupedLinear, OneKernelForAllPartsEqualsOneAPart) {
  const RowGroups apart{{3, 0, 5}, {}}, together{{3, 0, 5}, at::tensor({3, 3, 8}, at::kInt)};
  const auto run = [&](const RowGroups& groups) {
    const at::Tensor x = random({8, 16}, 1).to(at::kBFloat16).set_requires_grad(true);
    const at::Tensor w = random({3, 24, 16}, 2).to(at::kBFloat16).set_requires_grad(true);
    const at::Tensor y = grouped_linear(x, w, groups);
    (y * random({8, 24}, 3).to(at::kBFloat16)).sum().backward();
    return std::vector<at::Tensor>{y.detach(), x.grad(), w.grad()};
  };
  const auto a = run(apart), b = run(together);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(at::allclose(a[i], b[i], 2e-2, 2e-2)) << i;
  EXPECT_EQ(b[2].select(0, 1).abs().max().item<float>(), 0);
}

// Rank r sends r * 10 + expert rows to each expert, some none; values name sender, expert and row.
TEST(ExpertExchange, RowsReachTheirExpertsAndComeHome) {
  for (const int ranks : {1, 2, 3}) {
    run_ranks(ranks, [&](World world) {
      const DeviceMesh mesh(world, {{"ep", ranks}});
      const auto exchange = ExpertExchange::create(mesh, "ep", 2 * ranks);
      const int rank = static_cast<int>(world.rank().value());
      std::vector<std::int64_t> load;
      std::vector<at::Tensor> pieces;
      for (int e = 0; e < 2 * ranks; ++e) {
        load.push_back((rank + e) % 3);
        pieces.push_back(at::full({load.back(), 2}, 100 * rank + e, at::kFloat));
      }
      const at::Tensor rows = at::cat(pieces).set_requires_grad(true);
      const auto counts = exchange->finish_counts(exchange->start_counts(at::tensor(load), rows.size(0)));
      const at::Tensor received = exchange->dispatch(rows, counts), grouped = group_by_expert(received, counts);
      std::int64_t begin = 0;
      for (int e = 0; e < 2; ++e) {
        const int expert = 2 * rank + e;
        for (int from = 0; from < ranks; ++from) {
          const std::int64_t n = (from + expert) % 3;
          EXPECT_TRUE(
              at::equal(grouped.detach().narrow(0, begin, n), at::full({n, 2}, 100 * from + expert, at::kFloat)));
          begin += n;
        }
        EXPECT_EQ(counts.rows_by_expert()[static_cast<std::size_t>(e)], [&] {
          std::int64_t all = 0;
          for (int from = 0; from < ranks; ++from) all += (from + expert) % 3;
          return all;
        }());
      }
      EXPECT_EQ(grouped.size(0), begin);
      const at::Tensor home = exchange->combine(ungroup_by_rank(grouped * 3, counts), counts);
      EXPECT_TRUE(at::equal(home.detach(), rows.detach() * 3));
      const at::Tensor scale = random(rows.sizes(), static_cast<std::uint64_t>(rank));
      (home * scale).sum().backward();
      EXPECT_TRUE(at::equal(rows.grad(), scale * 3));
      EXPECT_EQ(exchange->exchanges(), 4);
    });
  }
}

TEST(ExpertExchange, ExpertsThatCannotBeSharedAreNamed) {
  run_ranks(2, [](World world) {
    const DeviceMesh mesh(world, {{"ep", 2}});
    try {
      ExpertExchange::create(mesh, "ep", 3);
      ADD_FAILURE() << "no error";
    } catch (const UsageError& error) {
      EXPECT_NE(std::string(error.what()).find("3 experts cannot be shared equally by the 2 ranks"), std::string::npos);
    }
    EXPECT_THROW(ExpertExchange::create(mesh, "experts", 4), UsageError);
  });
}

}  // namespace
}  // namespace fsdp::moe
