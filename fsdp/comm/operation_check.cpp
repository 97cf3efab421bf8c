#include "fsdp/comm/operation_check.h"

#include <fmt/format.h>

#include <cstring>

namespace fsdp {

bool same_operation(const Collective& a, const Collective& b) {
  return a.kind == b.kind && a.count == b.count && a.dtype == b.dtype && a.peer == b.peer && a.reduce == b.reduce &&
         a.sequence == b.sequence && a.stamp == b.stamp && (a.label == b.label || std::strcmp(a.label, b.label) == 0);
}

std::string describe_difference(const RankedOperation& a, const RankedOperation& b) {
  const bool parts = a.operation.stamp != b.operation.stamp;
  const auto text = [&](const RankedOperation& ranked) {
    const Stamp& stamp = ranked.operation.stamp;
    const std::string part = fmt::format(" in microbatch {}{} of step {} after {} optimizer steps", stamp.microbatch,
                                         stamp.last ? " (the last)" : "", stamp.step, stamp.updates);
    return fmt::format("rank {} {}{}", ranked.world_rank, describe(ranked.operation), parts ? part : "");
  };
  return fmt::format("ranks run different operations: {}, {}; every rank must run the same units in the same order{}",
                     text(a), text(b), parts ? ", and as many microbatches in each step" : "");
}

std::string describe_count_difference(const Collective& operation, int from, std::int64_t sends, int to,
                                      std::int64_t expects) {
  return fmt::format("{}: rank {} sends {} elements to rank {}, which expects {}", describe(operation), from, sends, to,
                     expects);
}

}  // namespace fsdp
