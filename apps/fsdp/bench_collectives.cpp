#include "apps/fsdp/bench_collectives.h"

#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>

#include <chrono>
#include <functional>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "apps/fsdp/console.h"
#include "fsdp/base/check.h"
#include "fsdp/mesh/cuda_world.h"
#include "fsdp/mesh/spawn_ranks.h"
#include "fsdp/mesh/world.h"
#include "fsdp/runtime/kernels.h"

namespace fsdp::app {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t kWidth = 8192;  // of the products beside

class Bench {
 public:
  Bench(const World& world, int rounds)
      : world_(world),
        rounds_(rounds),
        gather_stream_(world.runtime()->make_stream("gather")),
        reduce_stream_(world.runtime()->make_stream("reduce")) {
    std::vector<int> ranks(static_cast<std::size_t>(world.size()));
    std::iota(ranks.begin(), ranks.end(), 0);
    gather_ = world.create_communicator(ranks, "bench.gather", GroupUse::gather);
    reduce_ = world.create_communicator(ranks, "bench.reduce", GroupUse::reduce);
    hosts_ = world.host().create_communicator(ranks, "bench.host");
    const auto options = at::TensorOptions().dtype(at::kBFloat16).device(world.runtime()->device());
    left_ = at::ones({kWidth, kWidth}, options);
    right_ = at::ones({kWidth, kWidth}, options).mul_(1e-4);
  }

  // Collectives of `bytes` in memory: `gathered` holds the whole buffer and this rank's share, `reduced` the whole
  // buffer.
  void run(const std::string& way, std::byte* gathered, std::byte* reduced, std::int64_t bytes) {
    const Elements share(bytes / world_.size() / 2);
    std::byte* own = reduced + world_.rank().value() * share.value() * 2;
    measure(
        way, bytes, [&] { gather_into(gathered + bytes, gathered, share); },
        [&] {
          reduce_.reduce_scatter(reduced, own, share, at::kBFloat16, reduce_stream_, "FSDP:bench:reduce_gradients");
        });
  }

  // Gathers that read the peers' memory, reductions by copies into it. Returns whether the ranks can.
  bool run_with_peers(std::byte* reduced, std::int64_t bytes) {
    const Elements share(bytes / world_.size() / 2);
    const Bytes granularity = gather_.backend()->peer_granularity();
    if (granularity == Bytes(0)) return false;
    if (share.value() * 2 % granularity.value() != 0) return true;  // not of this size
    std::string why;
    const auto memory =
        gather_.backend()->make_peer_memory({{.share = Bytes(share.value() * 2)}}, *world_.runtime()->kernels(), why);
    const auto inbox = reduce_.backend()->make_inbox(Bytes(share.value() * 2), *world_.runtime()->kernels(), why);
    FSDP_CHECK(memory != nullptr && inbox != nullptr, CommunicationError, "memory could not be shared: {}", why);
    void* whole = memory->acquire(0);
    const SumDestination own{.data = reduced + world_.rank().value() * share.value() * 2, .dtype = at::kBFloat16};
    measure(
        "peers", bytes, [&] { gather_into(memory->share(0), whole, share); },
        [&] {
          reduce_.reduce_scatter(reduced, own, share, at::kBFloat16, *inbox, reduce_stream_,
                                 "FSDP:bench:reduce_gradients");
        });
    for (const Stream& stream : {gather_stream_, reduce_stream_}) stream.synchronize();
    return true;
  }

  [[nodiscard]] const Communicator& gather() const { return gather_; }
  [[nodiscard]] const Communicator& reduce() const { return reduce_; }

 private:
  void gather_into(const void* own, void* whole, Elements share) const {
    gather_.all_gather(own, whole, share, at::kBFloat16, gather_stream_, "FSDP:bench:unshard");
  }

  void measure(const std::string& way, std::int64_t bytes, const std::function<void()>& all_gather,
               const std::function<void()>& reduce_scatter) {
    const auto both = [&] {
      all_gather();
      reduce_scatter();
    };
    const double products = time([this] { multiply(); }, {});
    const auto line = [&](const char* operation, const std::function<void()>& call) {
      const double alone = time({}, call), beside = time([this] { multiply(); }, call);
      const double products_beside = products_time_;
      if (world_.rank() != Rank(0)) return;
      const double moved = static_cast<double>(bytes) * (world_.size() - 1) / world_.size();
      console::print(nlohmann::json{{"bench", "collectives"},
                                    {"operation", operation},
                                    {"way", way},
                                    {"ranks", world_.size()},
                                    {"mib", bytes >> 20},
                                    {"alone_us", alone},
                                    {"bus_gb_per_s", moved / alone * 1e-3},
                                    {"beside_products_us", beside},
                                    {"products_slowdown", products_beside / products}}
                         .dump());
    };
    line("all_gather", all_gather);
    line("reduce_scatter", reduce_scatter);
    line("both_at_once", both);
  }

  // Products for longer than the collectives beside them take.
  void multiply() {
    for (int i = 0; i < 12; ++i) at::mm(left_, right_);
  }

  // us a call of `collective`, from the start of all to the end of the last; without one, us of the products.
  double time(const std::function<void()>& products, const std::function<void()>& collective) {
    const Stream compute = world_.runtime()->compute_stream();
    double result = 0;
    for (int pass = 0; pass < 2; ++pass) {  // the first warms up
      for (const Stream& stream : {compute, gather_stream_, reduce_stream_}) stream.synchronize();
      const Stream host = world_.host().runtime()->compute_stream();
      hosts_.barrier(host, "bench");
      host.synchronize();
      const auto start = Clock::now();
      const auto since = [&] { return std::chrono::duration<double, std::micro>(Clock::now() - start).count(); };
      if (products) products();
      for (int i = 0; i < rounds_ && collective; ++i) collective();
      if (collective) {
        gather_stream_.synchronize();
        reduce_stream_.synchronize();
        result = since() / rounds_;
      }
      if (products) {
        compute.synchronize();
        products_time_ = since();
        if (!collective) result = products_time_;
      }
    }
    return result;
  }

  World world_;
  const int rounds_;
  Communicator gather_, reduce_, hosts_;
  Stream gather_stream_, reduce_stream_;
  at::Tensor left_, right_;
  double products_time_ = 0;
};

}  // namespace

int bench_collectives(const BenchCollectivesCommand& command) {
  static_cast<void>(uses_cuda(DeviceKind::cuda));  // says once why it cannot be
  if (const auto code = spawn_ranks(command.ranks)) return *code;
  const World world = World::from_environment({.device = DeviceKind::cuda, .deadline = std::chrono::seconds(60)});
  FSDP_CHECK(world.size() > 1, UsageError, "fsdp bench collectives: one rank has nothing to exchange");
  Bench bench(world, command.rounds);
  Runtime& runtime = *world.runtime();
  const Bytes largest(std::int64_t{command.largest_mib} << 20);
  const Bytes room = largest * 3;  // gathered, its share, reduced
  const c10::DataPtr plain = runtime.allocate(room, runtime.compute_stream());
  runtime.clear(plain.get(), room, runtime.compute_stream());
  const auto sweep = [&](const std::string& way, void* memory) {
    auto* base = static_cast<std::byte*>(memory);
    for (std::int64_t bytes = 1 << 20; bytes <= largest.value(); bytes *= 4)
      bench.run(way, base, base + largest.value() * 2, bytes);
  };
  sweep("ring", plain.get());
  const auto gather = bench.gather().backend(), reduce = bench.reduce().backend();
  if (const std::string refusal = gather->why_no_symmetric_memory(); !refusal.empty()) {
    if (world.rank() == Rank(0))
      console::print(nlohmann::json{{"bench", "collectives"}, {"no_registered_memory", refusal}}.dump());
    return 0;
  }
  const c10::DataPtr registered = gather->allocate_symmetric(room);
  FSDP_CHECK(gather->register_symmetric(registered.get(), room) && reduce->register_symmetric(registered.get(), room),
             CommunicationError, "NCCL could not register {} MiB", room.value() >> 20);
  runtime.clear(registered.get(), room, runtime.compute_stream());
  sweep("registered", registered.get());
  for (std::int64_t bytes = 1 << 20; bytes <= largest.value(); bytes *= 4) {
    if (!bench.run_with_peers(static_cast<std::byte*>(registered.get()), bytes)) break;
  }
  for (const auto& group : {gather, reduce}) group->deregister_symmetric(registered.get());
  return 0;
}

}  // namespace fsdp::app
