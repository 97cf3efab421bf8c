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

  // The argument in the unit's compute dtype, when it is a floating-point tensor and the policy says so.
  void cast_input(at::Tensor& input);
  // All arguments were seen: what follows is prefetched, the current stream waits for the weights.
  void start();
  // The backward of `output` gathers the unit's weights first.
  void watch_output(const at::Tensor& output);
  void finish();

 private:
  FsdpModule& unit_;
  trace::Span* span_ = nullptr;  // forward_compute, when recording
  bool backward_expected_ = false;
  bool finished_ = false;
};

namespace detail {

// An argument as forward gets it: tensors by value or const reference are replaced by a cast copy, the rest is passed
// on.
template <typename Arg>
decltype(auto) cast_argument(ForwardScope& scope, Arg&& arg) {
  constexpr bool is_tensor = std::is_same_v<std::remove_cvref_t<Arg>, at::Tensor>;
  constexpr bool may_be_written = std::is_lvalue_reference_v<Arg&&> && !std::is_const_v<std::remove_reference_t<Arg>>;
  if constexpr (is_tensor && !may_be_written) {
    at::Tensor input = std::forward<Arg>(arg);
    scope.cast_input(input);
    return input;
  } else {
    return std::forward<Arg>(arg);
  }
}

}  // namespace detail

// Calls `function(args...)` as the forward of `unit`.
template <typename Function, typename... Args>
auto run_with_hooks(FsdpModule& unit, Function&& function, Args&&... args) {
  ForwardScope scope(unit);
  std::tuple<decltype(detail::cast_argument(scope, std::forward<Args>(args)))...> cast{
      detail::cast_argument(scope, std::forward<Args>(args))...};
  scope.start();
  return std::apply(
      [&](auto&... value) {
        using Result = decltype(function(
            std::forward<decltype(detail::cast_argument(scope, std::forward<Args>(args)))>(value)...));
        if constexpr (std::is_void_v<Result>) {
          function(std::forward<decltype(detail::cast_argument(scope, std::forward<Args>(args)))>(value)...);
          scope.finish();
        } else {
          Result result =
              function(std::forward<decltype(detail::cast_argument(scope, std::forward<Args>(args)))>(value)...);
          visit_tensors(result, [&](const at::Tensor& tensor) { scope.watch_output(tensor); });
          scope.finish();
          return result;
        }
      },
      cast);
}

}  // namespace fsdp
