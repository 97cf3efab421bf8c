// A group of ranks that exchange data, on any backend.
//
// A value handle: copies share the group. Calls enqueue on the given stream and return; data is ready for whoever waits
// for an event recorded after the call. Every rank of the group makes the same calls in the same order with the same
// counts. Arguments are checked here, once, for all backends. One host thread per rank; abort() from any thread.
//
// Counts are elements of `dtype`. Buffers stay owned by the caller and must live until the stream has passed the call.
// In place is allowed: all_gather with `send` = own share of `receive`, reduce_scatter with `receive` = own share of
// `send`, all_reduce with equal buffers. Sums of bf16 and fp16 are made in fp32, in rank order, and rounded once.
#pragma once

#include <c10/core/ScalarType.h>

#include <memory>
#include <string>
#include <vector>

#include "fsdp/base/types.h"
#include "fsdp/comm/backend.h"
#include "fsdp/comm/collective.h"
#include "fsdp/runtime/runtime.h"

namespace fsdp {

class Communicator {
 public:
  Communicator() = default;
  Communicator(std::shared_ptr<CommunicatorBackend> backend, std::shared_ptr<Runtime> runtime, Rank rank, int size,
               std::string name);

  [[nodiscard]] Rank rank() const;
  [[nodiscard]] int size() const;
  [[nodiscard]] const std::string& name() const { return state_->name; }
  [[nodiscard]] explicit operator bool() const { return state_ != nullptr; }

  // receive[rank * count ...] = send of that rank. `receive` holds size() * count elements.
  void all_gather(const void* send, void* receive, Elements count, c10::ScalarType dtype, const Stream& stream,
                  const char* label) const;
  // receive = share `rank()` of the sum of all ranks' `send`. `send` holds size() * count elements.
  void reduce_scatter(const void* send, void* receive, Elements count, c10::ScalarType dtype, const Stream& stream,
                      const char* label) const;
  // The same through `inbox`, of this group: where the sum goes is up to `destination`. Float, BFloat16 and Half.
  void reduce_scatter(const void* send, const SumDestination& destination, Elements count, c10::ScalarType dtype,
                      PeerInbox& inbox, const Stream& stream, const char* label) const;
  void all_reduce(const void* send, void* receive, Elements count, c10::ScalarType dtype, ReduceOp op,
                  const Stream& stream, const char* label) const;
  // `data` of rank `root` reaches all ranks.
  void broadcast(void* data, Elements count, c10::ScalarType dtype, Rank root, const Stream& stream,
                 const char* label) const;
  // Rank r receives what every rank holds for it, in rank order. Counts are [rank]; they must agree pairwise.
  void all_to_all_v(const void* send, std::vector<std::int64_t> send_counts, void* receive,
                    std::vector<std::int64_t> receive_counts, c10::ScalarType dtype, const Stream& stream,
                    const char* label) const;
  void send(const void* data, Elements count, c10::ScalarType dtype, Rank to, const Stream& stream,
            const char* label) const;
  void receive(void* data, Elements count, c10::ScalarType dtype, Rank from, const Stream& stream,
               const char* label) const;
  void barrier(const Stream& stream, const char* label) const;
  // Of the ranks that share `memory`, made by this group, always on the same stream: holds no multiprocessor while one
  // is late.
  void barrier(PeerMemory& memory, const Stream& stream, const char* label) const;

  void abort(const std::string& reason) const { state_->backend->abort(reason); }
  void reset() const;

  // Compares every operation with the other ranks' before it runs; CPU groups always do.
  void set_check(bool check) const { state_->backend->set_check(check); }
  [[nodiscard]] std::string path() const { return state_->backend->path(); }  // as CommunicatorBackend's
  [[nodiscard]] const std::shared_ptr<CommunicatorBackend>& backend() const { return state_->backend; }

  // Operations from here on belong to this part of the run; they are compared with those of the other ranks.
  void set_stamp(const Stamp& stamp) const { state_->stamp = stamp; }

  // Collectives up to this payload (of the largest buffer) may run on the calling thread of a CPU rank.
  void set_inline_limit(Bytes limit) const { state_->inline_limit = limit; }

 private:
  struct State {
    std::shared_ptr<CommunicatorBackend> backend;
    std::shared_ptr<Runtime> runtime;
    Rank rank;
    int size = 1;
    std::string name;
    std::int64_t sequence = 0;
    Stamp stamp = {};
    Bytes inline_limit{0};
  };

  void launch(Collective operation, std::int64_t largest_count, const Stream& stream) const;

  std::shared_ptr<State> state_;
};

}  // namespace fsdp
