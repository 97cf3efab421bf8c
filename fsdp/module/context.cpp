#include "fsdp/module/context.h"

#include <ATen/core/grad_mode.h>

#include "fsdp/base/check.h"
#include "fsdp/mesh/rank_generator.h"
#include "fsdp/module/scheduler.h"

namespace fsdp {
namespace {

// FNV-1a, fixed for all time: initial values must not depend on the standard library's hash.
std::uint64_t hash_name(const std::string& name, std::uint64_t seed) {
  std::uint64_t hash = 14695981039346656037ULL ^ seed;
  for (unsigned char c : name) hash = (hash ^ c) * 1099511628211ULL;
  return hash;
}

}  // namespace

FsdpContext::FsdpContext(std::unique_ptr<Scheduler> scheduler) : scheduler_(std::move(scheduler)) {}
FsdpContext::~FsdpContext() = default;

std::shared_ptr<FsdpContext> FsdpContext::create(DeviceMesh mesh, ContextOptions options) {
  return std::shared_ptr<FsdpContext>(
      new FsdpContext(std::make_unique<Scheduler>(std::move(mesh), std::move(options))));
}

FsdpModule& FsdpContext::fully_shard(const ModuleRef& module, const UnitOptions& options) {
  return scheduler_->add_unit({module.ptr()}, options);
}

FsdpModule& FsdpContext::fully_shard(const std::vector<ModuleRef>& modules, const UnitOptions& options) {
  std::vector<std::shared_ptr<torch::nn::Module>> pointers;
  for (const auto& module : modules) pointers.push_back(module.ptr());
  return scheduler_->add_unit(std::move(pointers), options);
}

void FsdpContext::finalize() { scheduler_->finalize(); }

void FsdpContext::materialize(const InitFunction& init, const MaterializeOptions& options) {
  finalize();
  const auto fill = [&](const std::string& name, at::Tensor& whole) {
    at::Generator generator = new_generator(whole.device(), hash_name(name, options.seed));
    init(name, whole, generator);
  };
  for (auto* group : groups()) group->materialize(fill);
  scheduler_->materialize_buffers(fill);
}

std::vector<at::Tensor> FsdpContext::parameters() const {
  std::vector<at::Tensor> leaves;
  for (auto& [name, leaf] : named_parameters()) leaves.push_back(leaf);
  return leaves;
}

std::vector<std::pair<std::string, at::Tensor>> FsdpContext::named_parameters() const {
  scheduler_->finalize();
  std::vector<std::pair<std::string, at::Tensor>> leaves;
  for (const auto* group : groups()) {
    for (const auto& p : group->parameters()) leaves.emplace_back(p.name, p.leaf);
  }
  return leaves;
}

at::Tensor FsdpContext::full_parameter(const std::string& name) {
  scheduler_->finalize();
  const auto [group, index] = scheduler_->find_parameter(name);
  return group->full_tensor(index, /*gradient=*/false, scheduler_->gather_stream());
}

at::Tensor FsdpContext::full_gradient(const std::string& name) {
  scheduler_->finalize();
  wait_for_gradients();
  const auto [group, index] = scheduler_->find_parameter(name);
  return group->full_tensor(index, /*gradient=*/true, scheduler_->gather_stream());
}

FsdpContext::MicrobatchScope::MicrobatchScope(Scheduler& scheduler, const MicrobatchOptions& options)
    : scheduler_(scheduler), previous_(scheduler.microbatch()) {
  scheduler_.microbatch() = options;
}
FsdpContext::MicrobatchScope::~MicrobatchScope() { scheduler_.microbatch() = previous_; }
FsdpContext::MicrobatchScope FsdpContext::microbatch(const MicrobatchOptions& options) {
  return {*scheduler_, options};
}

FsdpContext::StepScope::StepScope(Scheduler& scheduler) : scheduler_(scheduler) { scheduler_.declare_step(true); }
FsdpContext::StepScope::~StepScope() { scheduler_.declare_step(false); }
const MicrobatchOptions& FsdpContext::current_microbatch() const { return scheduler_->microbatch(); }

FsdpContext::CapturedStep FsdpContext::capture(const std::function<at::Tensor()>& step) {
  finalize();
  scheduler_->check_idle("capture");
  scheduler_->before_capture();
  CapturedStep captured;
  captured.context_ = shared_from_this();
  try {
    captured.graph_ = mesh().runtime()->capture([&] { captured.result_ = step(); });
  } catch (...) {
    scheduler_->reset();
    throw;
  }
  scheduler_->weights_changed();  // what was recorded has not run
  return captured;
}

at::Tensor FsdpContext::CapturedStep::replay() {
  FSDP_CHECK(graph_ != nullptr, UsageError, "this captured step is empty: it comes from FsdpContext::capture");
  context_->scheduler_->before_replay();
  graph_->replay();
  return result_;
}

void FsdpContext::finish_grad_sync() { scheduler_->finish_grad_sync(); }
void FsdpContext::weights_changed() { scheduler_->weights_changed(); }
void FsdpContext::optimizer_stepped() { scheduler_->optimizer_stepped(); }
void FsdpContext::wait_for_gradients() {
  if (!scheduler_->unjoined().empty()) scheduler_->join_reductions();
}
void FsdpContext::wait_for_gradients(FsdpModule& unit) { scheduler_->wait_for_gradients(unit); }
std::vector<FsdpModule*> FsdpContext::units_being_reduced() const { return scheduler_->unjoined(); }
void FsdpContext::check_gradients_reduced(const char* action) const { scheduler_->check_gradients_reduced(action); }
void FsdpContext::check_between_steps(const char* action) const { scheduler_->check_no_accumulation(action); }
void FsdpContext::drop_accumulated_gradients() { scheduler_->drop_accumulated(); }
void FsdpContext::reset() { scheduler_->reset(); }

FsdpContext::UnshardScope::UnshardScope(FsdpModule& unit) : unit_(unit) { unit_.pin(); }
FsdpContext::UnshardScope::~UnshardScope() { unit_.unpin(); }

const std::vector<std::shared_ptr<FsdpModule>>& FsdpContext::units() const { return scheduler_->units(); }

FsdpModule& FsdpContext::unit(const std::string& name) const {
  scheduler_->finalize();
  std::string names;
  for (const auto& unit : units()) {
    if (unit->name() == name) return *unit;
    names += (names.empty() ? "" : ", ") + unit->name();
  }
  detail::fail<UsageError>("the context has no unit \"{}\"; it has {}", name, names);
}

std::vector<std::string> FsdpContext::forward_order() const {
  scheduler_->finalize();
  std::vector<std::string> names;
  for (int index : scheduler_->forward_order()) names.push_back(units()[index]->name());
  return names;
}

std::vector<std::string> FsdpContext::backward_order() const {
  scheduler_->finalize();
  std::vector<std::string> names;
  for (int index : scheduler_->backward_order()) names.push_back(units()[index]->name());
  return names;
}

const DeviceMesh& FsdpContext::mesh() const { return scheduler_->mesh(); }
const ContextOptions& FsdpContext::options() const { return scheduler_->options(); }
MemoryReport FsdpContext::memory_report() const { return scheduler_->memory_report(); }
ContextCounters FsdpContext::counters() const { return scheduler_->counters(); }
void FsdpContext::reset_peaks() { scheduler_->reset_peaks(); }

std::vector<FsdpParameterGroup*> FsdpContext::groups() const {
  std::vector<FsdpParameterGroup*> groups;
  for (const auto& unit : units()) {
    for (const auto& group : unit->groups()) groups.push_back(group.get());
  }
  return groups;
}

}  // namespace fsdp
