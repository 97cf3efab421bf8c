#include "fsdp/module/fsdp_module.h"

#include "fsdp/base/check.h"
#include "fsdp/base/intern.h"
#include "fsdp/module/backward_watch.h"
#include "fsdp/module/hook_target.h"
#include "fsdp/module/scheduler.h"

namespace fsdp {

FsdpModule::FsdpModule(Scheduler& scheduler, int index, std::vector<std::shared_ptr<torch::nn::Module>> modules,
                       UnitOptions options)
    : scheduler_(scheduler), index_(index), modules_(std::move(modules)), options_(std::move(options)) {
  set_name(fmt::format("unit {}", index));  // until the context is finalized
  if (!options_.register_hooks) return;
  for (auto& module : modules_) dynamic_cast<HookTarget&>(*module).set_unit(this);
}

FsdpModule::~FsdpModule() {
  backward_watch::forget(*this);
  for (auto& module : modules_) {
    if (auto* target = dynamic_cast<HookTarget*>(module.get()); target != nullptr && target->unit() == this)
      target->set_unit(nullptr);
  }
}

void FsdpModule::set_name(const std::string& name) {
  const auto label = [&](const char* operation) { return intern(fmt::format("FSDP:{}:{}", name, operation)); };
  names_ = {name,
            label("forward_compute"),
            label("backward_compute"),
            label("unshard"),
            label("reshard"),
            label("reduce_gradients")};
}

std::vector<std::pair<std::string, at::Tensor>> FsdpModule::buffers() const {
  std::vector<std::pair<std::string, at::Tensor>> all;
  for (const auto& buffer : buffers_) all.emplace_back(buffer.name, buffer.tensor);
  return all;
}

void FsdpModule::unshard(std::optional<Phase> prefetch) { scheduler_.unshard(*this, prefetch); }
bool FsdpModule::ready() const { return scheduler_.current(*this); }
void FsdpModule::gather() { scheduler_.gather(*this); }
void FsdpModule::reshard() { scheduler_.reshard(*this); }
void FsdpModule::reduce_gradients() { scheduler_.reduce(*this); }
Bytes FsdpModule::inline_limit() const { return scheduler_.options().inline_limit; }
Stream FsdpModule::compute_stream() const { return scheduler_.compute_stream(); }

void FsdpModule::set_forward_prefetch(const std::vector<FsdpModule*>& units) {
  scheduler_.set_prefetch_list(Phase::forward, *this, units);
}
void FsdpModule::set_backward_prefetch(const std::vector<FsdpModule*>& units) {
  scheduler_.set_prefetch_list(Phase::backward, *this, units);
}

void FsdpModule::pin() {
  unshard();
  ++pins_;
}

void FsdpModule::unpin() {
  if (--pins_ == 0 && !scheduler_.in_use(*this)) scheduler_.end_scope(*this);
}

void FsdpModule::open_window() {
  if (window_ == Window::open) return;
  if (window_ == Window::complete && options_.register_hooks) return;  // a late gradient joins those that are held
  if (window_ == Window::queued) scheduler_.launch_queued(*this);
  FSDP_CHECK(window_ == Window::closed, UsageError,
             "a gradient of unit \"{}\" arrived, but its previous gradients were not reduced: call reduce_gradients() "
             "in its post-backward hook",
             name());
  scheduler_.ensure_backward_started(*this);
  scheduler_.line_up(*this);
  window_ = Window::open;
  pending_ = trainable_count_;
  last_microbatch_ = scheduler_.microbatch().is_last;
  bool needs_slot = false;
  for (auto& group : groups_) {
    if (group->trainable())
      needs_slot |= group->open_window(last_microbatch_, scheduler_.reduce_policy(), scheduler_.accumulation_pool());
  }
  if (!needs_slot) return;
  const BufferPool::Source source = scheduler_.take_slot(*this);
  for (auto& group : groups_) {
    if (group->trainable()) group->attach_slot(scheduler_.slot_pool(), source);
  }
}

void FsdpModule::gradient_arrived(bool expected) {
  if (window_ == Window::complete) {
    for (auto& group : groups_) {
      if (group->trainable()) group->close_window();
    }
    scheduler_.compute_stream().record(packed_event_);
    return;
  }
  FSDP_INVARIANT(window_ == Window::open);
  if (!expected || pending_ == 0) return;
  --pending_;
  scheduler_.gradient_arrived(*this);
  if (pending_ == 0) complete_window();
}

void FsdpModule::complete_window() {
  for (auto& group : groups_) {
    if (!group->trainable()) continue;
    group->close_window();
    group->prepare_reduction();
  }
  window_ = Window::complete;
  scheduler_.compute_stream().record(packed_event_);
  scheduler_.window_completed(*this);
}

}  // namespace fsdp
