#include "fsdp/module/grouped_linear.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <numeric>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/module/delayed_weight_gradients.h"
#include "fsdp/module/grad_accumulator.h"
#include "fsdp/module/weight_gradient.h"

namespace fsdp {
namespace {

using torch::autograd::variable_list;

// One kernel for all parts: bf16 on a GPU, rows of whole 16 bytes.
bool in_one_kernel(const at::Tensor& x, const at::Tensor& weight, const RowGroups& groups) {
  return groups.ends.defined() && x.scalar_type() == at::kBFloat16 && x.size(0) > 0 && weight.size(1) % 8 == 0 &&
         weight.size(2) % 8 == 0;
}

// out[rows of part i] = x[rows of part i] times weight[i], transposed or not.
at::Tensor products(const at::Tensor& x, const at::Tensor& weight, const RowGroups& groups, bool transposed) {
  if (in_one_kernel(x, weight, groups))
    return at::_grouped_mm(x, transposed ? weight.transpose(1, 2) : weight, groups.ends);
  const auto& rows = groups.rows;
  at::Tensor out = at::empty({x.size(0), weight.size(transposed ? 1 : 2)}, x.options());
  std::int64_t begin = 0;
  for (std::size_t i = 0; i < rows.size(); begin += rows[i++]) {
    if (rows[i] == 0) continue;
    const at::Tensor part = weight.select(0, static_cast<std::int64_t>(i));
    at::Tensor place = out.narrow(0, begin, rows[i]);
    at::mm_out(place, x.narrow(0, begin, rows[i]), transposed ? part.t() : part);
  }
  return out;
}

void add_products(WeightGradient& gradient, const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight,
                  const RowGroups& groups) {
  // Where products are kept in fp32 each part has a kernel of its own, for one kernel for all rounds them.
  if (gradient.keeps(x.scalar_type()) && in_one_kernel(x, weight, groups)) {
    gradient.add_product(at::_grouped_mm(dy.t(), x, groups.ends));
    return;
  }
  std::int64_t begin = 0;
  for (std::size_t i = 0; i < groups.rows.size(); begin += groups.rows[i++])
    gradient.add_part(static_cast<std::int64_t>(i), dy.narrow(0, begin, groups.rows[i]),
                      x.narrow(0, begin, groups.rows[i]));
}

// Edges: 0 input, 1 weight (none when its gradient is delayed).
class GroupedLinearBackward final : public torch::autograd::Node {
 public:
  GroupedLinearBackward(const at::Tensor& x, const at::Tensor& weight, const RowGroups& groups,
                        std::shared_ptr<DelayedWeightGradients::Queue> later)
      : x_(x, false), weight_(weight, false), groups_(groups), later_(std::move(later)) {
    if (later_) accumulator_ = torch::autograd::impl::grad_accumulator(weight);
  }

  [[nodiscard]] std::string name() const override { return "fsdp::GroupedLinearBackward"; }

  variable_list apply(variable_list&& gradients) override {
    variable_list result(num_outputs());
    if (!gradients[0].defined()) return result;
    FSDP_CHECK(!at::GradMode::is_enabled(), UsageError, "fsdp::grouped_linear has no second derivative");
    const at::Tensor dy = gradients[0].contiguous();
    const at::Tensor x = x_.unpack();
    const at::Tensor weight = weight_.unpack();
    if (task_should_compute_output(0)) result[0] = products(dy, weight, groups_, /*transposed=*/false);
    if (task_should_compute_output(1)) {
      WeightGradient gradient(weight);
      add_products(gradient, dy, x, weight, groups_);
      result[1] = gradient.take();
    }
    if (later_) {
      DelayedWeightGradients::leave(
          *later_, {accumulator_, weight, dy, x,
                    [weight, groups = groups_](WeightGradient& gradient, const auto& dy, const auto& x) {
                      add_products(gradient, dy, x, weight, groups);
                    }});
    }
    return result;
  }

  void release_variables() override {
    x_.reset_data();
    weight_.reset_data();
  }

 private:
  torch::autograd::SavedVariable x_, weight_;
  const RowGroups groups_;
  const std::shared_ptr<DelayedWeightGradients::Queue> later_;
  std::shared_ptr<torch::autograd::Node> accumulator_;
};

}  // namespace

RowGroups row_groups(std::vector<std::int64_t> rows, c10::Device device) {
  RowGroups groups{std::move(rows), {}};
  if (!device.is_cuda()) return groups;
  at::Tensor ends = at::empty({static_cast<std::int64_t>(groups.rows.size())},
                              at::TensorOptions().dtype(at::kInt).pinned_memory(true));
  auto* end = ends.mutable_data_ptr<std::int32_t>();
  std::int64_t sum = 0;
  for (const auto count : groups.rows) *end++ = static_cast<std::int32_t>(sum += count);
  groups.ends = ends.to(device, at::kInt, /*non_blocking=*/true);
  return groups;
}

at::Tensor grouped_linear(const at::Tensor& x, const at::Tensor& weight, const RowGroups& groups) {
  const auto& rows = groups.rows;
  FSDP_CHECK(x.dim() == 2 && weight.dim() == 3 && x.size(1) == weight.size(2), UsageError,
             "grouped_linear: expected x (n, in) and weight (parts, out, in), got {} and {} dimensions", x.dim(),
             weight.dim());
  FSDP_CHECK(static_cast<std::int64_t>(rows.size()) == weight.size(0) &&
                 std::accumulate(rows.begin(), rows.end(), std::int64_t{0}) == x.size(0),
             UsageError, "grouped_linear: {} row counts that add up to {}, expected {} that add up to {}", rows.size(),
             std::accumulate(rows.begin(), rows.end(), std::int64_t{0}), weight.size(0), x.size(0));
  at::Tensor y;
  {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    y = products(x, weight, groups, /*transposed=*/true);
  }
  if (!at::GradMode::is_enabled() || (!x.requires_grad() && !weight.requires_grad())) return y;
  const bool managed = GradAccumulator::find(weight) != nullptr;
  auto later = managed ? DelayedWeightGradients::current(weight) : nullptr;
  const bool delayed = later != nullptr;
  auto node = std::make_shared<GroupedLinearBackward>(x, weight, groups, std::move(later));
  torch::autograd::edge_list edges;
  edges.push_back(x.requires_grad() ? torch::autograd::impl::gradient_edge(x) : torch::autograd::Edge());
  edges.push_back(weight.requires_grad() && !delayed ? torch::autograd::impl::gradient_edge(weight)
                                                     : torch::autograd::Edge());
  node->set_next_edges(std::move(edges));
  torch::autograd::set_history(y, node);
  return y;
}

}  // namespace fsdp
