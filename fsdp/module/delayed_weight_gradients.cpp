#include "fsdp/module/delayed_weight_gradients.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>

#include <utility>

#include "fsdp/module/weight_gradient.h"

namespace fsdp {
namespace {

thread_local const DelayedWeightGradients* current_owner = nullptr;

}  // namespace

DelayedWeightGradients::DelayedWeightGradients() : queue_(std::make_shared<Queue>()) {}

DelayedWeightGradients::Scope::Scope(const DelayedWeightGradients& owner)
    : previous_(std::exchange(current_owner, &owner)) {}
DelayedWeightGradients::Scope::~Scope() { current_owner = previous_; }

std::shared_ptr<DelayedWeightGradients::Queue> DelayedWeightGradients::current() {
  return current_owner == nullptr ? nullptr : current_owner->queue_;
}

void DelayedWeightGradients::run() {
  at::NoGradGuard no_grad;
  while (!queue_->empty()) {
    const Product product = std::move(queue_->front());
    queue_->pop_front();
    WeightGradient gradient(product.weight);
    gradient.add(product.dy, product.x);
    (*product.accumulator)({gradient.take()});
  }
}

std::size_t DelayedWeightGradients::pending() const { return queue_->size(); }
void DelayedWeightGradients::drop() { queue_->clear(); }

}  // namespace fsdp
