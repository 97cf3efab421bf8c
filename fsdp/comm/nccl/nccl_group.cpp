#include <c10/cuda/CUDAStream.h>
#include <nccl.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>

#include "fsdp/comm/loopback/loopback_group.h"
#include "fsdp/comm/nccl/mapped_inbox.h"
#include "fsdp/comm/nccl/mapped_peer_memory.h"
#include "fsdp/comm/nccl/nccl_module.h"
#include "fsdp/comm/nccl/watchdog.h"
#include "fsdp/runtime/cuda/cuda_check.h"
#include "fsdp/runtime/cuda/is_recorded.h"
#include "fsdp/runtime/cuda_module.h"
#include "fsdp/runtime/kernels.h"

namespace fsdp::nccl {
namespace {

#define FSDP_NCCL_CHECK(call, what)                                                                                 \
  do {                                                                                                              \
    const ncclResult_t code_ = (call);                                                                              \
    if (code_ != ncclSuccess) [[unlikely]]                                                                          \
      ::fsdp::detail::fail<::fsdp::CommunicationError>("NCCL: {} failed: {} ({})", what, ncclGetErrorString(code_), \
                                                       ncclGetLastError(nullptr));                                  \
  } while (false)

// All calls of a process in one order: NCCL does not promise that calls of two threads on two communicators are safe.
std::mutex& calls() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

ncclDataType_t type_of(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::kFloat:
      return ncclFloat32;
    case c10::kDouble:
      return ncclFloat64;
    case c10::kBFloat16:
      return ncclBfloat16;
    case c10::kHalf:
      return ncclFloat16;
    case c10::kInt:
      return ncclInt32;
    case c10::kLong:
      return ncclInt64;
    default:
      return ncclInt8;  // moved, not summed: counts are then bytes
  }
}

std::size_t elements_of(std::int64_t count, c10::ScalarType dtype) {
  return static_cast<std::size_t>(count) * (type_of(dtype) == ncclInt8 ? c10::elementSize(dtype) : 1);
}

class NcclParent;

class NcclGroup final : public CommunicatorBackend {
 public:
  // `small`: for gathers that are too small for the copy engine; null: none.
  NcclGroup(std::shared_ptr<NcclParent> parent, ncclComm_t communicator, ncclComm_t small, int rank,
            GroupOptions options)
      : parent_(std::move(parent)),
        communicator_(communicator),
        small_(small),
        rank_(rank),
        options_(std::move(options)) {
    watch_ = Watch::make({options_.name, options_.members, rank, options_.deadline, options_.report,
                          options_.peer_failure, [this] { return library_error(); }});
    FSDP_CUDA_CHECK(cudaMalloc(&scratch_, 2 * sizeof(std::int64_t)));
  }

  ~NcclGroup() override {
    watch_->stop_asking();
    if (std::uncaught_exceptions() > 0) return;  // peers may be gone: destroying would wait for them
    const auto watched = watch_->host_call("the end of a group (ncclCommDestroy)");
    cudaFree(scratch_);
    while (!memories_.empty()) deregister_symmetric(memories_.back().base);
    for (ncclComm_t communicator : {communicator_, small_}) {
      if (communicator == nullptr) continue;
      ncclCommFinalize(communicator);
      ncclCommDestroy(communicator);
    }
  }

  void execute(const Collective& operation) override {
    if (check_ && options_.host) compare(operation);
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
    {
      std::lock_guard lock(calls());
      enqueue(operation, stream);
    }
    watch_->enqueued(operation, stream);
  }

  // Whoever fails tells the others through the world; what waits on the device cannot be ended (watchdog.h).
  void abort(const std::string&) override {}
  void reset() override {}
  void set_check(bool check) override { check_ = check; }
  [[nodiscard]] std::string path() const override {
    if (memories_.empty()) return "ring";
    if (options_.use == GroupUse::gather)
      return fmt::format("copy engine from {} MiB, symmetric kernel below", options_.copy_engine_from.value() >> 20);
    return fmt::format("symmetric kernel of {} blocks", options_.ctas);
  }

  [[nodiscard]] std::string why_no_symmetric_memory() const override { return options_.why_no_symmetric_memory; }

  [[nodiscard]] c10::DataPtr allocate_symmetric(Bytes size) override {
    void* memory = nullptr;
    if (ncclMemAlloc(&memory, static_cast<std::size_t>(size.value())) != ncclSuccess) return {};
    int device = 0;
    FSDP_CUDA_CHECK(cudaGetDevice(&device));
    return {memory, memory, [](void* m) { ncclMemFree(m); },
            c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device))};
  }

  [[nodiscard]] bool register_symmetric(void* base, Bytes size) override {
    const auto watched = watch_->host_call("the registration of memory (ncclCommWindowRegister)");
    bool good = true;
    memories_.push_back({static_cast<std::byte*>(base), size.value(), {}});
    for (ncclComm_t communicator : {communicator_, small_}) {
      if (communicator == nullptr) continue;
      ncclWindow_t window = nullptr;
      std::unique_lock lock(calls());
      const ncclResult_t code = ncclCommWindowRegister(communicator, base, static_cast<std::size_t>(size.value()),
                                                       &window, NCCL_WIN_COLL_SYMMETRIC);
      lock.unlock();
      if (code == ncclSuccess && window != nullptr) memories_.back().windows.emplace_back(communicator, window);
      good = all_agree(good && code == ncclSuccess && window != nullptr);
      if (!good) break;  // on every rank
    }
    if (good) warm_up(memories_.back());
    return good;
  }

  void deregister_symmetric(void* base) override {
    std::erase_if(memories_, [&](const Registered& memory) {
      if (memory.base != base) return false;
      for (const auto& [communicator, window] : memory.windows) ncclCommWindowDeregister(communicator, window);
      return true;
    });
  }

  [[nodiscard]] Bytes peer_granularity() const override {
    const bool shares = options_.same_host && options_.use == GroupUse::gather && size() <= Meeting::kMost;
    return shares ? piece_granularity() : Bytes(0);
  }
  [[nodiscard]] std::shared_ptr<PeerMemory> make_peer_memory(const std::vector<PeerPart>& parts, Kernels& kernels,
                                                             std::string& why) override {
    const auto watched = watch_->host_call("the sharing of memory between processes");
    auto memory = MappedPeerMemory::create(parts, kernels, peer_group(), why);
    std::erase_if(peers_, [](const auto& known) { return known.expired(); });
    if (memory) peers_.push_back(memory);
    return memory;
  }
  [[nodiscard]] std::unique_ptr<PeerInbox> make_inbox(Bytes largest_share, Kernels& kernels,
                                                      std::string& why) override {
    if (!options_.same_host || options_.use != GroupUse::reduce || size() > Meeting::kMost) return nullptr;
    const auto watched = watch_->host_call("the sharing of memory between processes");
    return MappedInbox::create(largest_share, kernels, peer_group(), why);
  }

  [[nodiscard]] std::string library_error() const {
    ncclResult_t state = ncclSuccess;
    const ncclResult_t code = ncclCommGetAsyncError(communicator_, &state);
    if (code != ncclSuccess) state = code;
    if (state == ncclSuccess || state == ncclInProgress) return {};
    return fmt::format("{} ({})", ncclGetErrorString(state), ncclGetLastError(nullptr));
  }

 private:
  struct Registered {
    std::byte* base;
    std::int64_t size;
    std::vector<std::pair<ncclComm_t, ncclWindow_t>> windows;
  };

  [[nodiscard]] int size() const { return static_cast<int>(options_.members.size()); }

  [[nodiscard]] PeerGroup peer_group() {
    const auto all_gather = [this](const void* send, void* receive, std::size_t bytes) {
      Collective message;
      message.kind = trace::Kind::all_gather;
      message.dtype = c10::kByte;
      message.send = send;
      message.receive = receive;
      message.count = static_cast<std::int64_t>(bytes);
      message.label = "FSDP:sharing of memory";
      options_.host->execute(message);
    };
    return {rank_, size(), all_gather, [this](bool good) { return all_agree(good); }, options_.deadline};
  }

  // A message of the same label and count between the hosts fails with both names when ranks run different operations.
  void compare(const Collective& operation) {
    Collective message;
    message.kind = trace::Kind::barrier;
    message.label = operation.label;
    message.count = operation.count;
    message.dtype = operation.dtype;
    message.sequence = operation.sequence;
    message.stamp = operation.stamp;
    options_.host->execute(message);
  }

  // Whether `good` holds on all ranks, by a message between the hosts.
  [[nodiscard]] bool all_agree(bool good) const {
    if (!options_.host) return good;
    std::int64_t bad = good ? 0 : 1;
    Collective message;
    message.kind = trace::Kind::all_reduce;
    message.reduce = ReduceOp::max;
    message.dtype = c10::kLong;
    message.send = message.receive = &bad;
    message.count = 1;
    message.label = "FSDP:registration of memory";
    options_.host->execute(message);
    return bad == 0;
  }

  void enqueue(const Collective& c, cudaStream_t stream) {
    const ncclDataType_t type = type_of(c.dtype);
    const std::size_t count = elements_of(c.count, c.dtype);
    const ncclRedOp_t op = c.reduce == ReduceOp::max ? ncclMax : ncclSum;
    switch (c.kind) {
      case trace::Kind::all_gather: {
        if (const auto peers = peer_memory_of(c.receive)) {
          peers->read_peers(c.receive, stream);
          break;
        }
        const std::int64_t bytes = c.count * size() * static_cast<std::int64_t>(c10::elementSize(c.dtype));
        // NCCL's copies between devices cannot be recorded (2.28: "dependency created on uncaptured work").
        const bool small = small_ != nullptr && (bytes < options_.copy_engine_from.value() || is_recorded(stream)) &&
                           registered(c.send) && registered(c.receive);
        FSDP_NCCL_CHECK(ncclAllGather(c.send, c.receive, count, type, small ? small_ : communicator_, stream),
                        describe(c));
        break;
      }
      case trace::Kind::reduce_scatter:
        if (c.inbox != nullptr) {
          static_cast<MappedInbox*>(c.inbox)->reduce(c, stream);
          break;
        }
        FSDP_NCCL_CHECK(ncclReduceScatter(c.send, c.receive, count, type, op, communicator_, stream), describe(c));
        break;
      case trace::Kind::all_reduce:
        FSDP_NCCL_CHECK(ncclAllReduce(c.send, c.receive, count, type, op, communicator_, stream), describe(c));
        break;
      case trace::Kind::broadcast:
        FSDP_NCCL_CHECK(ncclBroadcast(c.send, c.receive, count, type, c.peer, communicator_, stream), describe(c));
        break;
      case trace::Kind::send_recv:
        if (c.sending)
          FSDP_NCCL_CHECK(ncclSend(c.send, count, type, c.peer, communicator_, stream), describe(c));
        else
          FSDP_NCCL_CHECK(ncclRecv(c.receive, count, type, c.peer, communicator_, stream), describe(c));
        break;
      case trace::Kind::all_to_all:
        all_to_all(c, type, stream);
        break;
      case trace::Kind::barrier:
        if (c.peers != nullptr) {
          static_cast<MappedPeerMemory*>(c.peers)->meet(stream);
          break;
        }
        FSDP_NCCL_CHECK(ncclAllReduce(scratch_, scratch_, 1, ncclInt64, ncclSum, communicator_, stream), describe(c));
        break;
      default:
        FSDP_INVARIANT(false);
    }
  }

  void all_to_all(const Collective& c, ncclDataType_t type, cudaStream_t stream) {
    const auto* send = static_cast<const std::byte*>(c.send);
    auto* receive = static_cast<std::byte*>(c.receive);
    const auto width = static_cast<std::int64_t>(c10::elementSize(c.dtype));
    FSDP_NCCL_CHECK(ncclGroupStart(), describe(c));
    struct EndOfGroup {  // also after an error, or the thread's later calls would never launch
      bool open = true;
      ~EndOfGroup() {
        if (open) ncclGroupEnd();
      }
    } group;
    for (int peer = 0; peer < size(); ++peer) {
      const std::int64_t out = (*c.send_counts)[peer], in = (*c.receive_counts)[peer];
      if (out > 0)
        FSDP_NCCL_CHECK(ncclSend(send, elements_of(out, c.dtype), type, peer, communicator_, stream), describe(c));
      if (in > 0)
        FSDP_NCCL_CHECK(ncclRecv(receive, elements_of(in, c.dtype), type, peer, communicator_, stream), describe(c));
      send += out * width;
      receive += in * width;
    }
    group.open = false;
    FSDP_NCCL_CHECK(ncclGroupEnd(), describe(c));
  }

  [[nodiscard]] bool registered(const void* address) const {
    const auto* at = static_cast<const std::byte*>(address);
    return std::any_of(memories_.begin(), memories_.end(),
                       [&](const Registered& m) { return at >= m.base && at < m.base + m.size; });
  }

  [[nodiscard]] std::shared_ptr<MappedPeerMemory> peer_memory_of(const void* whole) const {
    for (const auto& known : peers_) {
      auto memory = known.lock();
      if (memory != nullptr && memory->contains(whole)) return memory;
    }
    return nullptr;
  }

  // The first operation of a kind on registered memory sets up more of it, on all ranks together.
  void warm_up(const Registered& memory) const {
    constexpr std::size_t kBytes = 4096;
    if (static_cast<std::int64_t>(kBytes) * size() > memory.size) return;
    // Copy-engine collectives refuse the default stream.
    const cudaStream_t stream = c10::cuda::getStreamFromPool(/*isHighPriority=*/true).stream();
    FSDP_CUDA_CHECK(cudaMemsetAsync(memory.base, 0, kBytes * static_cast<std::size_t>(size()), stream));
    std::byte* own = memory.base + kBytes * static_cast<std::size_t>(rank_);
    for (const auto& [communicator, window] : memory.windows) {
      if (options_.use == GroupUse::reduce)
        FSDP_NCCL_CHECK(ncclReduceScatter(memory.base, own, kBytes / 2, ncclBfloat16, ncclSum, communicator, stream),
                        "warm-up");
      else
        FSDP_NCCL_CHECK(ncclAllGather(own, memory.base, kBytes, ncclInt8, communicator, stream), "warm-up");
    }
    FSDP_CUDA_CHECK(cudaStreamSynchronize(stream));
  }

  [[nodiscard]] static std::string describe(const Collective& c) {
    return fmt::format("{} \"{}\" #{}", trace::to_string(c.kind), c.label, c.sequence);
  }

  const std::shared_ptr<NcclParent> parent_;
  const ncclComm_t communicator_, small_;
  const int rank_;
  const GroupOptions options_;
  std::vector<Registered> memories_;
  std::vector<std::weak_ptr<MappedPeerMemory>> peers_;  // one a context
  std::shared_ptr<Watch> watch_;
  void* scratch_ = nullptr;
  bool check_ = false;
};

class NcclParent final : public Parent, public std::enable_shared_from_this<NcclParent> {
 public:
  explicit NcclParent(const ParentOptions& options) : options_(options) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    config.commName = options_.name.c_str();
    ncclUniqueId id;
    static_assert(sizeof(id) == std::tuple_size_v<UniqueId>);
    std::memcpy(&id, options_.id.data(), sizeof(id));
    std::lock_guard lock(calls());
    const ncclResult_t code = ncclCommInitRankConfig(&communicator_, options_.size, id, options_.rank, &config);
    if (code != ncclInProgress) FSDP_NCCL_CHECK(code, "the making of a communicator");
    settle("the making of a communicator");
  }

  ~NcclParent() override {
    if (std::uncaught_exceptions() > 0) return;
    // Non-blocking: the states in between are polled, and given up after a while.
    ncclCommFinalize(communicator_);
    try {
      settle("the end of a communicator");
      ncclCommDestroy(communicator_);
    } catch (const std::exception&) {  // a peer is gone; the process keeps what NCCL holds
    }
  }

  std::shared_ptr<CommunicatorBackend> split(const GroupOptions& options) override {
    const bool symmetric = options.why_no_symmetric_memory.empty();
    const bool gathers = options.use == GroupUse::gather;
    const ncclComm_t main = make_child(options, symmetric && gathers ? NCCL_CTA_POLICY_ZERO : NCCL_CONFIG_UNDEF_INT);
    const ncclComm_t small = symmetric && gathers ? make_child(options, NCCL_CONFIG_UNDEF_INT) : nullptr;
    auto group = std::make_shared<NcclGroup>(shared_from_this(), main, small, options_.rank, options);
    if (!symmetric || options.use == GroupUse::any) warm_up(*group, options);
    return group;
  }

 private:
  ncclComm_t make_child(const GroupOptions& options, int policy) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 1;
    config.splitShare = 0;
    config.commName = options.name.c_str();
    config.CTAPolicy = policy;
    if (options.ctas > 0) config.minCTAs = config.maxCTAs = options.ctas;
    ncclComm_t child = nullptr;
    std::lock_guard lock(calls());
    const ncclResult_t code = ncclCommSplit(communicator_, 0, options_.rank, &child, &config);
    if (code != ncclInProgress) FSDP_NCCL_CHECK(code, "the splitting of a communicator");
    settle("the splitting of a communicator");
    return child;
  }

  // NCCL connects at the first use of each operation, which blocks the host and must not happen beside another
  // collective that waits.
  void warm_up(NcclGroup& group, const GroupOptions& options) const {
    void* data = nullptr;
    const std::size_t bytes = 256 * static_cast<std::size_t>(options_.size);
    FSDP_CUDA_CHECK(cudaMalloc(&data, 2 * bytes));
    FSDP_CUDA_CHECK(cudaMemset(data, 0, 2 * bytes));
    Collective c;
    c.dtype = c10::kFloat;
    c.label = "FSDP:warm-up";
    c.count = 64;
    auto* own = static_cast<std::byte*>(data) + 256 * options_.rank;
    if (options.use != GroupUse::reduce) {
      c.kind = trace::Kind::all_gather;
      c.send = own;
      c.receive = data;
      group.execute(c);
    }
    if (options.use != GroupUse::gather) {
      c.kind = trace::Kind::reduce_scatter;
      c.send = data;
      c.receive = own;
      group.execute(c);
      c.kind = trace::Kind::all_reduce;
      c.send = c.receive = data;
      group.execute(c);
    }
    if (options.use == GroupUse::any) {
      const std::vector<std::int64_t> each(static_cast<std::size_t>(options_.size), 16);
      c.kind = trace::Kind::all_to_all;
      c.send = data;
      c.receive = static_cast<std::byte*>(data) + bytes;
      c.send_counts = c.receive_counts = std::make_shared<const std::vector<std::int64_t>>(each);
      group.execute(c);
    }
    FSDP_CUDA_CHECK(cudaStreamSynchronize(c10::cuda::getCurrentCUDAStream().stream()));
    FSDP_CUDA_CHECK(cudaFree(data));
  }

  // Polls until the communicator is no longer busy.
  void settle(const char* what) {
    const auto start = std::chrono::steady_clock::now();
    ncclResult_t state = ncclInProgress;
    for (;;) {
      const ncclResult_t code = ncclCommGetAsyncError(communicator_, &state);
      if (code != ncclSuccess) state = code;
      if (state != ncclInProgress) break;
      if (std::chrono::steady_clock::now() - start > options_.deadline) {
        ncclCommAbort(communicator_);
        detail::fail<CommunicationError>(
            "rank {} of {}: {} ({}) did not end within {} ms: a rank has died, has stopped or never came to this point",
            options_.rank, options_.size, what, options_.name, options_.deadline.count());
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    FSDP_NCCL_CHECK(state, what);
  }

  const ParentOptions options_;
  ncclComm_t communicator_ = nullptr;
};

UniqueId make_id() {
  ncclUniqueId id;
  FSDP_NCCL_CHECK(ncclGetUniqueId(&id), "ncclGetUniqueId");
  UniqueId result;
  std::memcpy(result.data(), &id, sizeof(id));
  return result;
}

std::shared_ptr<Parent> connect(const ParentOptions& options) { return std::make_shared<NcclParent>(options); }

std::string library_version() {
  int version = 0;
  FSDP_NCCL_CHECK(ncclGetVersion(&version), "ncclGetVersion");
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

}  // namespace
}  // namespace fsdp::nccl

extern "C" const fsdp::nccl::Module fsdp_nccl{fsdp::kCudaModuleVersion, &fsdp::nccl::make_id, &fsdp::nccl::connect,
                                              &fsdp::nccl::library_version, &fsdp::make_loopback_group};
