#include "fsdp/comm/communicator.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <numeric>

#include "fsdp/base/check.h"
#include "fsdp/comm/reduce_kernels.h"

namespace fsdp {

std::string describe(const Collective& operation) {
  std::int64_t count = operation.count;  // of an exchange: what this rank sends
  if (operation.send_counts)
    count = std::accumulate(operation.send_counts->begin(), operation.send_counts->end(), std::int64_t{0});
  return fmt::format("{} \"{}\" #{} of {} {}", trace::to_string(operation.kind), operation.label, operation.sequence,
                     count, c10::toString(operation.dtype));
}

Communicator::Communicator(std::shared_ptr<CommunicatorBackend> backend, std::shared_ptr<Runtime> runtime, Rank rank,
                           int size, std::string name)
    : state_(std::make_shared<State>(State{std::move(backend), std::move(runtime), rank, size, std::move(name)})) {}

int Communicator::size() const {
  FSDP_CHECK(state_ != nullptr, UsageError, "this communicator was never created");
  return state_->size;
}

Rank Communicator::rank() const {
  FSDP_CHECK(state_ != nullptr, UsageError, "this communicator was never created");
  return state_->rank;
}

void Communicator::launch(Collective operation, std::int64_t largest_count, const Stream& stream) const {
  FSDP_CHECK(state_ != nullptr, UsageError, "{} \"{}\": this communicator was never created",
             trace::to_string(operation.kind), operation.label);
  FSDP_CHECK(stream, UsageError, "{} \"{}\" on communicator {}: the stream was never created",
             trace::to_string(operation.kind), operation.label, state_->name);
  FSDP_CHECK(operation.count >= 0, UsageError,
             "{} \"{}\" on communicator {}: expected a count of 0 or more elements, got {}",
             trace::to_string(operation.kind), operation.label, state_->name, operation.count);
  if (operation.kind == trace::Kind::reduce_scatter || operation.kind == trace::Kind::all_reduce) {
    FSDP_CHECK(can_reduce(operation.dtype), UsageError,
               "{} \"{}\" on communicator {}: cannot reduce {}; expected Float, Double, BFloat16, Half, Int or Long",
               trace::to_string(operation.kind), operation.label, state_->name, c10::toString(operation.dtype));
  }
  FSDP_CHECK(operation.peer >= 0 && operation.peer < state_->size, UsageError,
             "{} \"{}\" on communicator {}: expected a rank from 0 to {}, got {}", trace::to_string(operation.kind),
             operation.label, state_->name, state_->size - 1, operation.peer);
  operation.sequence = ++state_->sequence;
  operation.stamp = state_->stamp;
  const std::int64_t bytes = largest_count * static_cast<std::int64_t>(c10::elementSize(operation.dtype));
  TaskOptions options;
  // A message waits for its peer's call, which may come after one of ours: never on the calling thread.
  options.small = state_->inline_limit > Bytes(0) && Bytes(bytes) <= state_->inline_limit &&
                  operation.kind != trace::Kind::send_recv;
  if (auto* recorder = state_->runtime->recorder()) {
    options.span = recorder->issue(operation.label, operation.kind, stream.id());
    options.span->sequence = operation.sequence;
    options.span->bytes = bytes;
  }
  RECORD_FUNCTION_WITH_SCOPE(at::RecordScope::USER_SCOPE, operation.label, c10::ArrayRef<const c10::IValue>{});
  stream.enqueue(Task([backend = state_->backend, operation = std::move(operation)] { backend->execute(operation); }),
                 options);
}

void Communicator::all_gather(const void* send, void* receive, Elements count, c10::ScalarType dtype,
                              const Stream& stream, const char* label) const {
  launch({.kind = trace::Kind::all_gather,
          .dtype = dtype,
          .send = send,
          .receive = receive,
          .count = count.value(),
          .label = label},
         count.value() * size(), stream);
}

void Communicator::reduce_scatter(const void* send, void* receive, Elements count, c10::ScalarType dtype,
                                  const Stream& stream, const char* label) const {
  launch({.kind = trace::Kind::reduce_scatter,
          .dtype = dtype,
          .send = send,
          .receive = receive,
          .count = count.value(),
          .label = label},
         count.value() * size(), stream);
}

void Communicator::reduce_scatter(const void* send, const SumDestination& destination, Elements count,
                                  c10::ScalarType dtype, PeerInbox& inbox, const Stream& stream,
                                  const char* label) const {
  const auto sums = [](c10::ScalarType type) {
    return type == c10::kFloat || type == c10::kBFloat16 || type == c10::kHalf;
  };
  FSDP_CHECK(sums(dtype) && sums(destination.dtype), UsageError,
             "reduce_scatter \"{}\" through an inbox of {}: cannot add {} to {}; expected Float, BFloat16 or Half",
             label, name(), c10::toString(dtype), c10::toString(destination.dtype));
  const Bytes share = bytes_of(count, static_cast<std::int64_t>(c10::elementSize(dtype)));
  FSDP_CHECK(share <= inbox.largest_share(), UsageError,
             "reduce_scatter \"{}\" through an inbox of {}: a share of {} bytes, the inbox was made for {} at most",
             label, name(), share.value(), inbox.largest_share().value());
  launch({.kind = trace::Kind::reduce_scatter,
          .dtype = dtype,
          .send = send,
          .count = count.value(),
          .label = label,
          .inbox = &inbox,
          .destination = destination},
         count.value() * size(), stream);
}

void Communicator::all_reduce(const void* send, void* receive, Elements count, c10::ScalarType dtype, ReduceOp op,
                              const Stream& stream, const char* label) const {
  launch({.kind = trace::Kind::all_reduce,
          .reduce = op,
          .dtype = dtype,
          .send = send,
          .receive = receive,
          .count = count.value(),
          .label = label},
         count.value(), stream);
}

void Communicator::broadcast(void* data, Elements count, c10::ScalarType dtype, Rank root, const Stream& stream,
                             const char* label) const {
  launch({.kind = trace::Kind::broadcast,
          .dtype = dtype,
          .peer = static_cast<std::int32_t>(root.value()),
          .send = data,
          .receive = data,
          .count = count.value(),
          .label = label},
         count.value(), stream);
}

void Communicator::all_to_all_v(const void* send, std::vector<std::int64_t> send_counts, void* receive,
                                std::vector<std::int64_t> receive_counts, c10::ScalarType dtype, const Stream& stream,
                                const char* label) const {
  const auto check_counts = [&](const char* which, const std::vector<std::int64_t>& counts) {
    FSDP_CHECK(static_cast<int>(counts.size()) == size(), UsageError,
               "all_to_all_v \"{}\" on communicator {}: expected {} {} counts (one per rank), got {}", label, name(),
               size(), which, counts.size());
    for (std::size_t r = 0; r < counts.size(); ++r) {
      FSDP_CHECK(counts[r] >= 0, UsageError, "all_to_all_v \"{}\" on communicator {}: the {} count of rank {} is {}",
                 label, name(), which, r, counts[r]);
    }
  };
  check_counts("send", send_counts);
  check_counts("receive", receive_counts);
  const auto total = std::max(std::accumulate(send_counts.begin(), send_counts.end(), std::int64_t{0}),
                              std::accumulate(receive_counts.begin(), receive_counts.end(), std::int64_t{0}));
  launch({.kind = trace::Kind::all_to_all,
          .dtype = dtype,
          .send = send,
          .receive = receive,
          .label = label,
          .send_counts = std::make_shared<const std::vector<std::int64_t>>(std::move(send_counts)),
          .receive_counts = std::make_shared<const std::vector<std::int64_t>>(std::move(receive_counts))},
         total, stream);
}

void Communicator::send(const void* data, Elements count, c10::ScalarType dtype, Rank to, const Stream& stream,
                        const char* label) const {
  FSDP_CHECK(to != rank(), UsageError, "send \"{}\" on communicator {}: rank {} cannot send to itself", label, name(),
             to.value());
  launch({.kind = trace::Kind::send_recv,
          .dtype = dtype,
          .sending = true,
          .peer = static_cast<std::int32_t>(to.value()),
          .send = data,
          .count = count.value(),
          .label = label},
         count.value(), stream);
}

void Communicator::receive(void* data, Elements count, c10::ScalarType dtype, Rank from, const Stream& stream,
                           const char* label) const {
  FSDP_CHECK(from != rank(), UsageError, "receive \"{}\" on communicator {}: rank {} cannot receive from itself", label,
             name(), from.value());
  launch({.kind = trace::Kind::send_recv,
          .dtype = dtype,
          .peer = static_cast<std::int32_t>(from.value()),
          .receive = data,
          .count = count.value(),
          .label = label},
         count.value(), stream);
}

void Communicator::barrier(const Stream& stream, const char* label) const {
  launch({.kind = trace::Kind::barrier, .label = label}, 0, stream);
}

void Communicator::barrier(PeerMemory& memory, const Stream& stream, const char* label) const {
  launch({.kind = trace::Kind::barrier, .label = label, .peers = &memory}, 0, stream);
}

void Communicator::reset() const {
  state_->backend->reset();
  state_->sequence = 0;
  state_->stamp = {};
}

}  // namespace fsdp
