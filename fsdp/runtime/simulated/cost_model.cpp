#include "fsdp/runtime/simulated/cost_model.h"

#include <algorithm>
#include <cmath>

namespace fsdp {
namespace {

trace::Nanoseconds nanoseconds(double seconds) { return static_cast<trace::Nanoseconds>(std::llround(seconds * 1e9)); }

}  // namespace

trace::Nanoseconds CostModel::compute(double flops, double bytes) const {
  return nanoseconds(std::max(flops / flops_per_second, bytes / memory_bytes_per_second));
}

trace::Nanoseconds CostModel::transfer(double bytes_moved, int ranks) const {
  if (ranks == 1) return 0;
  return collective_latency + nanoseconds(bytes_moved / link_bytes_per_second);
}

}  // namespace fsdp
