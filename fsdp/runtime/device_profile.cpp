#include "fsdp/runtime/device_profile.h"

#include <torch/csrc/autograd/profiler_kineto.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <string_view>

namespace fsdp {
namespace {

trace::Kind kind_of(const std::string& name) {
  const auto has = [&](const char* part) { return name.find(part) != std::string::npos; };
  if (has("AllGather")) return trace::Kind::all_gather;
  if (has("ReduceScatter")) return trace::Kind::reduce_scatter;
  if (has("AllReduce")) return trace::Kind::all_reduce;
  if (has("ncclDevKernel_SendRecv")) return trace::Kind::all_to_all;
  if (name.starts_with("FSDP:") && name.ends_with(":unshard")) return trace::Kind::all_gather;
  if (name.starts_with("FSDP:") && name.ends_with(":reduce_gradients")) return trace::Kind::reduce_scatter;
  if (name.starts_with("FSDP:experts:")) return trace::Kind::all_to_all;
  return name.starts_with("FSDP:") ? trace::Kind::unit : trace::Kind::compute;
}

}  // namespace

void start_device_profile() {
  namespace profiler = torch::autograd::profiler;
  namespace impl = torch::profiler::impl;
  const impl::ProfilerConfig config(impl::ProfilerState::KINETO);
  const std::set<impl::ActivityType> activities{impl::ActivityType::CPU, impl::ActivityType::CUDA};
  profiler::prepareProfiler(config, activities);
  profiler::enableProfiler(config, activities, {at::RecordScope::USER_SCOPE});
}

std::vector<trace::Span> profile_device(const std::function<void()>& step, trace::Recorder& names) {
  start_device_profile();
  step();
  return stop_device_profile(names);
}

std::vector<trace::Span> stop_device_profile(trace::Recorder& names) {
  const auto result = torch::autograd::profiler::disableProfiler();
  // What a collective launched lies under a range of its name, which the profiler projects onto the stream.
  std::set<std::int32_t> labelled;                          // streams with such ranges
  std::map<std::int32_t, trace::Nanoseconds> compute_time;  // by stream
  std::vector<trace::Span> spans;
  for (const auto& event : result->events()) {
    if (event.deviceType() != c10::DeviceType::CUDA) continue;
    const std::string name = event.name();
    const bool ours = name.starts_with("FSDP:");
    trace::Span span;
    span.kind = kind_of(name);
    span.stream = static_cast<std::int32_t>(event.deviceResourceId());
    span.begin = static_cast<trace::Nanoseconds>(event.startNs());
    span.end = span.begin + static_cast<trace::Nanoseconds>(event.durationNs());
    span.name = names.intern(name);
    if (ours) labelled.insert(span.stream);
    if (!ours && span.kind == trace::Kind::compute) compute_time[span.stream] += span.end - span.begin;
    spans.push_back(span);
  }
  const auto busiest = std::max_element(compute_time.begin(), compute_time.end(),
                                        [](const auto& a, const auto& b) { return a.second < b.second; });
  for (auto& span : spans) {
    const bool ours = std::string_view(span.name).starts_with("FSDP:");
    if (!ours && labelled.contains(span.stream) && span.kind != trace::Kind::compute) span.kind = trace::Kind::unit;
    const bool compute = busiest != compute_time.end() && span.stream == busiest->first;
    span.stream = compute ? 0 : span.stream + 1;                                       // 0 is compute in traces
    if (!compute && span.kind == trace::Kind::compute) span.kind = trace::Kind::unit;  // beside the products, not one
  }
  std::sort(spans.begin(), spans.end(), [](const auto& a, const auto& b) { return a.begin < b.begin; });
  return spans;
}

}  // namespace fsdp
