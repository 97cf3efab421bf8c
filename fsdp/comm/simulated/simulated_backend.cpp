#include "fsdp/comm/simulated/simulated_backend.h"

#include <numeric>

namespace fsdp {
namespace {

// Bytes that one rank sends (and receives), ring algorithms.
double bytes_moved(const Collective& operation, int size) {
  const double share = static_cast<double>(operation.count) * static_cast<double>(c10::elementSize(operation.dtype));
  switch (operation.kind) {
    case trace::Kind::all_gather:
    case trace::Kind::reduce_scatter:
      return share * (size - 1);
    case trace::Kind::all_reduce:
      return 2 * share * (size - 1) / size;
    case trace::Kind::broadcast:
    case trace::Kind::send_recv:
      return share;
    case trace::Kind::all_to_all: {
      const auto& counts = *operation.send_counts;
      return static_cast<double>(std::accumulate(counts.begin(), counts.end(), std::int64_t{0}) - counts[0]) *
             static_cast<double>(c10::elementSize(operation.dtype));
    }
    default:
      return 0;
  }
}

class SimulatedBackend final : public CommunicatorBackend {
 public:
  SimulatedBackend(std::shared_ptr<SimulatedRuntime> runtime, int size) : runtime_(std::move(runtime)), size_(size) {}
  void execute(const Collective& operation) override {
    runtime_->spend(runtime_->costs().transfer(bytes_moved(operation, size_), size_));
  }
  void abort(const std::string&) override {}
  void reset() override {}

 private:
  std::shared_ptr<SimulatedRuntime> runtime_;
  int size_;
};

}  // namespace

std::shared_ptr<CommunicatorBackend> make_simulated_backend(std::shared_ptr<SimulatedRuntime> runtime, int size) {
  return std::make_shared<SimulatedBackend>(std::move(runtime), size);
}

}  // namespace fsdp
