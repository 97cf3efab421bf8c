#include "models/rotary.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cos.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/sin.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <bit>

#include "fsdp/base/check.h"
#include "fsdp/runtime/device_kernels.h"

namespace fsdp::models {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor rotated(const at::Tensor& some, const at::Tensor& cosine, const at::Tensor& sine, bool backward) {
  const at::Tensor x = some.stride(3) == 1 ? some : some.contiguous();
  at::Tensor out = at::empty(x.sizes(), x.options());
  device_kernels(x.device().index())
      ->rotate({.x = x.const_data_ptr(),
                .batch_stride = x.stride(0),
                .position_stride = x.stride(1),
                .head_stride = x.stride(2),
                .out = out.mutable_data_ptr(),
                .cosine = cosine.const_data_ptr(),
                .sine = sine.const_data_ptr(),
                .dtype = x.scalar_type(),
                .batches = x.size(0),
                .positions = x.size(1),
                .heads = x.size(2),
                .width = x.size(3),
                .backward = backward});
  return out;
}

class RotateFunction : public torch::autograd::Function<RotateFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& cosine,
                            const at::Tensor& sine) {
    context->saved_data["cosine"] = cosine;
    context->saved_data["sine"] = sine;
    return rotated(x, cosine, sine, /*backward=*/false);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    FSDP_CHECK(!at::GradMode::is_enabled(), UsageError,
               "rotary positions: gradients of gradients are not supported on a GPU");
    return {rotated(gradients[0], context->saved_data["cosine"].toTensor(), context->saved_data["sine"].toTensor(),
                    /*backward=*/true),
            {},
            {}};
  }
};

}  // namespace

at::Tensor RotaryTable::rotate(const at::Tensor& x) {
  const auto& entry = find(x);
  if (x.is_cuda() && x.scalar_type() != at::kDouble && device_kernels(x.device().index()) != nullptr)
    return RotateFunction::apply(x, entry.cosine, entry.sine);
  const std::int64_t positions = x.size(1);
  const std::int64_t half = head_width_ / 2;
  const at::Tensor swapped = at::cat({x.narrow(-1, half, half), x.narrow(-1, 0, half)}, -1);
  return at::addcmul(x * entry.cosine.narrow(0, 0, positions), swapped, entry.sine.narrow(0, 0, positions));
}

const RotaryTable::Entry& RotaryTable::find(const at::Tensor& x) {
  auto entry = std::find_if(entries_.begin(), entries_.end(),
                            [&](const Entry& e) { return e.device == x.device() && e.dtype == x.scalar_type(); });
  if (entry != entries_.end() && entry->cosine.size(0) >= x.size(1)) return *entry;
  if (entry == entries_.end()) entry = entries_.insert(entries_.end(), Entry{x.device(), x.scalar_type(), {}, {}});

  // Made under inference mode they could not take part in a later backward.
  c10::InferenceMode no_inference(false);
  const auto positions = static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(x.size(1))));
  const auto options = at::TensorOptions().dtype(at::kDouble).device(x.device());
  const auto frequency = at::pow(theta_, at::arange(0, head_width_, 2, options) / -static_cast<double>(head_width_));
  const auto angle = at::outer(at::arange(positions, options), frequency);
  const at::Tensor cosine = at::cos(angle);
  const at::Tensor sine = at::sin(angle);
  entry->cosine = at::cat({cosine, cosine}, -1).unsqueeze(1).to(x.scalar_type());
  entry->sine = at::cat({-sine, sine}, -1).unsqueeze(1).to(x.scalar_type());
  return *entry;
}

}  // namespace fsdp::models
