// Starts the ranks of a program as processes of this machine, where no launcher has.
#pragma once

#include <optional>

namespace fsdp {

// Runs this program again `count` times with the same arguments, as the ranks of a torchrun (whose variables it sets),
// waits for them, and returns the exit code for this process: 0 when all ended with 0, else that of the first that did
// not. The others then have some seconds to end by themselves; one that a signal ended is named in the log. Ranks end
// with this process. Ctrl-C reaches them from the terminal; SIGTERM is passed on. Returns nothing when this process is
// such a rank: go on as usual. Call it first thing in main.
[[nodiscard]] std::optional<int> spawn_ranks(int count);

}  // namespace fsdp
