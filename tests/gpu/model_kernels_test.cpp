// Kernels of models and of norms against the same arithmetic in fp64.
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/zeros.h>

#include "models/rotary.h"
#include "models/swiglu.h"
#include "tests/gpu/gpu.h"

namespace fsdp::testing {
namespace {

Kernels& kernels() {
  static const auto runtime = make_cuda_runtime(0);
  return *runtime->kernels();
}

double tolerance(c10::ScalarType dtype) {
  return dtype == at::kFloat ? 3e-6 : dtype == at::kHalf ? 1e-3 : 8e-3;  // of a value of 1
}

void expect_close(const at::Tensor& got, const at::Tensor& exact, double tolerance, const std::string& what) {
  const at::Tensor apart = (got.to(at::kDouble) - exact).abs() / (exact.abs() + 1);
  ASSERT_EQ(got.sizes(), exact.sizes()) << what;
  EXPECT_LT(apart.max().item<double>(), tolerance) << what;
}

TEST(GpuModelKernels, SwiGluAndItsGradients) {
  static_cast<void>(kernels());
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const std::int64_t count : {1, 7, 8, 4096, 100003}) {
      for (const std::int64_t offset : {0, 1}) {  // aligned or not
        const auto make = [&](std::uint64_t seed) {
          return random_on_gpu({count + offset}, seed).mul(3).to(dtype).slice(0, offset).detach();
        };
        at::Tensor gate = make(1), up = make(2);
        const at::Tensor gradient = make(3);
        gate.set_requires_grad(true), up.set_requires_grad(true);
        at::Tensor wide_gate = gate.detach().to(at::kDouble), wide_up = up.detach().to(at::kDouble);
        wide_gate.set_requires_grad(true), wide_up.set_requires_grad(true);
        const at::Tensor out = models::swiglu(gate, up), exact = at::silu(wide_gate) * wide_up;
        out.backward(gradient);
        exact.backward(gradient.to(at::kDouble));
        const std::string what = std::string(c10::toString(dtype)) + " " + std::to_string(count);
        expect_close(out.detach(), exact.detach(), tolerance(dtype), what);
        expect_close(gate.grad(), wide_gate.grad(), tolerance(dtype), "gate, " + what);
        expect_close(up.grad(), wide_up.grad(), tolerance(dtype), "up, " + what);
      }
    }
  }
}

TEST(GpuModelKernels, RotationsAreThoseOfTheHost) {
  static_cast<void>(kernels());
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const std::int64_t width : {2, 6, 16, 40, 128}) {
      for (const bool strided : {false, true}) {
        models::RotaryTable here(width, 1e4), there(width, 1e4);
        const auto make = [&](std::uint64_t seed) {
          at::Tensor x = random({2, 3, 5, width}, seed).to(dtype);  // (batch, head, position, width)
          return strided ? x.transpose(1, 2) : x.transpose(1, 2).contiguous();
        };
        at::Tensor x = make(1).to(kGpu), on_host = make(1).to(at::kDouble);
        ASSERT_EQ(x.is_contiguous(), !strided);
        x.set_requires_grad(true), on_host.set_requires_grad(true);
        const at::Tensor out = there.rotate(x), exact = here.rotate(on_host);
        out.backward(make(2).to(kGpu));
        exact.backward(make(2).to(at::kDouble));
        const std::string what = std::string(c10::toString(dtype)) + " " + std::to_string(width);
        expect_close(out.detach().to(at::kCPU), exact.detach(), tolerance(dtype), what);
        expect_close(x.grad().to(at::kCPU), on_host.grad(), tolerance(dtype), "gradient, " + what);
      }
    }
  }
}

TEST(GpuModelKernels, NormsOfManyPieces) {
  std::vector<at::Tensor> gradients;
  std::vector<NormPiece> pieces;
  for (int i = 0; i < 150; ++i) {
    const auto dtype = i % 3 == 0 ? at::kFloat : i % 3 == 1 ? at::kBFloat16 : at::kHalf;
    gradients.push_back(random_on_gpu({i == 7 ? 5000001 : i * 37}, static_cast<std::uint64_t>(i)).to(dtype));
    pieces.push_back({gradients.back().const_data_ptr(), gradients.back().numel(), dtype});
  }
  const auto floats = at::TensorOptions().dtype(at::kFloat).device(kGpu);
  const at::Tensor scratch = at::empty({kernels().norm_scratch(pieces.size())}, floats);
  at::Tensor norms = at::empty({150}, floats), again = at::empty({150}, floats);
  kernels().norms(pieces, scratch.mutable_data_ptr<float>(), norms.mutable_data_ptr<float>());
  kernels().norms(pieces, scratch.mutable_data_ptr<float>(), again.mutable_data_ptr<float>());
  EXPECT_TRUE(at::equal(norms, again));
  for (int i = 0; i < 150; ++i) {
    const double exact = gradients[i].to(at::kDouble).square().sum().sqrt().item<double>();
    EXPECT_NEAR(norms[i].item<double>(), exact, 1e-6 * (exact + 1e-30)) << i;
  }
}

}  // namespace
}  // namespace fsdp::testing
