#include <c10/core/CPUAllocator.h>

#include <atomic>

#include "fsdp/runtime/cpu/worker_stream.h"
#include "fsdp/runtime/runtime.h"

namespace fsdp {
namespace {

// Compute of the CPU runtime: the calling thread itself. Enqueued means done; waiting blocks that thread.
class InlineStream final : public StreamBackend {
 public:
  InlineStream(Runtime& runtime, std::atomic<trace::Nanoseconds>& blocked)
      : StreamBackend("compute", 0), runtime_(runtime), blocked_(blocked) {}

  void enqueue(Task task, TaskOptions options) override {
    if (options.span != nullptr) options.span->begin = wall_clock();
    task();
    if (options.span != nullptr) options.span->end = wall_clock();
  }
  std::int64_t record() override { return 0; }
  void wait(const Event& event) override {
    if (event.query()) return;
    trace::Span* span = nullptr;
    if (auto* recorder = runtime_.recorder()) span = recorder->issue("wait", trace::Kind::wait, id());
    const auto start = wall_clock();
    event.synchronize();
    const auto end = wall_clock();
    blocked_.fetch_add(end - start, std::memory_order_relaxed);
    if (span != nullptr) {
      span->begin = start;
      span->end = end;
    }
  }
  bool reached(std::int64_t) override { return true; }
  void synchronize_host(std::int64_t) override {}
  void reset() override {}
  [[nodiscard]] trace::Nanoseconds now() const override { return wall_clock(); }

 private:
  Runtime& runtime_;
  std::atomic<trace::Nanoseconds>& blocked_;
};

class CpuRuntime final : public Runtime {
 public:
  CpuRuntime() : compute_(std::make_shared<InlineStream>(*this, blocked_)) {}

  [[nodiscard]] c10::Device device() const override { return c10::kCPU; }
  [[nodiscard]] Stream compute_stream() override { return Stream(compute_); }
  [[nodiscard]] Stream make_stream(const std::string& name) override {
    return Stream(std::make_shared<WorkerStream>(name, ++streams_, blocked_));
  }
  [[nodiscard]] c10::DataPtr allocate(Bytes size, const Stream&) override {
    return c10::GetCPUAllocator()->allocate(static_cast<std::size_t>(size.value()));
  }
  [[nodiscard]] trace::Nanoseconds blocked_time() const override { return blocked_.load(std::memory_order_relaxed); }

 private:
  std::atomic<trace::Nanoseconds> blocked_{0};
  std::shared_ptr<InlineStream> compute_;
  int streams_ = 0;
};

}  // namespace

std::shared_ptr<Runtime> make_cpu_runtime() { return std::make_shared<CpuRuntime>(); }

}  // namespace fsdp
