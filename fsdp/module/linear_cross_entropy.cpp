#include "fsdp/module/linear_cross_entropy.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/ge.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sum.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/module/weight_gradient.h"
#include "fsdp/runtime/device_kernels.h"

namespace fsdp {
namespace {

using torch::autograd::variable_list;

constexpr std::int64_t kChunkBytes = 512 << 20, kLeastRows = 128;

// Null on the CPU, and where no runtime of the library is.
std::shared_ptr<Kernels> kernels_of(const at::Tensor& weight) {
  return weight.is_cuda() ? device_kernels(weight.device().index()) : nullptr;
}

CrossEntropy arguments(const at::Tensor& logits, const at::Tensor& targets, const at::Tensor& log_sums) {
  return {.logits = logits.mutable_data_ptr(),
          .dtype = logits.scalar_type(),
          .rows = logits.size(0),
          .columns = logits.size(1),
          .targets = targets.const_data_ptr<std::int64_t>(),
          .log_sums = log_sums.mutable_data_ptr<float>()};
}

void losses_of(const at::Tensor& logits, const at::Tensor& targets, const at::Tensor& log_sums,
               const at::Tensor& losses, Kernels* kernels) {
  if (kernels != nullptr) {
    CrossEntropy forward = arguments(logits, targets, log_sums);
    forward.losses = losses.mutable_data_ptr<float>();
    return kernels->cross_entropy_forward(forward);
  }
  const at::Tensor wide = logits.to(at::kFloat);
  log_sums.copy_(at::logsumexp(wide, 1));
  const at::Tensor picked = wide.gather(1, targets.clamp_min(0).unsqueeze(1)).squeeze(1);
  losses.copy_((log_sums - picked) * at::ge(targets, 0));
}

// The gradients of the logits, in their place where a kernel does it.
at::Tensor gradients_of(const at::Tensor& logits, const at::Tensor& targets, const at::Tensor& log_sums,
                        const at::Tensor& scale, Kernels* kernels) {
  if (kernels != nullptr) {
    CrossEntropy backward = arguments(logits, targets, log_sums);
    backward.scale = scale.const_data_ptr<float>();
    kernels->cross_entropy_backward(backward);
    return logits;
  }
  const at::Tensor counts = at::ge(targets, 0).to(at::kFloat).unsqueeze(1);
  at::Tensor wide = at::exp(logits.to(at::kFloat) - log_sums.unsqueeze(1));
  wide.scatter_add_(1, targets.clamp_min(0).unsqueeze(1), -counts);
  return (wide * counts * scale).to(logits.scalar_type());
}

// Edges: 0 x, 1 weight.
class LinearCrossEntropyBackward final : public torch::autograd::Node {
 public:
  LinearCrossEntropyBackward(const at::Tensor& x, const at::Tensor& weight, at::Tensor targets, at::Tensor log_sums,
                             at::Tensor per_target, std::int64_t chunk, at::Tensor last_logits)
      : x_(x, false),
        weight_(weight, false),
        targets_(std::move(targets)),
        log_sums_(std::move(log_sums)),
        per_target_(std::move(per_target)),
        chunk_(chunk),
        last_logits_(std::move(last_logits)) {}

  [[nodiscard]] std::string name() const override { return "fsdp::LinearCrossEntropyBackward"; }

  variable_list apply(variable_list&& gradients) override {
    variable_list result(num_outputs());
    if (!gradients[0].defined()) return result;
    FSDP_CHECK(!at::GradMode::is_enabled(), UsageError,
               "linear_cross_entropy: gradients of gradients (create_graph) are not supported: use at::linear and "
               "at::cross_entropy_loss");
    const at::Tensor x = x_.unpack(), weight = weight_.unpack();
    const at::Tensor rows = x.reshape({-1, x.size(-1)});
    const at::Tensor scale = (gradients[0].to(at::kFloat) * per_target_).contiguous();
    const std::shared_ptr<Kernels> kernels = kernels_of(weight);
    const bool for_x = task_should_compute_output(0), for_weight = task_should_compute_output(1);
    at::Tensor dx = for_x ? at::empty_like(rows) : at::Tensor();
    std::optional<WeightGradient> weight_gradient;
    if (for_weight) weight_gradient.emplace(weight);
    // From the end, whose logits are still there: the memory of a chunk is needed at this moment anyway.
    const std::int64_t last = rows.size(0) == 0 ? -1 : (rows.size(0) - 1) / chunk_ * chunk_;
    for (std::int64_t begin = last; begin >= 0; begin -= chunk_) {
      const std::int64_t end = std::min(begin + chunk_, rows.size(0));
      const at::Tensor some = rows.slice(0, begin, end);
      at::Tensor logits = begin == last ? std::exchange(last_logits_, {}) : at::Tensor();
      if (!logits.defined()) logits = at::mm(some, weight.t());
      const at::Tensor dy =
          gradients_of(logits, targets_.slice(0, begin, end), log_sums_.slice(0, begin, end), scale, kernels.get());
      logits.reset();
      if (for_x) {
        at::Tensor part = dx.slice(0, begin, end);
        at::mm_out(part, dy, weight);
      }
      if (for_weight) weight_gradient->add(dy, some);
    }
    if (for_x) result[0] = dx.view(x.sizes());
    if (for_weight) result[1] = weight_gradient->take();
    return result;
  }

  void release_variables() override {
    x_.reset_data();
    weight_.reset_data();
    targets_.reset();
    log_sums_.reset();
    last_logits_.reset();
  }

 private:
  torch::autograd::SavedVariable x_, weight_;
  at::Tensor targets_, log_sums_, per_target_;  // per_target_: of the loss, one number
  std::int64_t chunk_;
  at::Tensor last_logits_;  // of the last chunk, for the first backward
};

}  // namespace

at::Tensor linear_cross_entropy(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& targets,
                                const LinearCrossEntropyOptions& options) {
  FSDP_CHECK(x.dim() >= 1 && weight.dim() == 2 && x.size(-1) == weight.size(1), UsageError,
             "linear_cross_entropy: expected x (..., width) and a weight (vocabulary, width), got {} and {} dimensions "
             "with widths {} and {}",
             x.dim(), weight.dim(), x.dim() > 0 ? x.size(-1) : 0, weight.dim() > 0 ? weight.size(-1) : 0);
  FSDP_CHECK(targets.scalar_type() == at::kLong && targets.numel() * x.size(-1) == x.numel(), UsageError,
             "linear_cross_entropy: expected one int64 target for each of {} rows, got {} of {}",
             x.numel() / x.size(-1), targets.numel(), c10::toString(targets.scalar_type()));
  FSDP_CHECK(options.reduction == at::Reduction::Mean || options.reduction == at::Reduction::Sum, UsageError,
             "linear_cross_entropy: expected the reduction Mean or Sum");
  const bool tracked = at::GradMode::is_enabled() && (x.requires_grad() || weight.requires_grad());
  const auto row_bytes = weight.size(0) * static_cast<std::int64_t>(x.element_size());
  const std::int64_t chunk = options.chunk_rows > 0
                                 ? options.chunk_rows
                                 : std::max(kLeastRows, kChunkBytes / std::max<std::int64_t>(1, row_bytes));
  at::Tensor loss, log_sums, per_target, last_logits;
  const at::Tensor flat_targets = targets.reshape({-1}).contiguous();
  {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    const at::Tensor rows = x.reshape({-1, x.size(-1)});
    const auto floats = at::TensorOptions().dtype(at::kFloat).device(x.device());
    log_sums = at::empty({rows.size(0)}, floats);
    const at::Tensor losses = at::empty({rows.size(0)}, floats);
    const std::shared_ptr<Kernels> kernels = kernels_of(weight);
    for (std::int64_t begin = 0; begin < rows.size(0); begin += chunk) {
      const std::int64_t end = std::min(begin + chunk, rows.size(0));
      last_logits.reset();
      last_logits = at::mm(rows.slice(0, begin, end), weight.t());
      losses_of(last_logits, flat_targets.slice(0, begin, end), log_sums.slice(0, begin, end),
                losses.slice(0, begin, end), kernels.get());
    }
    loss = losses.sum();
    per_target = options.reduction == at::Reduction::Sum ? at::ones({}, floats)
                                                         : at::ge(flat_targets, 0).sum().to(at::kFloat).reciprocal();
    if (options.reduction == at::Reduction::Mean) loss = loss * per_target;
  }
  if (!tracked) return loss;
  auto node = std::make_shared<LinearCrossEntropyBackward>(x, weight, flat_targets, log_sums, std::move(per_target),
                                                           chunk, std::move(last_logits));
  torch::autograd::edge_list edges;
  edges.push_back(x.requires_grad() ? torch::autograd::impl::gradient_edge(x) : torch::autograd::Edge());
  edges.push_back(weight.requires_grad() ? torch::autograd::impl::gradient_edge(weight) : torch::autograd::Edge());
  node->set_next_edges(std::move(edges));
  torch::autograd::set_history(loss, node);
  return loss;
}

}  // namespace fsdp
