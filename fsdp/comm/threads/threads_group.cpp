#include "fsdp/comm/threads/threads_group.h"

#include "fsdp/base/check.h"
#include "fsdp/comm/buffer_math.h"
#include "fsdp/comm/operation_check.h"
#include "fsdp/comm/reduce_kernels.h"

namespace fsdp {
class ThreadsBackend final : public CommunicatorBackend {
 public:
  ThreadsBackend(std::shared_ptr<ThreadsGroup> group, int rank) : group_(std::move(group)), rank_(rank) {}
  void execute(const Collective& operation) override { group_->execute(rank_, operation); }
  void abort(const std::string& reason) override { group_->abort(reason); }
  void reset() override { group_->reset(rank_); }

 private:
  std::shared_ptr<ThreadsGroup> group_;
  int rank_;
};

ThreadsGroup::ThreadsGroup(std::string name, std::vector<int> members, std::chrono::milliseconds deadline)
    : name_(std::move(name)),
      members_(std::move(members)),
      deadline_(deadline),
      operations_(members_.size()),
      arrived_(members_.size()),
      left_(members_.size()),
      resetting_(members_.size()),
      offers_(members_.size() * members_.size()) {}

std::shared_ptr<CommunicatorBackend> ThreadsGroup::join(std::shared_ptr<ThreadsGroup> group, int group_rank) {
  return std::make_shared<ThreadsBackend>(std::move(group), group_rank);
}

void ThreadsGroup::abort(const std::string& reason) {
  {
    std::lock_guard lock(mutex_);
    if (aborted_.empty()) aborted_ = reason;
  }
  changed_.notify_all();
}

void ThreadsGroup::leave(int world_rank) {
  {
    std::lock_guard lock(mutex_);
    for (std::size_t r = 0; r < members_.size(); ++r) {
      if (members_[r] == world_rank) left_[r] = true;
    }
  }
  changed_.notify_all();
}

bool ThreadsGroup::someone_left_without(const std::vector<bool>& arrived) const {
  for (std::size_t r = 0; r < members_.size(); ++r) {
    if (left_[r] && !arrived[r]) return true;
  }
  return false;
}

void ThreadsGroup::throw_aborted(int rank, const Collective& operation) const {
  detail::fail<AbortedError>("rank {}: {} on communicator {} was aborted: {}", members_[rank], describe(operation),
                             name_, aborted_);
}

void ThreadsGroup::meet(int rank, const Collective& operation, Meeting meeting) {
  std::unique_lock lock(mutex_);
  if (!aborted_.empty()) throw_aborted(rank, operation);
  arrived_[rank] = true;
  if (++arrived_count_ == static_cast<int>(members_.size())) {
    arrived_.assign(members_.size(), false);
    arrived_count_ = 0;
    ++generation_;
    if (meeting == Meeting::start) moving_ = static_cast<int>(members_.size());
    lock.unlock();
    changed_.notify_all();
    return;
  }
  const auto mine = generation_;
  const bool in_time = changed_.wait_for(
      lock, deadline_, [&] { return generation_ != mine || !aborted_.empty() || someone_left_without(arrived_); });
  if (generation_ != mine) return;
  if (!aborted_.empty()) throw_aborted(rank, operation);
  std::string missing;
  for (std::size_t r = 0; r < members_.size(); ++r) {
    if (!arrived_[r]) missing += (missing.empty() ? "" : ", ") + std::to_string(members_[r]);
  }
  const std::string how =
      in_time ? "cannot complete, for a rank has ended" : fmt::format("waited {} ms", deadline_.count());
  aborted_ = fmt::format("rank {}: {} on communicator {} {}; missing ranks: {}", members_[rank], describe(operation),
                         name_, how, missing);
  lock.unlock();
  changed_.notify_all();
  throw CommunicationError(aborted_);
}

// Every rank compares after the first meeting, so all of them throw.
void ThreadsGroup::compare_operations() {
  const Collective& first = operations_[0];
  for (std::size_t r = 1; r < operations_.size(); ++r) {
    FSDP_CHECK(same_operation(first, operations_[r]), CommunicationError, "communicator {}: {}", name_,
               describe_difference({members_[0], first}, {members_[r], operations_[r]}));
  }
  if (first.kind != trace::Kind::all_to_all) return;
  for (std::size_t from = 0; from < operations_.size(); ++from) {
    for (std::size_t to = 0; to < operations_.size(); ++to) {
      const auto sends = (*operations_[from].send_counts)[to], expects = (*operations_[to].receive_counts)[from];
      FSDP_CHECK(sends == expects, CommunicationError, "communicator {}: {}", name_,
                 describe_count_difference(first, members_[from], sends, members_[to], expects));
    }
  }
}

void ThreadsGroup::execute(int rank, const Collective& operation) {
  if (operation.kind == trace::Kind::send_recv) return exchange_with_peer(rank, operation);
  {
    std::lock_guard lock(mutex_);
    if (!aborted_.empty()) throw_aborted(rank, operation);  // before others' view of this rank changes under them
  }
  operations_[rank] = operation;
  if (members_.size() == 1) return move_data(rank, operation);
  meet(rank, operation, Meeting::start);
  try {
    struct Moving {
      ThreadsGroup& group;
      ~Moving() { group.finish_moving(); }
    };
    {
      Moving moving{*this};
      compare_operations();
      move_data(rank, operation);
    }
    meet(rank, operation, Meeting::end);
  } catch (const Error& error) {
    abort(error.what());
    std::unique_lock lock(mutex_);
    changed_.wait(lock,
                  [&] { return moving_ == 0; });  // others may be reading this rank's buffers; copying ends by itself
    throw;
  }
}

void ThreadsGroup::finish_moving() {
  {
    std::lock_guard lock(mutex_);
    --moving_;
  }
  changed_.notify_all();
}

void ThreadsGroup::move_data(int rank, const Collective& operation) {
  const auto count = operation.count;
  const auto dtype = operation.dtype;
  const int size = static_cast<int>(members_.size());
  const void* sends[256];
  FSDP_INVARIANT(size <= 256);
  switch (operation.kind) {
    case trace::Kind::all_gather:
      for (int r = 0; r < size; ++r)
        copy_elements(at_element(operation.receive, r * count, dtype), operations_[r].send, count, dtype);
      break;
    case trace::Kind::reduce_scatter:
      for (int r = 0; r < size; ++r) sends[r] = at_element(operations_[r].send, rank * count, dtype);
      reduce_on_cpu({sends, static_cast<std::size_t>(size)}, operation.receive, count, dtype, operation.reduce);
      break;
    case trace::Kind::all_reduce: {
      // Each rank reduces one part into its own receive buffer, then the parts are copied around. In place is safe: a
      // rank writes only its own part before the meeting, and the others read only theirs.
      const auto part = [&](int r) { return part_begin(count, r, size); };
      for (int r = 0; r < size; ++r) sends[r] = at_element(operations_[r].send, part(rank), dtype);
      reduce_on_cpu({sends, static_cast<std::size_t>(size)}, at_element(operation.receive, part(rank), dtype),
                    part(rank + 1) - part(rank), dtype, operation.reduce);
      if (size > 1) meet(rank, operation, Meeting::middle);
      for (int r = 0; r < size; ++r) {
        if (r != rank)
          copy_elements(at_element(operation.receive, part(r), dtype),
                        at_element(operations_[r].receive, part(r), dtype), part(r + 1) - part(r), dtype);
      }
      break;
    }
    case trace::Kind::broadcast:
      copy_elements(operation.receive, operations_[operation.peer].send, count, dtype);
      break;
    case trace::Kind::all_to_all: {
      std::int64_t offset = 0;
      for (int r = 0; r < size; ++r) {
        const auto n = (*operation.receive_counts)[r];
        copy_elements(at_element(operation.receive, offset, dtype),
                      at_element(operations_[r].send, sum_before(*operations_[r].send_counts, rank), dtype), n, dtype);
        offset += n;
      }
      break;
    }
    default:
      break;  // barrier: the meetings are all there is
  }
}

void ThreadsGroup::exchange_with_peer(int rank, const Collective& operation) {
  const int from = operation.sending ? rank : operation.peer;
  const int to = operation.sending ? operation.peer : rank;
  Offer& offer = offers_[from * members_.size() + to];
  std::unique_lock lock(mutex_);
  const auto wait_until = [&](auto condition) {
    const bool in_time =
        changed_.wait_for(lock, deadline_, [&] { return condition() || !aborted_.empty() || left_[operation.peer]; });
    if (condition()) return;
    if (!aborted_.empty()) throw_aborted(rank, operation);
    const std::string how =
        in_time ? "cannot complete, for a rank has ended:" : fmt::format("waited {} ms for", deadline_.count());
    aborted_ = fmt::format("rank {}: {} on communicator {} {} rank {}", members_[rank], describe(operation), name_, how,
                           members_[operation.peer]);
    changed_.notify_all();
    throw CommunicationError(aborted_);
  };
  if (operation.sending) {
    wait_until([&] { return !offer.present; });  // an earlier message of this pair
    offer = {operation, true, false};
    changed_.notify_all();
    wait_until([&] { return offer.taken; });
    offer.present = false;
    changed_.notify_all();
    return;
  }
  wait_until([&] { return offer.present && !offer.taken; });
  if (offer.operation.count != operation.count || offer.operation.dtype != operation.dtype) {
    aborted_ = fmt::format("communicator {}: rank {} sends {}, but rank {} expects {}", name_, members_[from],
                           describe(offer.operation), members_[to], describe(operation));
    changed_.notify_all();
    throw CommunicationError(aborted_);
  }
  copy_elements(operation.receive, offer.operation.send, operation.count, operation.dtype);
  offer.taken = true;
  changed_.notify_all();
}

void ThreadsGroup::reset(int rank) {
  std::unique_lock lock(mutex_);
  if (!resetting_[rank]) ++resetting_count_;
  resetting_[rank] = true;
  if (resetting_count_ == static_cast<int>(members_.size())) {
    resetting_.assign(members_.size(), false);
    resetting_count_ = 0;
    arrived_.assign(members_.size(), false);
    arrived_count_ = 0;
    offers_.assign(offers_.size(), Offer{});
    aborted_.clear();
    ++reset_generation_;
    changed_.notify_all();
    return;
  }
  const auto mine = reset_generation_;
  if (changed_.wait_for(lock, deadline_, [&] { return reset_generation_ != mine; })) return;
  std::string missing;
  for (std::size_t r = 0; r < members_.size(); ++r) {
    if (!resetting_[r]) missing += (missing.empty() ? "" : ", ") + std::to_string(members_[r]);
  }
  resetting_[rank] = false;
  --resetting_count_;
  detail::fail<CommunicationError>("rank {}: reset of communicator {} waited {} ms; ranks that did not reset: {}",
                                   members_[rank], name_, deadline_.count(), missing);
}

}  // namespace fsdp
