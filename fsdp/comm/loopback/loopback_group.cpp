#include "fsdp/comm/loopback/loopback_group.h"

#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <numeric>
#include <optional>
#include <unordered_set>
#include <vector>

#include "fsdp/comm/loopback/link_timer.h"
#include "fsdp/runtime/cuda/cuda_check.h"
#include "fsdp/runtime/cuda/is_recorded.h"
#include "fsdp/runtime/kernels.h"

namespace fsdp {
namespace {

constexpr std::int64_t kSmall = 1 << 16;     // bytes
constexpr std::int64_t kStaging = 16 << 20;  // bytes; what comes in lands here, again and again

class LoopbackGroup final : public CommunicatorBackend {
 public:
  LoopbackGroup(std::shared_ptr<Runtime> runtime, const LoopbackOptions& options, GroupUse use)
      : runtime_(std::move(runtime)), options_(options) {
    const bool gathers = use != GroupUse::reduce;
    multiprocessors_ = gathers ? options.gather_multiprocessors : options.reduce_multiprocessors;
    nanoseconds_per_byte_ = 1 / (gathers ? options.gather_gigabytes_per_second : options.reduce_gigabytes_per_second);
    if (!gathers && options.size > 1) staging();  // now: not beside a waiting collective, nor while a step is captured
    if (options.mode == LoopbackOptions::Mode::link && options.size > 1) {
      if (multiprocessors_ == 0) timer_.emplace();
      FSDP_CUDA_CHECK(cudaMalloc(&mark_, 4));
      FSDP_CUDA_CHECK(cudaMallocHost(&mark_source_, 4));
    }
  }
  ~LoopbackGroup() override {
    if (mark_ != nullptr) cudaFree(mark_);
    if (mark_source_ != nullptr) cudaFreeHost(mark_source_);
    if (staging_ != nullptr) cudaFree(staging_);
  }

  void execute(const Collective& c) override {
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
    const std::int64_t bytes = c.count * static_cast<std::int64_t>(c10::elementSize(c.dtype));
    const bool link = options_.mode == LoopbackOptions::Mode::link && options_.size > 1;
    const std::int64_t time = link ? link_time(c, bytes) : 0;
    // Copies within one device are made by its multiprocessors, so they would wait for the product beside them, as no
    // transfer over a link does: in steady state nothing is moved.
    // What the host will read (counts of tokens) is small, and moves.
    if (!link || payload(c, bytes) < kSmall || filled_.insert(c.receive).second) move(c, bytes, stream);
    if (!link) return;
    if (!timer_) {
      runtime_->kernels()->spin(time, multiprocessors_);
      return;
    }
    mark(stream);
    timer_->begin(stream, time);
    timer_->end(stream);
    mark(stream);
  }
  void abort(const std::string&) override {}
  void reset() override {}
  [[nodiscard]] std::string path() const override { return "loopback"; }

 private:
  [[nodiscard]] static std::int64_t payload(const Collective& c, std::int64_t bytes) {
    if (c.kind != trace::Kind::all_to_all) return bytes;
    return std::accumulate(c.send_counts->begin(), c.send_counts->end(), std::int64_t{0}) *
           static_cast<std::int64_t>(c10::elementSize(c.dtype));
  }

  [[nodiscard]] std::int64_t link_time(const Collective& c, std::int64_t bytes) const {
    const auto n = static_cast<double>(options_.size);
    double moved = static_cast<double>(bytes);
    if (c.kind == trace::Kind::all_gather || c.kind == trace::Kind::reduce_scatter) moved *= n - 1;
    if (c.kind == trace::Kind::all_reduce) moved *= 2 * (n - 1) / n;
    if (c.kind == trace::Kind::all_to_all) {  // all but what stays
      const auto& sent = *c.send_counts;
      moved = static_cast<double>((std::accumulate(sent.begin(), sent.end(), std::int64_t{0}) - sent[0]) *
                                  static_cast<std::int64_t>(c10::elementSize(c.dtype)));
    }
    return static_cast<std::int64_t>(moved * nanoseconds_per_byte_ + 1000 * options_.latency_microseconds);
  }

  void move(const Collective& c, std::int64_t bytes, cudaStream_t stream) {
    const auto* send = static_cast<const std::byte*>(c.send);
    auto* receive = static_cast<std::byte*>(c.receive);
    const auto width = static_cast<std::int64_t>(c10::elementSize(c.dtype));
    copies_.clear();
    switch (c.kind) {
      case trace::Kind::all_gather:
        for (int r = 0; r < options_.size; ++r) add_copy(receive + r * bytes, send, bytes);
        break;
      case trace::Kind::reduce_scatter:
        add_copy(receive, send, bytes);  // the others add nothing
        // Their data comes in all the same, and must not count.
        for (std::int64_t done = 0; options_.size > 1 && done < bytes; done += kStaging)
          add_copy(staging(), send + bytes + done, std::min(kStaging, bytes - done));
        break;
      case trace::Kind::all_to_all: {
        const std::int64_t mine = (*c.send_counts)[0] * width;
        const std::int64_t all =
            std::accumulate(c.receive_counts->begin(), c.receive_counts->end(), std::int64_t{0}) * width;
        if (mine == 0 && all > 0) FSDP_CUDA_CHECK(cudaMemsetAsync(receive, 0, static_cast<std::size_t>(all), stream));
        for (std::int64_t to = 0; mine > 0 && to < all; to += mine)
          add_copy(receive + to, send, std::min(mine, all - to));
        break;
      }
      case trace::Kind::all_reduce:
      case trace::Kind::broadcast:
        add_copy(receive, send, bytes);
        break;
      default:
        break;  // a barrier; messages to ranks that are not there
    }
    copy_all(stream);
  }

  struct Copy {
    void* to;
    const void* from;
    std::size_t bytes;
  };
  void add_copy(void* to, const void* from, std::int64_t bytes) {
    if (bytes > 0 && to != from) copies_.push_back({to, from, static_cast<std::size_t>(bytes)});
  }

  // Profilers see where an operation begins and ends. From the host: by copy engine, so that it waits for no
  // multiprocessor.
  void mark(cudaStream_t stream) {
    FSDP_CUDA_CHECK(cudaMemcpyAsync(mark_, mark_source_, 4, cudaMemcpyHostToDevice, stream));
  }

  void copy_all(cudaStream_t stream) {
    if (copies_.empty()) return;
    if (stream == nullptr || is_recorded(stream)) {  // where batches are refused
      for (const Copy& copy : copies_)
        FSDP_CUDA_CHECK(cudaMemcpyAsync(copy.to, copy.from, copy.bytes, cudaMemcpyDeviceToDevice, stream));
      return;
    }
    to_.clear();
    from_.clear();
    sizes_.clear();
    for (const Copy& copy : copies_) {
      to_.push_back(copy.to);
      from_.push_back(copy.from);
      sizes_.push_back(copy.bytes);
    }
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
    std::size_t first = 0;
    FSDP_CUDA_CHECK(
        cudaMemcpyBatchAsync(to_.data(), from_.data(), sizes_.data(), sizes_.size(), &attributes, &first, 1, stream));
  }

  void* staging() {
    if (staging_ == nullptr) FSDP_CUDA_CHECK(cudaMalloc(&staging_, static_cast<std::size_t>(kStaging)));
    return staging_;
  }

  const std::shared_ptr<Runtime> runtime_;
  const LoopbackOptions options_;
  int multiprocessors_ = 0;
  double nanoseconds_per_byte_ = 0;
  std::optional<LinkTimer> timer_;
  void *mark_ = nullptr, *mark_source_ = nullptr;
  void* staging_ = nullptr;
  std::unordered_set<const void*> filled_;  // what operations of mode link wrote to
  std::vector<Copy> copies_;
  std::vector<void*> to_;
  std::vector<const void*> from_;
  std::vector<std::size_t> sizes_;
};

}  // namespace

std::shared_ptr<CommunicatorBackend> make_loopback_group(const std::shared_ptr<Runtime>& runtime,
                                                         const LoopbackOptions& options, GroupUse use) {
  return std::make_shared<LoopbackGroup>(runtime, options, use);
}

}  // namespace fsdp
