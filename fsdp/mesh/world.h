// All ranks of a job, as one of them sees it: who it is, what it runs on, and how it makes groups with others.
//
// A value handle; one per rank. The world owns the rank's runtime and keeps the shared state of its groups alive.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fsdp/base/types.h"
#include "fsdp/comm/communicator.h"
#include "fsdp/comm/loopback/loopback_options.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/simulated/cost_model.h"

namespace fsdp {

enum class DeviceKind : std::uint8_t {
  cpu,
  cuda,       // one process a GPU: the one with the process's rank on its machine, or the first that it sees
  automatic,  // cuda where there is a GPU, else cpu
};

struct WorldOptions {
  DeviceKind device = DeviceKind::cpu;
  // How long a collective may wait for its peers before it becomes an error on all of them.
  std::chrono::milliseconds deadline = std::chrono::minutes(10);
};

class World {
 public:
  // One rank.
  static World single(const WorldOptions& options = {});

  // The rank that torchrun, mpirun or srun made of this process (mesh/launcher.h, mesh/process_world.h); without a
  // launcher, one rank. Throws UsageError when the launcher's variables contradict each other, or what it needs is not
  // there. launch() does the same and reports failures to the other ranks.
  static World from_environment(const WorldOptions& options = {});

  // Rank 0 of `size` equal ranks on a virtual clock; tensors live on the meta device.
  static World simulated(int size, const CostModel& costs = {});

  // Rank 0 of several on one GPU (that of the calling thread), the others only looking as if they were there; for
  // measuring.
  static World loopback(const LoopbackOptions& options);

  // The same ranks, exchanging data in host memory; this world itself where that is what it does. For what the hosts
  // must agree on.
  [[nodiscard]] World host() const { return backend_->host ? World(backend_->host) : *this; }

  [[nodiscard]] Rank rank() const { return backend_->rank; }
  [[nodiscard]] int size() const { return backend_->size; }
  [[nodiscard]] const std::string& backend_name() const { return backend_->name; }
  [[nodiscard]] const std::shared_ptr<Runtime>& runtime() const { return backend_->runtime; }

  // A new group of the given world ranks (ascending, this rank among them). All of them call it, in the same order.
  [[nodiscard]] Communicator create_communicator(std::span<const int> ranks, const std::string& name,
                                                 GroupUse use = GroupUse::any) const;

  // What a backend fills in.
  struct Backend {
    std::string name;
    Rank rank;
    int size = 1;
    std::shared_ptr<Runtime> runtime;
    // -> backend of this rank in a group of `ranks`. `key` is equal on all its ranks and unique to the group.
    std::function<std::shared_ptr<CommunicatorBackend>(std::span<const int> ranks, int group_rank,
                                                       const std::string& key, GroupUse use)>
        create_group;
    std::shared_ptr<Backend> host;  // null: this one
    // Makes every group of the job fail with this reason.
    std::function<void(const std::string& reason)> abort;
    std::map<std::vector<int>, int> groups_created;  // by members
  };
  explicit World(std::shared_ptr<Backend> backend) : backend_(std::move(backend)) {}

  // Fails every group of the job, so that peers blocked on this rank end with `reason` instead of their deadline.
  void abort(const std::string& reason) const;

 private:
  std::shared_ptr<Backend> backend_;
};

}  // namespace fsdp
