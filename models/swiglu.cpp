#include "models/swiglu.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/silu.h>
#include <torch/csrc/autograd/custom_function.h>

#include "fsdp/base/check.h"
#include "fsdp/runtime/device_kernels.h"

namespace fsdp::models {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class SwiGluFunction : public torch::autograd::Function<SwiGluFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& gate, const at::Tensor& up) {
    const at::Tensor dense_gate = gate.contiguous(), dense_up = up.contiguous();
    at::Tensor out = at::empty_like(dense_gate);
    SwiGlu arguments = on(dense_gate, dense_up);
    arguments.out = out.mutable_data_ptr();
    device_kernels(gate.device().index())->swiglu_forward(arguments);
    context->save_for_backward({dense_gate, dense_up});
    return out;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    FSDP_CHECK(!at::GradMode::is_enabled(), UsageError, "swiglu: gradients of gradients are not supported on a GPU");
    const auto saved = context->get_saved_variables();
    const at::Tensor gradient = gradients[0].contiguous();
    at::Tensor gate = at::empty_like(saved[0]), up = at::empty_like(saved[1]);
    SwiGlu arguments = on(saved[0], saved[1]);
    arguments.gradient = gradient.const_data_ptr();
    arguments.gate_gradient = gate.mutable_data_ptr();
    arguments.up_gradient = up.mutable_data_ptr();
    device_kernels(gate.device().index())->swiglu_backward(arguments);
    return {gate, up};
  }

 private:
  static SwiGlu on(const at::Tensor& gate, const at::Tensor& up) {
    return {
        .gate = gate.const_data_ptr(), .up = up.const_data_ptr(), .dtype = gate.scalar_type(), .count = gate.numel()};
  }
};

}  // namespace

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  const bool kernel = gate.is_cuda() && gate.scalar_type() != at::kDouble && gate.scalar_type() == up.scalar_type() &&
                      gate.sizes() == up.sizes() && device_kernels(gate.device().index()) != nullptr;
  return kernel ? SwiGluFunction::apply(gate, up) : at::silu(gate) * up;
}

}  // namespace fsdp::models
