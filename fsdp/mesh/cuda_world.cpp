#include "fsdp/mesh/cuda_world.h"

#include <cstdlib>
#include <map>
#include <numeric>

#include "fsdp/base/check.h"
#include "fsdp/base/env.h"
#include "fsdp/base/log.h"
#include "fsdp/comm/nccl/nccl_module.h"

namespace fsdp {
namespace {

// Blocks of a reduction: NCCL's own choice of 9 on an H200 leaves bandwidth of its links unused.
constexpr int kReduceCtas = 16;

// A gather by copy engine leaves the multiprocessors to the products; below this size the symmetric kernel has less to
// set up.
Bytes copy_engine_from() { return Bytes(env::integer("FSDP_COPY_ENGINE_FROM_MIB").value_or(16) << 20); }

// The communicators of one world; parents are shared by the groups of the same ranks.
class NcclGroups {
 public:
  NcclGroups(std::shared_ptr<World::Backend> host, std::shared_ptr<Runtime> runtime,
             std::function<std::string()> peer_failure, std::chrono::milliseconds deadline,
             std::string no_symmetric_memory, bool same_host)
      : host_(std::move(host)),
        runtime_(std::move(runtime)),
        peer_failure_(std::move(peer_failure)),
        deadline_(deadline),
        no_symmetric_memory_(std::move(no_symmetric_memory)),
        same_host_(same_host) {}

  std::shared_ptr<CommunicatorBackend> create(std::span<const int> ranks, int group_rank, const std::string& key,
                                              GroupUse use) {
    const std::vector<int> members(ranks.begin(), ranks.end());
    if (members.size() == 1) return nccl::module().make_loopback(runtime_, {.size = 1}, use);
    const Communicator host = World(host_).create_communicator(ranks, key.substr(0, key.find('/')) + ".host");
    auto parent = parents_[members].lock();
    if (!parent) {
      parent = connect(host, group_rank, members);
      parents_[members] = parent;
    }
    return parent->split({.name = key.substr(0, key.find('/')),
                          .members = members,
                          .use = use,
                          .ctas = use == GroupUse::reduce ? kReduceCtas : 0,
                          .copy_engine_from = copy_engine_from(),
                          .why_no_symmetric_memory = no_symmetric_memory_,
                          .same_host = same_host_,
                          .deadline = deadline_,
                          .report = [host = host_](const std::string& what) { report(World(host), what); },
                          .peer_failure = peer_failure_,
                          .host = host.backend()});
  }

 private:
  // By the watchdog, which ends the process afterwards.
  static void report(const World& host, const std::string& what) {
    log::write(log::Level::warning, what);
    host.abort(what);
  }

  std::shared_ptr<nccl::Parent> connect(const Communicator& host, int group_rank,
                                        const std::vector<int>& members) const {
    nccl::ParentOptions options{
        .rank = group_rank, .size = static_cast<int>(members.size()), .name = "fsdp", .deadline = deadline_};
    if (group_rank == 0) options.id = nccl::module().make_id();
    const Stream stream = host_->runtime->compute_stream();
    host.broadcast(options.id.data(), Elements(static_cast<std::int64_t>(options.id.size())), c10::kByte, Rank(0),
                   stream, "FSDP:the id of a communicator");
    return nccl::module().connect(options);
  }

  const std::shared_ptr<World::Backend> host_;
  const std::shared_ptr<Runtime> runtime_;
  const std::function<std::string()> peer_failure_;
  const std::chrono::milliseconds deadline_;
  const std::string no_symmetric_memory_;
  const bool same_host_;
  std::map<std::vector<int>, std::weak_ptr<nccl::Parent>> parents_;
};

// NCCL refuses two ranks on one GPU unless they look like two hosts; it then goes through sockets.
void share_gpu(const Launcher& launcher) {
  setenv("NCCL_HOSTID", fmt::format("fsdp-shared-{}", launcher.rank).c_str(), 0);
  setenv("NCCL_SOCKET_IFNAME", "lo", 0);
  setenv("NCCL_IB_DISABLE", "1", 0);
  setenv("NCCL_NET", "Socket", 0);
  setenv("NCCL_CUMEM_HOST_ENABLE", "0", 0);
}

}  // namespace

bool uses_cuda(DeviceKind kind) {
  if (kind == DeviceKind::cpu) return false;
  const std::string reason = why_no_cuda();
  FSDP_CHECK(kind == DeviceKind::automatic || reason.empty(), UsageError, "CUDA was asked for, but {}", reason);
  return reason.empty();
}

bool all_use_cuda(const std::shared_ptr<World::Backend>& host, DeviceKind kind) {
  if (!uses_cuda(kind)) return false;
  // Those that have no GPU do not come: they are then named as missing, within the deadline.
  const World world(host);
  std::vector<int> ranks(static_cast<std::size_t>(world.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  const Stream stream = host->runtime->compute_stream();
  world.create_communicator(ranks, "devices").barrier(stream, "FSDP:all ranks have a GPU");
  stream.synchronize();
  return true;
}

World cuda_world(std::shared_ptr<World::Backend> host, const Launcher& launcher,
                 const std::function<std::string()>& peer_failure, std::chrono::milliseconds deadline) {
  const int devices = cuda_device_count();
  // A launcher may show each process its own GPU only. FSDP_SHARE_GPU puts several ranks on one, over sockets: for
  // tests.
  const bool shared = env::text("FSDP_SHARE_GPU").has_value();
  FSDP_CHECK(devices == 1 || shared || launcher.local_size <= devices, UsageError,
             "rank {}: {} started {} processes on this machine, which has {} GPUs: start one process a GPU",
             launcher.rank, launcher.name, launcher.local_size, devices);
  if (shared && launcher.local_size > devices) share_gpu(launcher);
  // Kernels of different communicators start in the order of the host's calls, which is the same on all ranks.
  setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 0);
  auto backend = std::make_shared<World::Backend>();
  backend->name = "nccl";
  backend->rank = host->rank;
  backend->size = host->size;
  backend->runtime = make_cuda_runtime(devices == 1 ? 0 : launcher.local_rank % devices);
  auto groups = std::make_shared<NcclGroups>(host, backend->runtime, peer_failure, deadline,
                                             launcher.local_size < launcher.size ? "the ranks are on several hosts"
                                             : shared                            ? "ranks share a GPU"
                                                                                 : "",
                                             launcher.local_size == launcher.size);
  backend->create_group = [groups](std::span<const int> ranks, int group_rank, const std::string& key, GroupUse use) {
    return groups->create(ranks, group_rank, key, use);
  };
  backend->host = std::move(host);
  return World(std::move(backend));
}

}  // namespace fsdp
