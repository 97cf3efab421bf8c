// Makes a module's forward run its unit's hooks.
//
//   struct BlockImpl : torch::nn::Module { torch::Tensor forward(torch::Tensor x); };
//   FSDP_MODULE(Block);                      // instead of TORCH_MODULE
//
// C++ modules have no forward hooks, so the holder's type is wrapped: Block holds a Hooked<BlockImpl>, whose forward
// shadows BlockImpl's, also through ->, () and AnyModule. A pointer to the base type (as<BlockImpl>()) bypasses the
// hooks; it then reads released weights and the error says so. `Hooked<Impl>` wraps types one cannot edit; `fsdp::call`
// (module/call.h) runs any other method with full hooks. Until the module becomes a unit the wrapper only forwards.
// Default arguments of forward hold for calls through the holder, block(x), and for block->call(x); block->forward(...)
// takes all of them.
#pragma once

#include <torch/nn/pimpl.h>

#include <type_traits>
#include <utility>

#include "fsdp/module/forward_scope.h"
#include "fsdp/module/hook_target.h"

namespace fsdp {

namespace detail {

template <typename Impl, typename Method>
class HookedForward;

#define FSDP_HOOKED_FORWARD(CONST)                                                                                    \
  template <typename Impl, typename Result, typename Owner, typename... Args>                                         \
  class HookedForward<Impl, Result (Owner::*)(Args...) CONST> : public Impl, public HookTarget {                      \
   public:                                                                                                            \
    using Impl::Impl;                                                                                                 \
    static_assert(!std::is_reference_v<Result>, "forward must return by value: the hooks outlive a reference");       \
    Result forward(Args... args) {                                                                                    \
      if (unit() == nullptr) return Impl::forward(std::forward<Args>(args)...);                                       \
      return run_with_hooks(                                                                                          \
          *unit(), [this](auto&&... cast) -> Result { return Impl::forward(std::forward<decltype(cast)>(cast)...); }, \
          std::forward<Args>(args)...);                                                                               \
    }                                                                                                                 \
    template <typename... Given>                                                                                      \
    requires(sizeof...(Given) <= sizeof...(Args)) Result call(Given&&... given) {                                     \
      if constexpr (sizeof...(Given) == sizeof...(Args)) {                                                            \
        return forward(std::forward<Given>(given)...);                                                                \
      } else {                                                                                                        \
        if (unit() == nullptr) return Impl::forward(std::forward<Given>(given)...);                                   \
        return run_with_hooks(                                                                                        \
            *unit(),                                                                                                  \
            [this](auto&&... cast) -> Result { return Impl::forward(std::forward<decltype(cast)>(cast)...); },        \
            std::forward<Given>(given)...);                                                                           \
      }                                                                                                               \
    }                                                                                                                 \
  };
FSDP_HOOKED_FORWARD()
FSDP_HOOKED_FORWARD(const)
#undef FSDP_HOOKED_FORWARD

}  // namespace detail

// `Impl::forward` must be one non-template function; for other methods use fsdp::call.
template <typename Impl>
class Hooked : public detail::HookedForward<Impl, decltype(&Impl::forward)> {
 public:
  using detail::HookedForward<Impl, decltype(&Impl::forward)>::HookedForward;
};

}  // namespace fsdp

#define FSDP_MODULE_IMPL(Name, ImplType)                                   \
  class Name : public torch::nn::ModuleHolder<::fsdp::Hooked<ImplType>> {  \
   public:                                                                 \
    using torch::nn::ModuleHolder<::fsdp::Hooked<ImplType>>::ModuleHolder; \
    using Impl [[maybe_unused]] = ::fsdp::Hooked<ImplType>;                \
    template <typename... Args>                                            \
    decltype(auto) operator()(Args&&... args) {                            \
      return this->impl_->call(std::forward<Args>(args)...);               \
    }                                                                      \
  }

#define FSDP_MODULE(Name) FSDP_MODULE_IMPL(Name, Name##Impl)
