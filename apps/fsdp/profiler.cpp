#include "apps/fsdp/profiler.h"

#include <algorithm>
#include <map>

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
    : path_(std::move(path)), runtime_(std::move(runtime)), rank_(rank) {
  first_ = std::clamp<std::int64_t>(steps - kCount, 0, kFirst);
  last_ = std::min(steps, first_ + kCount);
}

void Profiler::before_step(std::int64_t step) {
  if (path_.empty()) return;
  if (step == first_) {
    recorder_ = std::make_shared<trace::Recorder>();
    runtime_->set_recorder(recorder_);
  }
  if (step == last_) runtime_->set_recorder(nullptr);
}

std::string Profiler::finish() {
  if (recorder_ == nullptr) return "";
  runtime_->set_recorder(nullptr);
  const auto spans = recorder_->spans();
  trace::write_chrome_trace(path_, spans, rank_, stream_names(spans));
  return trace::to_string(trace::overlap_report(spans));
}

}  // namespace fsdp::app
