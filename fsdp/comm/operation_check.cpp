#include "fsdp/comm/operation_check.h"

#include <fmt/format.h>

#include <cstring>

namespace fsdp {

bool same_operation(const Collective& a, const Collective& b) {
  return a.kind == b.kind && a.count == b.count && a.dtype == b.dtype && a.peer == b.peer && a.reduce == b.reduce &&
         a.sequence == b.sequence && (a.label == b.label || std::strcmp(a.label, b.label) == 0);
}

std::string describe_difference(const RankedOperation& a, const RankedOperation& b) {
  return fmt::format(
      "ranks run different operations: rank {} {}, rank {} {}; every rank must run the same units in the same order",
      a.world_rank, describe(a.operation), b.world_rank, describe(b.operation));
}

std::string describe_count_difference(const Collective& operation, int from, std::int64_t sends, int to,
                                      std::int64_t expects) {
  return fmt::format("{}: rank {} sends {} elements to rank {}, which expects {}", describe(operation), from, sends, to,
                     expects);
}

}  // namespace fsdp
