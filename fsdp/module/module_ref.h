// Whatever names a torch module: a shared pointer to it or a holder of one.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <utility>

namespace fsdp {

class ModuleRef {
 public:
  template <typename M>
  requires std::is_base_of_v<torch::nn::Module, M> ModuleRef(std::shared_ptr<M> module)
      : module_(std::move(module)) {}  // NOLINT(google-explicit-constructor)

  template <typename Holder>
  requires requires(const Holder& holder) {
    holder.ptr();
    typename Holder::ContainedType;
  }
  ModuleRef(const Holder& holder) : module_(holder.ptr()) {}  // NOLINT(google-explicit-constructor)

  [[nodiscard]] const std::shared_ptr<torch::nn::Module>& ptr() const { return module_; }

 private:
  std::shared_ptr<torch::nn::Module> module_;
};

}  // namespace fsdp
