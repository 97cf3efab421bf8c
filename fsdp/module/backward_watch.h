// Finds the unit whose forward made an autograd node, so that backward gathers the unit's weights wherever it enters.
//
// Hooks on a unit's outputs miss a backward that enters elsewhere: a loss from a value that forward stashed away, a
// view changed in place later, a second backward through a first one. Every node carries the sequence number of its
// creation; forwards note which numbers are theirs, and before a node runs its unit is asked to be ready.
#pragma once

#include <cstdint>

namespace fsdp {

class FsdpModule;

namespace backward_watch {

// The number of the next node that the calling thread makes. Autograd runs the nodes of a thread from the highest
// number to the lowest: what was made later is needed first.
[[nodiscard]] std::uint64_t next_number();

// Nodes that the calling thread makes from now on belong to `unit` (null: to none), whose weights have this version.
// Returns whose they were before.
FsdpModule* enter(FsdpModule* unit, std::uint64_t version);

// Called before each node of a unit runs in a backward, with the node's number and the version of the weights when it
// was made. Set once, before the first `enter`; must not throw.
using Callback = void (*)(FsdpModule& unit, std::uint64_t number, std::uint64_t version);
void install(Callback callback);

// The unit is going: its nodes belong to none. From any thread, with no backward under way.
void forget(const FsdpModule& unit);

// Segments that a thread keeps; those of the oldest graphs are forgotten beyond it.
inline constexpr std::size_t kMaximumSegments = 8192;

}  // namespace backward_watch
}  // namespace fsdp
