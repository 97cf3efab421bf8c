// What the module libfsdp_cuda.so offers to the comm layer: groups of ranks over NCCL, and groups that only look like
// it.
//
// NCCL (2.28) directly. A parent communicator of some ranks is made non-blocking, so that its making has a deadline,
// and split into blocking children that do the work: each collective on a non-blocking communicator starts a thread
// and returns before it is enqueued, so an event recorded after them comes too early. One child for gathers and
// one for reductions: one communicator serialises its operations whatever the streams.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/comm/backend.h"
#include "fsdp/comm/loopback/loopback_options.h"
#include "fsdp/runtime/runtime.h"

namespace fsdp::nccl {

using UniqueId = std::array<std::byte, 128>;

struct ParentOptions {
  UniqueId id{};  // rank 0's, equal on all
  int rank = 0, size = 1;
  std::string name;
  std::chrono::milliseconds deadline{};
};

struct GroupOptions {
  std::string name;
  std::vector<int> members;  // [group rank] rank in the world, for messages
  GroupUse use = GroupUse::any;
  int ctas = 0;                         // blocks of a collective; 0: NCCL's choice
  Bytes copy_engine_from{16 << 20};     // gathers of so many bytes in all, and more, go by copy engine
  std::string why_no_symmetric_memory;  // empty: the members share a host and reach each other's memory
  bool same_host = false;               // all ranks of the job
  std::chrono::milliseconds deadline{};
  // Of the watchdog thread: says what went wrong, before it ends the process; and asks whether another rank has failed
  // (its reason; empty: none has).
  std::function<void(const std::string&)> report;
  std::function<std::string()> peer_failure;
  // The same group over messages between hosts, for comparing operations; may be null.
  std::shared_ptr<CommunicatorBackend> host;
};

// The ranks of one communicator. The last handle destroys it.
class Parent {
 public:
  virtual ~Parent() = default;
  // Collective. The group keeps the parent.
  [[nodiscard]] virtual std::shared_ptr<CommunicatorBackend> split(const GroupOptions& options) = 0;
};

inline constexpr const char* kNcclSymbol = "fsdp_nccl";

struct Module {
  int version;
  UniqueId (*make_id)();
  // Throws CommunicationError when the others do not come within the deadline.
  std::shared_ptr<Parent> (*connect)(const ParentOptions&);
  std::string (*library_version)();
  std::shared_ptr<CommunicatorBackend> (*make_loopback)(const std::shared_ptr<Runtime>&, const LoopbackOptions&,
                                                        GroupUse);
};

// Opens the module at its first use; throws UsageError.
[[nodiscard]] const Module& module();

}  // namespace fsdp::nccl
