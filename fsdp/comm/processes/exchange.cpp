#include "fsdp/comm/processes/exchange.h"

#include <algorithm>

#include "fsdp/base/check.h"
#include "fsdp/comm/buffer_math.h"
#include "fsdp/comm/operation_check.h"
#include "fsdp/comm/reduce_kernels.h"

namespace fsdp::processes {
namespace {

constexpr std::size_t kLargestMessage = std::size_t{1} << 30;

// Bytes that are summed at a time: the blocks of all ranks fit the cache, and two sets of them a few megabytes.
std::size_t reduce_block(int size) {
  return std::clamp((std::size_t{4} << 20) / static_cast<std::size_t>(size), std::size_t{16} << 10,
                    std::size_t{256} << 10);
}

bool is_message(const Collective& operation) { return operation.kind == trace::Kind::send_recv; }

bool is_reduction(const Collective& operation) {
  return operation.kind == trace::Kind::reduce_scatter || operation.kind == trace::Kind::all_reduce;
}

// Collectives are matched with each other, sends with the peer's receives and receives with its sends.
Lane announced_lane(const Collective& operation) {
  if (!is_message(operation)) return Lane::collective;
  return operation.sending ? Lane::sends : Lane::receives;
}
Lane awaited_lane(const Collective& operation) {
  if (!is_message(operation)) return Lane::collective;
  return operation.sending ? Lane::receives : Lane::sends;
}

}  // namespace

Exchange::Exchange(ProcessGroup& group, const Collective& operation)
    : group_(group),
      transport_(group.process().transport()),
      operation_(operation),
      options_(group.options()),
      messages_(options_.members.size()),
      data_tags_(options_.members.size()) {
  if (is_message(operation)) {
    peers_ = {operation.peer};
    return;
  }
  for (int r = 0; r < group.size(); ++r) {
    if (r != options_.rank) peers_.push_back(r);
  }
}

Exchange::~Exchange() {
  for (auto& pending : receives_) transport_.abandon(pending.request, true);
  for (auto& pending : sends_) transport_.abandon(pending.request, false);
}

void Exchange::run() {
  announce();
  await_announcements();
  is_message(operation_) ? compare_with_peer() : compare();
  is_reduction(operation_) ? move_and_reduce() : move();
}

bool Exchange::reduces_whole() const { return fits_inline(byte_count(operation_.count, operation_.dtype)); }

Exchange::Range Exchange::outgoing(int r) const {
  const auto range = [&](std::int64_t first, std::int64_t count) {
    return Range{at_element(operation_.send, first, operation_.dtype), byte_count(count, operation_.dtype)};
  };
  const auto count = operation_.count;
  switch (operation_.kind) {
    case trace::Kind::all_gather:
      return range(0, count);
    case trace::Kind::reduce_scatter:
      return range(r * count, count);
    case trace::Kind::all_reduce: {
      if (reduces_whole()) return range(0, count);
      const auto begin = part_begin(count, r, group_.size());
      return range(begin, part_begin(count, r + 1, group_.size()) - begin);
    }
    case trace::Kind::broadcast:
      return operation_.peer == options_.rank ? range(0, count) : Range{};
    case trace::Kind::all_to_all:
      return range(sum_before(*operation_.send_counts, r), (*operation_.send_counts)[r]);
    case trace::Kind::send_recv:
      return operation_.sending ? range(0, count) : Range{};
    default:
      return {};  // barrier: the announcements are all there is
  }
}

Exchange::Part Exchange::destination(int r) const {
  const auto part = [&](std::int64_t first, std::int64_t count) {
    return Part{at_element(operation_.receive, first, operation_.dtype), byte_count(count, operation_.dtype)};
  };
  const auto count = operation_.count;
  switch (operation_.kind) {
    case trace::Kind::all_gather:
      return part(r * count, count);
    case trace::Kind::broadcast:
      return operation_.peer == r ? part(0, count) : Part{};
    case trace::Kind::all_to_all:
      return part(sum_before(*operation_.receive_counts, r), (*operation_.receive_counts)[r]);
    case trace::Kind::send_recv:
      return operation_.sending ? Part{} : part(0, count);
    default:
      return {};
  }
}

void Exchange::announce() {
  std::vector<std::int64_t> counts;
  if (operation_.kind == trace::Kind::all_to_all) {
    // All of them to everyone, so that all ranks see the same disagreement.
    counts = *operation_.send_counts;
    counts.insert(counts.end(), operation_.receive_counts->begin(), operation_.receive_counts->end());
  }
  Header header = header_of(operation_);
  header.lane = announced_lane(operation_);
  header.group = group_.id();
  header.epoch = group_.epoch();
  for (const int r : peers_) {
    const Range range = outgoing(r);
    header.data_tag = data_tags_[r] = group_.process().next_data_tag();
    group_.process().post(options_.processes[r], encode(header, operation_.label, counts, range.data,
                                                        fits_inline(range.bytes) ? range.bytes : 0));
  }
}

void Exchange::await_announcements() {
  Process& process = group_.process();
  Backoff backoff(options_.deadline);
  std::vector<int> missing = peers_;
  const auto has_left = [&](int r) { return process.has_left(options_.processes[r]); };
  for (;;) {
    process.progress();
    // A farewell is the last message of its sender: who has left before we look for messages sends no more.
    std::vector<int> left;
    std::ranges::copy_if(missing, std::back_inserter(left), has_left);
    std::erase_if(missing, [&](int r) {
      messages_[r] = process.take({group_.id(), awaited_lane(operation_), options_.processes[r]}, group_.epoch());
      return messages_[r] != nullptr;
    });
    if (missing.empty()) return;
    group_.throw_if_failed(operation_);  // a rank that failed has said so before its farewell
    if (std::ranges::any_of(left, [&](int r) { return messages_[r] == nullptr; }))
      fail_for_missing(missing, "cannot complete, for a rank has ended");
    pause_or_fail(backoff, missing);
  }
}

void Exchange::compare() const {
  const auto at = [&](int r) { return r == options_.rank ? operation_ : messages_[r]->operation(); };
  const Collective first = at(0);
  for (int r = 1; r < group_.size(); ++r) {
    const Collective other = at(r);
    FSDP_CHECK(same_operation(first, other), CommunicationError, "communicator {}: {}", options_.name,
               describe_difference({options_.members[0], first}, {options_.members[r], other}));
  }
  if (operation_.kind != trace::Kind::all_to_all) return;
  const auto sends = [&](int from, int to) {
    return from == options_.rank ? (*operation_.send_counts)[to] : messages_[from]->counts.at(to);
  };
  const auto expects = [&](int to, int from) {
    return to == options_.rank ? (*operation_.receive_counts)[from] : messages_[to]->counts.at(group_.size() + from);
  };
  for (int from = 0; from < group_.size(); ++from) {
    for (int to = 0; to < group_.size(); ++to) {
      FSDP_CHECK(sends(from, to) == expects(to, from), CommunicationError, "communicator {}: {}", options_.name,
                 describe_count_difference(operation_, options_.members[from], sends(from, to), options_.members[to],
                                           expects(to, from)));
    }
  }
}

void Exchange::compare_with_peer() const {
  const Collective other = messages_[operation_.peer]->operation();
  const bool sending = operation_.sending;
  const int from = options_.members[sending ? options_.rank : operation_.peer];
  const int to = options_.members[sending ? operation_.peer : options_.rank];
  FSDP_CHECK(other.count == operation_.count && other.dtype == operation_.dtype, CommunicationError,
             "communicator {}: rank {} sends {}, but rank {} expects {}", options_.name, from,
             describe(sending ? operation_ : other), to, describe(sending ? other : operation_));
}

void Exchange::copy_own_part() const {
  const int rank = options_.rank;
  if (operation_.kind == trace::Kind::all_gather) {
    copy_elements(at_element(operation_.receive, rank * operation_.count, operation_.dtype), operation_.send,
                  operation_.count, operation_.dtype);
  } else if (operation_.kind == trace::Kind::all_to_all) {
    copy_elements(at_element(operation_.receive, sum_before(*operation_.receive_counts, rank), operation_.dtype),
                  at_element(operation_.send, sum_before(*operation_.send_counts, rank), operation_.dtype),
                  (*operation_.send_counts)[rank], operation_.dtype);
  }
}

void Exchange::move() {
  for (const int r : peers_) {
    if (const Range range = outgoing(r); !fits_inline(range.bytes)) send(r, range, kLargestMessage);
  }
  for (const int r : peers_) {
    const Part part = destination(r);
    if (!fits_inline(part.bytes)) {
      receive(r, part);
    } else if (part.bytes > 0) {
      std::memcpy(part.data, messages_[r]->data.data(), part.bytes);
    }
  }
  copy_own_part();
  await_transfers();
}

void Exchange::move_and_reduce() {
  for (const int r : peers_) {
    if (const Range range = outgoing(r); !fits_inline(range.bytes)) send(r, range, reduce_block(group_.size()));
  }
  const int rank = options_.rank;
  const auto count = operation_.count;
  auto* out = static_cast<std::byte*>(operation_.receive);
  if (operation_.kind == trace::Kind::reduce_scatter) {
    reduce_part(rank * count, count, out);
    return await_transfers();
  }
  if (reduces_whole()) {
    reduce_part(0, count, out);
    return await_transfers();
  }
  const auto begin = [&](int r) { return part_begin(count, r, group_.size()); };
  const auto part = [&](int r) {
    return Part{at_element(operation_.receive, begin(r), operation_.dtype),
                byte_count(begin(r + 1) - begin(r), operation_.dtype)};
  };
  reduce_part(begin(rank), begin(rank + 1) - begin(rank), part(rank).data);
  await_transfers();  // in place, the others' sums go where this rank's parts are still being sent from
  for (const int r : peers_) {
    send(r, {part(rank).data, part(rank).bytes}, kLargestMessage);
    receive(r, part(r));
  }
  await_transfers();
}

void Exchange::reduce_part(std::int64_t first, std::int64_t count, std::byte* out) {
  const int size = group_.size(), rank = options_.rank;
  const auto dtype = operation_.dtype;
  const bool came_inline = size == 1 || fits_inline(byte_count(count, dtype));
  const std::size_t block_bytes = reduce_block(size);
  const std::int64_t block =
      came_inline ? std::max<std::int64_t>(count, 1) : static_cast<std::int64_t>(block_bytes / c10::elementSize(dtype));
  const std::int64_t blocks = (count + block - 1) / block;
  const auto elements = [&](std::int64_t b) { return std::min(block, count - b * block); };

  auto& scratch = group_.scratch();  // [block parity][rank][byte]
  if (!came_inline) scratch.resize(std::max(scratch.size(), 2 * block_bytes * static_cast<std::size_t>(size)));
  const auto arriving = [&](std::int64_t b, int r) {
    return scratch.data() + static_cast<std::size_t>(b % 2 * size + r) * block_bytes;
  };
  const auto begin_block = [&](std::int64_t b) {
    if (came_inline || b >= blocks) return std::size_t{0};
    for (const int r : peers_) receive(r, {arriving(b, r), byte_count(elements(b), dtype)});
    return peers_.size();
  };

  begin_block(0);
  std::vector<const void*> inputs(static_cast<std::size_t>(size));
  for (std::int64_t b = 0; b < blocks; ++b) {
    await_receives(begin_block(b + 1));
    for (const int r : peers_) {
      inputs[r] = came_inline ? messages_[r]->data.data() : arriving(b, r);
    }
    inputs[rank] = at_element(operation_.send, first + b * block, dtype);
    reduce_on_cpu(inputs, out + byte_count(b * block, dtype), elements(b), dtype, operation_.reduce);
  }
}

void Exchange::send(int peer, Range range, std::size_t block) {
  for (std::size_t at = 0; at < range.bytes; at += block) {
    sends_.push_back({transport_.send(range.data + at, std::min(block, range.bytes - at), options_.processes[peer],
                                      data_tags_[peer]),
                      peer});
  }
}

void Exchange::receive(int peer, Part part) {
  for (std::size_t at = 0; at < part.bytes; at += kLargestMessage) {
    receives_.push_back({transport_.receive(part.data + at, std::min(kLargestMessage, part.bytes - at),
                                            options_.processes[peer], messages_[peer]->header.data_tag),
                         peer});
  }
}

void Exchange::await_receives(std::size_t left) {
  Backoff backoff(options_.deadline);
  while (receives_.size() > left) {
    const auto last = receives_.end() - static_cast<std::ptrdiff_t>(left);
    const auto kept = std::remove_if(receives_.begin(), last, [&](Pending& p) { return transport_.test(p.request); });
    const bool moved = kept != last;
    receives_.erase(kept, last);
    if (moved) continue;
    group_.process().progress();
    std::vector<int> missing;
    for (const auto& pending : receives_) missing.push_back(pending.peer);
    pause_or_fail(backoff, missing);
  }
}

void Exchange::await_transfers() {
  await_receives(0);
  Backoff backoff(options_.deadline);
  for (;;) {
    std::erase_if(sends_, [&](Pending& p) { return transport_.test(p.request); });
    if (sends_.empty()) return;
    group_.process().progress();
    std::vector<int> missing;
    for (const auto& pending : sends_) missing.push_back(pending.peer);
    pause_or_fail(backoff, missing);
  }
}

void Exchange::pause_or_fail(Backoff& backoff, std::span<const int> missing) {
  group_.throw_if_failed(operation_);
  if (backoff.pause()) return;
  const auto waited = fmt::format("waited {} ms", options_.deadline.count());
  fail_for_missing(missing, is_message(operation_)
                                ? fmt::format("{} for rank {}", waited, options_.members[operation_.peer])
                                : waited);
}

void Exchange::fail_for_missing(std::span<const int> missing, const std::string& how) {
  std::vector<int> ranks;
  for (const int r : missing) ranks.push_back(options_.members[r]);
  std::ranges::sort(ranks);
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  std::string names;
  for (const int r : ranks) names += (names.empty() ? "" : ", ") + std::to_string(r);
  const auto message = fmt::format("rank {}: {} on communicator {} {}; missing ranks: {}",
                                   options_.members[options_.rank], describe(operation_), options_.name, how, names);
  group_.abort(message);
  throw CommunicationError(message);
}

}  // namespace fsdp::processes
