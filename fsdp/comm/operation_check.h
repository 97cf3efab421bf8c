// Whether the ranks of a group run the same operation: the check that turns a wrong order into an error with both names
// instead of mixed data. Pure; for the backends.
#pragma once

#include <string>

#include "fsdp/comm/collective.h"

namespace fsdp {

struct RankedOperation {
  int world_rank = 0;  // for the message
  const Collective& operation;
};

// Kind, count, dtype, root, reduction, label and place in the sequence agree.
[[nodiscard]] bool same_operation(const Collective& a, const Collective& b);

// "ranks run different operations: rank 0 ..., rank 1 ...; ..."
[[nodiscard]] std::string describe_difference(const RankedOperation& a, const RankedOperation& b);

// `sends` elements leave `from` for `to`, which expects `expects` of them.
[[nodiscard]] std::string describe_count_difference(const Collective& operation, int from, std::int64_t sends, int to,
                                                    std::int64_t expects);

}  // namespace fsdp
