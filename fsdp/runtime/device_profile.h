// What really ran on a CUDA device, and when: kernels and copies as CUPTI saw them, through Kineto.
//
// Everything that one collective launched is one span with the collective's label, from the first begin to the last
// end. Other kernels and copies are compute when they ran on the stream with most of them, and of kind `unit`
// elsewhere.
#pragma once

#include <functional>
#include <vector>

#include "fsdp/trace/recorder.h"
#include "fsdp/trace/span.h"

namespace fsdp {

// Between the two calls, on the thread that runs the steps; not inside another profiler. The device should be idle at
// both.
void start_device_profile();
// The spans on the device, by begin; stream 0 is the one with most compute. Names are interned in `names`.
[[nodiscard]] std::vector<trace::Span> stop_device_profile(trace::Recorder& names);

// Both around `step`, which ends with the device idle.
[[nodiscard]] std::vector<trace::Span> profile_device(const std::function<void()>& step, trace::Recorder& names);

}  // namespace fsdp
