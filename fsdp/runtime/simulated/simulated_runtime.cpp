#include "fsdp/runtime/simulated/simulated_runtime.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/runtime/simulated/meta_kernels.h"
#include "fsdp/runtime/simulated/operator_cost.h"

namespace fsdp {
namespace {

class Simulation;
thread_local Simulation* current_simulation = nullptr;

class SimulatedStream final : public StreamBackend {
 public:
  SimulatedStream(Simulation& simulation, std::string name, int id)
      : StreamBackend(std::move(name), id), simulation_(simulation) {}

  void enqueue(Task task, TaskOptions options) override;
  std::int64_t record() override { return time_; }
  void wait(const Event& event) override { time_ = std::max(time_, event.mark()); }
  bool reached(std::int64_t mark) override;
  void synchronize_host(std::int64_t mark) override;
  void reset() override {}
  [[nodiscard]] trace::Nanoseconds now() const override { return time_; }

  // Runs work of this length as soon as stream and host allow; returns when it began.
  trace::Nanoseconds advance(trace::Nanoseconds duration);

 private:
  Simulation& simulation_;
  trace::Nanoseconds time_ = 0;  // when everything enqueued so far has run
};

class Simulation final : public SimulatedRuntime {
 public:
  explicit Simulation(const CostModel& costs)
      : costs_(costs), compute_(std::make_shared<SimulatedStream>(*this, "compute", 0)), running_(compute_.get()) {
    FSDP_CHECK(current_simulation == nullptr, UsageError,
               "this thread already has a simulated runtime; destroy it first");
    register_meta_kernels();
    current_simulation = this;
    callback_ =
        at::addThreadLocalCallback(at::RecordFunctionCallback(&Simulation::begin_operator, &Simulation::end_operator)
                                       .needsInputs(true)
                                       .scopes({at::RecordScope::FUNCTION}));
  }
  ~Simulation() override {
    at::removeCallback(callback_);
    current_simulation = nullptr;
  }

  [[nodiscard]] c10::Device device() const override { return c10::kMeta; }
  [[nodiscard]] Stream compute_stream() override { return Stream(running_->shared_from_this()); }
  [[nodiscard]] Stream make_stream(const std::string& name) override {
    return Stream(std::make_shared<SimulatedStream>(*this, name, ++streams_));
  }
  [[nodiscard]] c10::DataPtr allocate(Bytes, const Stream&) override { return {nullptr, c10::kMeta}; }
  [[nodiscard]] bool enqueue_sets_current_stream() const override { return true; }
  [[nodiscard]] trace::Nanoseconds blocked_time() const override { return 0; }  // read the overlap report instead
  [[nodiscard]] const CostModel& costs() const override { return costs_; }
  void spend(trace::Nanoseconds duration) override { running_->advance(duration); }

  SimulatedStream* set_running(SimulatedStream* stream) { return std::exchange(running_, stream); }
  [[nodiscard]] trace::Nanoseconds host_time() const { return host_time_; }
  void advance_host_to(trace::Nanoseconds time) { host_time_ = std::max(host_time_, time); }

 private:
  // An operator is charged when it ends without having called another one that does work (a composite is free itself).
  struct Frame {
    OperatorWork work;
    bool composite = false;
  };

  static std::unique_ptr<at::ObserverContext> begin_operator(const at::RecordFunction& function) {
    if (auto* self = current_simulation) self->frames_.push_back({operator_work(function), false});
    return nullptr;
  }
  static void end_operator(const at::RecordFunction& function, at::ObserverContext*) {
    if (auto* self = current_simulation) self->charge(function.name());
  }
  void charge(const char* name) {
    if (frames_.empty()) return;  // began before this runtime existed
    const Frame frame = frames_.back();
    frames_.pop_back();
    if (frame.work.free) return;
    if (!frames_.empty()) frames_.back().composite = true;
    if (frame.composite) return;
    host_time_ += costs_.launch;
    const auto duration = costs_.compute(frame.work.flops, frame.work.bytes);
    const auto begin = running_->advance(duration);
    if (recorder() != nullptr && running_ == compute_.get() && duration > 0) {
      trace::Span* span = recorder()->issue(recorder()->intern(name), trace::Kind::compute, running_->id());
      span->begin = begin;
      span->end = begin + duration;
    }
  }

  CostModel costs_;
  std::shared_ptr<SimulatedStream> compute_;
  SimulatedStream* running_;  // the stream whose task runs; compute outside of tasks
  trace::Nanoseconds host_time_ = 0;
  int streams_ = 0;
  at::CallbackHandle callback_{};
  std::vector<Frame> frames_;
};

void SimulatedStream::enqueue(Task task, TaskOptions options) {
  time_ = std::max(time_, simulation_.host_time());
  SimulatedStream* previous = simulation_.set_running(this);
  struct Restore {
    Simulation& simulation;
    SimulatedStream* previous;
    ~Restore() { simulation.set_running(previous); }
  } restore{simulation_, previous};
  if (options.span != nullptr) options.span->begin = time_;
  task();
  if (options.span != nullptr) options.span->end = time_;
}

bool SimulatedStream::reached(std::int64_t mark) { return mark <= simulation_.host_time(); }

void SimulatedStream::synchronize_host(std::int64_t mark) { simulation_.advance_host_to(mark); }

trace::Nanoseconds SimulatedStream::advance(trace::Nanoseconds duration) {
  const auto begin = std::max(time_, simulation_.host_time());
  time_ = begin + duration;
  return begin;
}

}  // namespace

std::shared_ptr<SimulatedRuntime> make_simulated_runtime(const CostModel& costs) {
  return std::make_shared<Simulation>(costs);
}

}  // namespace fsdp
