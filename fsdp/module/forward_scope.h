// The hooks of one forward: weights gathered before, dropped after, backward prepared on the results.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>
#include <type_traits>
#include <utility>

#include "fsdp/module/tensor_visitor.h"

namespace fsdp {

class FsdpModule;
namespace trace {
struct Span;
}

// RAII: leaving without `finish` (an exception) undoes what the constructor did, as far as it can be undone; the
// context then needs reset().
class ForwardScope {
 public:
  explicit ForwardScope(FsdpModule& unit);
  ~ForwardScope();
  ForwardScope(const ForwardScope&) = delete;
  ForwardScope& operator=(const ForwardScope&) = delete;

  // A tensor of the arguments, which becomes one in the unit's compute dtype when it is floating-point and the policy
  // says so.
  void take_input(at::Tensor& input);
  // All arguments were seen: what follows is prefetched, the current stream waits for the weights.
  void start();
  // A tensor of the result, cast to the policy's output dtype. Its backward gathers the unit's weights first.
  void give_output(at::Tensor& output);
  void give_output(const at::Tensor& output);  // as above, where the tensor cannot be replaced
  void finish();

 private:
  void watch_output(const at::Tensor& output);
  void leave();  // what follows belongs to the enclosing forward again

  FsdpModule& unit_;
  FsdpModule* enclosing_ = nullptr;  // whose forward this one interrupts
  std::uint64_t first_node_ = 0;     // number of the first autograd node that it may make
  trace::Span* span_ = nullptr;      // forward_compute, when recording
  std::uint64_t range_ = 0;          // the same for a profiler that is attached
  bool backward_expected_ = false;
  bool finished_ = false;
};

namespace detail {

// An argument as forward gets it: what is passed by value or const reference is replaced by a copy whose tensors are
// cast; what forward may write to, and types without visitor, are passed on.
template <typename Arg>
decltype(auto) take_argument(ForwardScope& scope, Arg&& arg) {
  using Value = std::remove_cvref_t<Arg>;
  constexpr bool may_be_written = std::is_lvalue_reference_v<Arg&&> && !std::is_const_v<std::remove_reference_t<Arg>>;
  if constexpr (!may_be_written && Visitable<Value> && !HoldsNoTensor<Value> && std::is_constructible_v<Value, Arg&&>) {
    Value value = std::forward<Arg>(arg);
    visit_tensors(value, [&](auto& tensor) {
      if constexpr (!std::is_const_v<std::remove_reference_t<decltype(tensor)>>) scope.take_input(tensor);
    });
    return value;
  } else {
    return std::forward<Arg>(arg);
  }
}

}  // namespace detail

// Calls `function(args...)` as the forward of `unit`.
template <typename Function, typename... Args>
auto run_with_hooks(FsdpModule& unit, Function&& function, Args&&... args) {
  ForwardScope scope(unit);
  std::tuple<decltype(detail::take_argument(scope, std::forward<Args>(args)))...> taken{
      detail::take_argument(scope, std::forward<Args>(args))...};
  scope.start();
  return std::apply(
      [&](auto&... value) {
        using Result = decltype(function(
            std::forward<decltype(detail::take_argument(scope, std::forward<Args>(args)))>(value)...));
        if constexpr (std::is_void_v<Result>) {
          function(std::forward<decltype(detail::take_argument(scope, std::forward<Args>(args)))>(value)...);
          scope.finish();
        } else {
          Result result =
              function(std::forward<decltype(detail::take_argument(scope, std::forward<Args>(args)))>(value)...);
          visit_tensors(result, [&](auto& tensor) { scope.give_output(tensor); });
          scope.finish();
          return result;
        }
      },
      taken);
}

}  // namespace fsdp
