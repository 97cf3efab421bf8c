#include "apps/fsdp/profiler.h"

#include <algorithm>
#include <map>

#include "fsdp/runtime/device_profile.h"
#include "fsdp/trace/chrome_writer.h"
#include "fsdp/trace/overlap.h"

namespace fsdp::app {
namespace {

// Streams have no list; what ran on one tells what it is for.
std::map<int, std::string> stream_names(const std::vector<trace::Span>& spans) {
  std::map<int, std::string> names{{0, "compute"}};
  for (const auto& span : spans) {
    if (span.stream == 0) continue;
    auto& name = names[span.stream];
    const std::string kind = std::string(span.name) == "agreement" ? "agreement" : trace::to_string(span.kind);
    if (name.find(kind) == std::string::npos) name += (name.empty() ? "" : ", ") + kind;
  }
  return names;
}

}  // namespace

Profiler::Profiler(std::filesystem::path path, std::shared_ptr<Runtime> runtime, int rank, std::int64_t steps)
    : path_(std::move(path)), runtime_(std::move(runtime)), rank_(rank), on_device_(runtime_->device().is_cuda()) {
  first_ = std::clamp<std::int64_t>(steps - kCount, 0, kFirst);
  last_ = std::min(steps, first_ + kCount);
}

void Profiler::before_step(std::int64_t step) {
  if (path_.empty()) return;
  if (step == first_) {
    recorder_ = std::make_shared<trace::Recorder>();
    if (on_device_)
      start_device_profile();
    else
      runtime_->set_recorder(recorder_);
  }
  if (step == last_) stop();
}

void Profiler::stop() {
  if (recorder_ == nullptr || stopped_) return;
  stopped_ = true;
  if (on_device_) {
    spans_ = stop_device_profile(*recorder_);
  } else {
    runtime_->set_recorder(nullptr);
    spans_ = recorder_->spans();
  }
}

std::string Profiler::finish() {
  if (recorder_ == nullptr) return "";
  stop();
  trace::write_chrome_trace(path_, spans_, rank_, stream_names(spans_));
  return trace::to_string(trace::overlap_report(spans_));
}

}  // namespace fsdp::app
