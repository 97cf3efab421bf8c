// Runs any method of a module as its unit's forward: unshard before, reshard after, backward prepared on the result.
//
//   fsdp::call(model, &GPTImpl::loss, tokens, targets).backward();
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "fsdp/module/forward_scope.h"
#include "fsdp/module/module_ref.h"

namespace fsdp {

// The unit that the module itself is, or null.
[[nodiscard]] FsdpModule* find_unit(const torch::nn::Module& module);

namespace detail {

template <typename Impl, typename Method, typename... Args>
decltype(auto) call_method(Impl& impl, Method method, Args&&... args) {
  FsdpModule* unit = find_unit(impl);
  if (unit == nullptr) return std::invoke(method, impl, std::forward<Args>(args)...);
  return run_with_hooks(
      *unit,
      [&](auto&&... cast) -> decltype(auto) {
        return std::invoke(method, impl, std::forward<decltype(cast)>(cast)...);
      },
      std::forward<Args>(args)...);
}

}  // namespace detail

template <typename M, typename Method, typename... Args>
decltype(auto) call(const std::shared_ptr<M>& module, Method method, Args&&... args) {
  return detail::call_method(*module, method, std::forward<Args>(args)...);
}

template <typename Holder, typename Method, typename... Args>
requires requires(const Holder& holder) { typename Holder::ContainedType; }
decltype(auto) call(const Holder& module, Method method, Args&&... args) {
  return detail::call_method(*module.ptr(), method, std::forward<Args>(args)...);
}

}  // namespace fsdp
