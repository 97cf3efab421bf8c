// Activation checkpointing: a function whose intermediate values are computed again in backward instead of kept.
//
//   x = fsdp::recompute([&](at::Tensor x) { return block(x); }, x);
//
// Method: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174). The function runs untracked,
// and once more, tracked, when its backward comes: in the same dtypes, autocast settings and random state
// (rank_generator()), so gradients equal those of a plain run bit for bit. Weights of units are gathered again for the
// second run and stay for the backward that follows. Calls nest, contain units and may be made inside them.
//
// Arguments are copied; their tensors must be reachable by a TensorVisitor, and gradients flow to them. Tensors that
// the function captures must be leaves (weights). Results must hold tensors (TensorVisitor). Throws UsageError in
// backward when an argument was changed in place, when the second run returns other shapes, and under autograd::grad or
// create_graph.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <functional>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/module/tensor_visitor.h"

namespace fsdp {

namespace detail {

// The function and its arguments, to be run again.
class RecomputedCall {
 public:
  virtual ~RecomputedCall() = default;
  // With `inputs` in place of the tensors in the arguments. Returns the tensors in the result.
  virtual std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) = 0;
};

// The first run: untracked, with what it depends on written down.
class FirstRun {
 public:
  explicit FirstRun(const std::vector<at::Tensor>& inputs);
  ~FirstRun();
  FirstRun(const FirstRun&) = delete;
  FirstRun& operator=(const FirstRun&) = delete;

  // Ends the run and attaches its backward to the floating-point tensors among `outputs`.
  void attach(std::unique_ptr<RecomputedCall> call, std::vector<at::Tensor> inputs, std::vector<at::Tensor>& outputs);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

template <typename Value>
std::vector<at::Tensor> tensors_of(Value& value) {
  std::vector<at::Tensor> tensors;
  visit_tensors(value, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
  return tensors;
}

template <typename Value>
void replace_tensors(Value& value, const std::vector<at::Tensor>& tensors) {
  std::size_t next = 0;
  visit_tensors(value, [&](at::Tensor& tensor) { tensor = tensors[next++]; });
}

template <typename Function, typename Arguments>
class RecomputedCallOf final : public RecomputedCall {
 public:
  RecomputedCallOf(Function function, Arguments arguments)
      : function_(std::move(function)), arguments_(std::move(arguments)) {}
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) override {
    Arguments arguments = arguments_;
    replace_tensors(arguments, inputs);
    auto result = std::apply(function_, std::move(arguments));
    return tensors_of(result);
  }

 private:
  Function function_;
  Arguments arguments_;
};

}  // namespace detail

// Calls `function(args...)`. Where gradients are off, nothing else happens.
template <typename Function, typename... Args>
auto recompute(Function&& function, Args&&... args) {
  static_assert(
      (Visitable<Args> && ...),
      "recompute: an argument may hold tensors that cannot be found; specialise fsdp::TensorVisitor for it, or "
      "capture it when it holds none");
  using Arguments = std::tuple<std::decay_t<Args>...>;
  using Result = std::decay_t<std::invoke_result_t<std::decay_t<Function>&, std::decay_t<Args>...>>;
  static_assert(!std::is_void_v<Result>, "recompute: the function must return its results");
  static_assert(Visitable<Result>,
                "recompute: the result may hold tensors that cannot be found; specialise fsdp::TensorVisitor for it");
  Arguments arguments(std::forward<Args>(args)...);
  if (!at::GradMode::is_enabled()) return Result(std::apply(function, std::move(arguments)));
  auto inputs = detail::tensors_of(arguments);
  auto call = std::make_unique<detail::RecomputedCallOf<std::decay_t<Function>, Arguments>>(function, arguments);
  detail::FirstRun first(inputs);
  Result result = std::apply(function, std::move(arguments));
  auto outputs = detail::tensors_of(result);
  first.attach(std::move(call), std::move(inputs), outputs);
  detail::replace_tensors(result, outputs);
  return result;
}

}  // namespace fsdp
