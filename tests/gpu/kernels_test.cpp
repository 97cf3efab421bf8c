// The library's own kernels against the same arithmetic on the CPU.
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "fsdp/comm/reduce_kernels.h"
#include "fsdp/dbuffer/accumulate.h"
#include "tests/gpu/gpu.h"

namespace fsdp::testing {
namespace {

const auto* const kGpuEnvironment = ::testing::AddGlobalTestEnvironment(new GpuEnvironment);

Kernels& kernels() {
  static const auto runtime = make_cuda_runtime(0);
  return *runtime->kernels();
}

at::Tensor with_edges(std::int64_t count, c10::ScalarType dtype, std::uint64_t seed) {
  at::Tensor x = random({count}, seed);
  if (count > 8) {
    x[1] = -0.0f;
    x[3] = 0.0f;
    x[5] = -1e-45f;  // rounds to -0 in low precision
    x[7] = std::numeric_limits<float>::infinity();
  }
  return x.to(dtype);
}

TEST(GpuKernels, ScaledSumEqualsTheHostBitForBit) {
  for (const auto to : {c10::kFloat, c10::kBFloat16, c10::kHalf, c10::kDouble}) {
    for (const auto from : {c10::kFloat, c10::kBFloat16, c10::kHalf, c10::kDouble}) {
      for (const std::int64_t count : {1, 7, 8, 129, 4096, 100003}) {
        for (const bool overwrite : {true, false}) {
          for (const double divisor : {1.0, 3.0}) {
            const at::Tensor source = with_edges(count, from, 3), before = with_edges(count, to, 4);
            at::Tensor expected = before.clone(), got = before.to(kGpu), source_there = source.to(kGpu);
            std::vector<std::int64_t> marks(static_cast<std::size_t>(count));
            for (std::int64_t i = 0; i < count; ++i) marks[i] = i;
            accumulate_on_cpu(
                {expected.mutable_data_ptr(), to, source.const_data_ptr(), from, count, divisor, overwrite, marks, 0});
            kernels().scaled_sum(
                {got.mutable_data_ptr(), to, source_there.const_data_ptr(), from, count, divisor, overwrite});
            const at::Tensor back = got.to(at::kCPU);
            ASSERT_EQ(std::memcmp(back.const_data_ptr(), expected.const_data_ptr(), back.nbytes()), 0)
                << c10::toString(from) << " to " << c10::toString(to) << ", " << count << " elements, divisor "
                << divisor << (overwrite ? ", overwriting" : "");
          }
        }
      }
    }
  }
}

TEST(GpuKernels, SumOfPartsEqualsTheHostsReduction) {
  for (const auto dtype : {c10::kFloat, c10::kBFloat16, c10::kHalf}) {
    for (const std::int64_t count : {1, 7, 8, 4096, 100003, 1 << 20}) {
      for (const int parts : {1, 2, 3, 8}) {
        std::vector<at::Tensor> inputs;
        std::vector<const void*> pointers;
        for (int p = 0; p < parts; ++p) {
          inputs.push_back(with_edges(count, dtype, static_cast<std::uint64_t>(p) + 1));
          if (count > 5) inputs.back()[5] = 1.0f;  // the host's sums may become -0 where they are tiny
        }
        for (const auto& input : inputs) pointers.push_back(input.const_data_ptr());
        at::Tensor expected = at::empty({count}, dtype);
        reduce_on_cpu(pointers, expected.mutable_data_ptr(), count, dtype, ReduceOp::sum);
        const at::Tensor source = at::cat(inputs).to(kGpu);
        at::Tensor got = at::zeros({count}, at::TensorOptions().dtype(dtype).device(kGpu));
        for (const int own : {0, parts / 2, parts - 1}) {
          const at::Tensor others = at::cat({source.slice(0, 0, own * count), source.slice(0, (own + 1) * count)});
          const at::Tensor part = source.slice(0, own * count, (own + 1) * count).clone();
          SumOfParts sum{.destination = got.mutable_data_ptr(),
                         .destination_dtype = dtype,
                         .own = part.const_data_ptr(),
                         .others = others.const_data_ptr(),
                         .dtype = dtype,
                         .count = count,
                         .parts = parts,
                         .own_part = own};
          kernels().sum_of_parts(sum);
          const at::Tensor back = got.to(at::kCPU);
          ASSERT_EQ(std::memcmp(back.const_data_ptr(), expected.const_data_ptr(), back.nbytes()), 0)
              << own << " of " << parts << " parts of " << count << " " << c10::toString(dtype);
          // Added to a main gradient: as a scaled sum of the rounded sum would.
          for (const bool overwrite : {true, false}) {
            const at::Tensor before = with_edges(count, c10::kFloat, 99).to(kGpu);
            at::Tensor one_pass = before.clone(), two_passes = before.clone();
            kernels().scaled_sum({two_passes.mutable_data_ptr(), c10::kFloat, got.const_data_ptr(), dtype, count,
                                  /*divisor=*/3, overwrite});
            sum.destination = one_pass.mutable_data_ptr();
            sum.destination_dtype = c10::kFloat;
            sum.divisor = 3;
            sum.overwrite = overwrite;
            kernels().sum_of_parts(sum);
            sum.destination = got.mutable_data_ptr();
            ASSERT_EQ(std::memcmp(one_pass.cpu().const_data_ptr(), two_passes.cpu().const_data_ptr(),
                                  static_cast<std::size_t>(count) * 4),
                      0)
                << own << " of " << parts << " parts of " << count << " " << c10::toString(dtype);
          }
        }
      }
    }
  }
}

TEST(GpuKernels, PackCopiesAddsClearsAndMarks) {
  for (const auto to : {c10::kFloat, c10::kBFloat16, c10::kDouble}) {
    const at::Tensor copied = with_edges(777, c10::kFloat, 1), added = with_edges(640, c10::kBFloat16, 2);
    at::Tensor buffer = at::full({4096}, 2.0, at::TensorOptions().dtype(to).device(kGpu));
    buffer.slice(0, 3000, 3100).fill_(-0.0);
    const at::Tensor copied_there = copied.to(kGpu), added_there = added.to(kGpu);
    auto* base = static_cast<std::byte*>(buffer.mutable_data_ptr());
    const auto at_element = [&](std::int64_t i) { return base + i * static_cast<std::int64_t>(c10::elementSize(to)); };
    using Action = PackEntry::Action;
    std::vector<PackEntry> entries{
        {Action::copy, at_element(0), copied_there.const_data_ptr(), c10::kFloat, 777},
        {Action::add, at_element(1024), added_there.const_data_ptr(), c10::kBFloat16, 640},
        {Action::fill_unused, at_element(2000), nullptr, c10::kFloat, 77},
        {Action::clear, at_element(2500), nullptr, c10::kFloat, 13},
        {Action::mark_used, at_element(3000), nullptr, c10::kFloat, 100, 30, 40},
    };
    for (int i = 0; i < 200; ++i)  // more than one launch holds
      entries.push_back({Action::clear, at_element(3200 + 2 * i), nullptr, c10::kFloat, 1});
    kernels().pack(entries, to);
    const at::Tensor got = buffer.to(at::kCPU).to(at::kDouble);
    at::Tensor expected_copy = copied.to(to).to(at::kDouble);
    for (std::int64_t i = 0; i < 777; ++i) {
      EXPECT_EQ(got[i].item<double>(), expected_copy[i].item<double>()) << i;
      EXPECT_FALSE(got[i].item<double>() == 0 && std::signbit(got[i].item<double>())) << i;
    }
    EXPECT_EQ(got[777].item<double>(), 2.0);
    EXPECT_TRUE(at::equal(got.slice(0, 1024, 1664), (added.to(at::kDouble) + 2).to(at::kFloat).to(to).to(at::kDouble)));
    for (int i = 2000; i < 2077; ++i) EXPECT_TRUE(std::signbit(got[i].item<double>()));
    EXPECT_EQ(got[2077].item<double>(), 2.0);
    for (int i = 2500; i < 2513; ++i) EXPECT_FALSE(std::signbit(got[i].item<double>()));
    for (int i = 0; i < 100; ++i)
      EXPECT_EQ(std::signbit(got[3000 + i].item<double>()), i != 0 && i != 30 && i != 70) << i;
    for (int i = 0; i < 200; ++i) EXPECT_EQ(got[3200 + 2 * i].item<double>(), 0.0);
    EXPECT_EQ(got[3201].item<double>(), 2.0);
  }
}

TEST(GpuKernels, AdamWEqualsATen) {
  for (const std::int64_t count : {5, 1024, 300001}) {
    at::Tensor weight = random_on_gpu({count}, 1), gradient = random_on_gpu({count}, 2);
    at::Tensor m = random_on_gpu({count}, 3) * 0.1, v = random_on_gpu({count}, 4).square();
    at::Tensor step = at::full({}, 4.0, weight.options());
    at::Tensor w2 = weight.clone(), m2 = m.clone(), v2 = v.clone(), step2 = at::full({}, 5.0, weight.options());
    at::Tensor low = at::empty({count}, weight.options().dtype(at::kBFloat16));
    const at::Tensor rate = at::full({}, 1e-2, weight.options());
    AdamWPiece piece{.weight = weight.mutable_data_ptr(),
                     .first_moment = m.mutable_data_ptr(),
                     .second_moment = v.mutable_data_ptr(),
                     .step = step.mutable_data_ptr<float>(),
                     .gradient = gradient.const_data_ptr(),
                     .low_precision = low.mutable_data_ptr(),
                     .count = count,
                     .weight_decay = 0.1f};
    kernels().adamw({&piece, 1}, {.learning_rate = rate.const_data_ptr<float>(), .beta1 = 0.9, .beta2 = 0.95});
    at::_fused_adamw_({w2}, {gradient}, {m2}, {v2}, {}, {step2}, 1e-2, 0.9, 0.95, 0.1, 1e-8, false, false, {}, {});
    EXPECT_LT((weight - w2).abs().max().item<double>(), 2e-6);
    EXPECT_LT((m - m2).abs().max().item<double>(), 1e-6);
    EXPECT_LT(((v - v2) / (v2 + 1)).abs().max().item<double>(), 1e-6);
    EXPECT_EQ(step.item<float>(), 5.0f);
    EXPECT_TRUE(at::equal(low, weight.to(at::kBFloat16)));

    const at::Tensor before = weight.clone();
    at::Tensor skip = at::ones({}, weight.options());
    kernels().adamw({&piece, 1}, {.learning_rate = rate.const_data_ptr<float>(), .skip = skip.const_data_ptr<float>()});
    gradient[0] = -0.0f;  // nobody used it
    kernels().adamw({&piece, 1}, {.learning_rate = rate.const_data_ptr<float>(), .heed_marks = true});
    EXPECT_TRUE(at::equal(weight, before));
    EXPECT_EQ(step.item<float>(), 5.0f);
    kernels().adamw({&piece, 1}, {.learning_rate = rate.const_data_ptr<float>()});  // just a zero
    EXPECT_FALSE(at::equal(weight, before));
    EXPECT_EQ(step.item<float>(), 6.0f);
  }
}

TEST(GpuKernels, AdamWScalesGradientsAsAPassBeforeWould) {
  constexpr std::int64_t kCount = 5001;
  const at::Tensor gradient = random_on_gpu({kCount}, 2), rate = at::full({}, 1e-2, gradient.options());
  const at::Tensor scale = at::full({}, 0.37, gradient.options()), scaled = gradient * scale;
  const auto updated = [&](const at::Tensor& g, const float* factor) {
    at::Tensor weight = random_on_gpu({kCount}, 1), m = random_on_gpu({kCount}, 3) * 0.1, v = m.square();
    at::Tensor step = at::full({}, 4.0, weight.options());
    const AdamWPiece piece{.weight = weight.mutable_data_ptr(),
                           .first_moment = m.mutable_data_ptr(),
                           .second_moment = v.mutable_data_ptr(),
                           .step = step.mutable_data_ptr<float>(),
                           .gradient = g.const_data_ptr(),
                           .count = kCount};
    kernels().adamw({&piece, 1}, {.learning_rate = rate.const_data_ptr<float>(), .gradient_scale = factor});
    return at::cat({weight, m, v});
  };
  EXPECT_TRUE(at::equal(updated(gradient, scale.const_data_ptr<float>()), updated(scaled, nullptr)));
  EXPECT_FALSE(at::equal(updated(gradient, nullptr), updated(scaled, nullptr)));
}

TEST(GpuKernels, AdamWTakesMixedDtypesAndManyPieces) {
  std::vector<at::Tensor> weights, gradients, firsts, seconds, steps, wanted;
  std::vector<AdamWPiece> pieces;
  const at::Tensor rate = at::full({}, 1e-2, at::TensorOptions().device(kGpu));
  for (int i = 0; i < 100; ++i) {
    const std::int64_t count = 1 + i * 37;
    weights.push_back(random_on_gpu({count}, 10 + i));
    gradients.push_back(random_on_gpu({count}, 20 + i).to(at::kBFloat16));
    firsts.push_back(at::zeros_like(weights.back()));
    seconds.push_back(at::zeros_like(weights.back()));
    steps.push_back(at::zeros({}, weights.back().options()));
    at::Tensor w = weights.back().clone(), m = at::zeros_like(w), v = at::zeros_like(w);
    at::Tensor s = at::ones({}, w.options());
    at::_fused_adamw_({w}, {gradients.back().to(at::kFloat)}, {m}, {v}, {}, {s}, 1e-2, 0.9, 0.999, 0.0, 1e-8, false,
                      false, {}, {});
    wanted.push_back(w);
    pieces.push_back({.weight = weights.back().mutable_data_ptr(),
                      .first_moment = firsts.back().mutable_data_ptr(),
                      .second_moment = seconds.back().mutable_data_ptr(),
                      .step = steps.back().mutable_data_ptr<float>(),
                      .gradient = gradients.back().const_data_ptr(),
                      .count = count,
                      .gradient_dtype = c10::kBFloat16});
  }
  kernels().adamw(pieces, {.learning_rate = rate.const_data_ptr<float>()});
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    EXPECT_LT((weights[i] - wanted[i]).abs().max().item<double>(), 2e-6) << i;
    EXPECT_EQ(steps[i].item<float>(), 1.0f) << i;
  }
}

}  // namespace
}  // namespace fsdp::testing
