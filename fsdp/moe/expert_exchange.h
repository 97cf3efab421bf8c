// The way of tokens to the ranks that hold their experts, and home again.
//
// Rank r of an axis of P ranks holds experts r * experts / P and on. Rows sorted by expert are sent to those ranks,
// which receive them from every rank and group them by expert. Exchanges have a communicator and a stream of their own,
// so they run beside compute, gathers and reductions. Host thread of the rank only; every rank makes the same calls in
// the same order, whatever its tokens.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/comm/communicator.h"
#include "fsdp/mesh/device_mesh.h"
#include "fsdp/runtime/stream.h"

namespace fsdp::moe {

// How many rows go where, for the tokens of one microbatch in one layer. [rank], [own expert]
struct ExchangeCounts {
  std::vector<std::int64_t> sent, received;                   // rows to and from each rank
  std::vector<std::vector<std::int64_t>> received_by_expert;  // [rank][own expert]
  [[nodiscard]] std::vector<std::int64_t> rows_by_expert() const;
};

class ExpertExchange : public std::enable_shared_from_this<ExpertExchange> {
 public:
  // Over the ranks of one axis of the mesh; all of them make it. Throws UsageError when they cannot share `experts`
  // equally.
  static std::shared_ptr<ExpertExchange> create(const DeviceMesh& mesh, const std::string& axis, std::int64_t experts);

  [[nodiscard]] std::int64_t experts() const { return experts_; }
  [[nodiscard]] std::int64_t own_experts() const { return experts_ / size(); }
  [[nodiscard]] std::int64_t first_own_expert() const { return own_experts() * communicator_.rank().value(); }
  [[nodiscard]] int size() const { return communicator_.size(); }
  [[nodiscard]] const Stream& stream() const { return stream_; }
  [[nodiscard]] const std::shared_ptr<Runtime>& runtime() const { return runtime_; }
  [[nodiscard]] std::int64_t exchanges() const { return exchanges_; }  // of rows, so far

  // Counts under way. `load` (experts): this rank's rows for each expert.
  struct PendingCounts {
    at::Tensor sent, received;            // int64 (experts)
    at::Tensor sent_here, received_here;  // the same on the host, once `done`
    Event done;
    std::int64_t rows = 0;
  };
  [[nodiscard]] PendingCounts start_counts(const at::Tensor& load, std::int64_t rows);
  [[nodiscard]] ExchangeCounts finish_counts(const PendingCounts& pending);  // blocks the host

  // Rows (n, ...) to their experts' ranks; received rows come by rank. Differentiable: the gradient goes the other way.
  [[nodiscard]] at::Tensor dispatch(const at::Tensor& rows, const ExchangeCounts& counts);
  [[nodiscard]] at::Tensor combine(const at::Tensor& rows, const ExchangeCounts& counts);  // home

  ~ExpertExchange();
  // Makes exchanges under way, and later ones, fail with `reason` on all ranks; `reset`, by all of them, ends that.
  void abort(const std::string& reason) const { communicator_.abort(reason); }
  void reset();

  // Orders the current stream after what was exchanged.
  void join();
  // While one lives, exchanges made on a stream other than their own do not order that stream after them: who reads the
  // result waits for stream(). For schedules.
  class [[nodiscard]] Unordered {
   public:
    explicit Unordered(ExpertExchange& exchange) : exchange_(exchange) { ++exchange_.unordered_; }
    ~Unordered() { --exchange_.unordered_; }
    Unordered(const Unordered&) = delete;
    Unordered& operator=(const Unordered&) = delete;

   private:
    ExpertExchange& exchange_;
  };

  // Not for users: one exchange, not differentiable.
  [[nodiscard]] at::Tensor exchange(const at::Tensor& rows, const std::vector<std::int64_t>& sent,
                                    const std::vector<std::int64_t>& received, const char* label);

 private:
  ExpertExchange(Communicator communicator, std::shared_ptr<Runtime> runtime, std::int64_t experts);
  void hold(const at::Tensor& rows, const at::Tensor& result);

  const Communicator communicator_;
  const std::shared_ptr<Runtime> runtime_;
  const std::int64_t experts_;
  const Stream stream_;
  int unordered_ = 0;
  std::int64_t exchanges_ = 0;
  struct Held {
    at::Tensor rows;
    c10::Storage result;
    Event done;
  };
  std::deque<Held> held_;  // exchanged, but perhaps not yet
};

// Received rows grouped by own expert, ranks in order within each; and back. Differentiable.
[[nodiscard]] at::Tensor group_by_expert(const at::Tensor& rows, const ExchangeCounts& counts);
[[nodiscard]] at::Tensor ungroup_by_rank(const at::Tensor& rows, const ExchangeCounts& counts);
// Whether group_by_expert gives its argument as it is.
[[nodiscard]] bool grouped_as_received(const ExchangeCounts& counts);

}  // namespace fsdp::moe
