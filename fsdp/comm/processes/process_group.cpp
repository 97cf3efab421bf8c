#include "fsdp/comm/processes/process_group.h"

#include "fsdp/base/check.h"
#include "fsdp/comm/processes/backoff.h"
#include "fsdp/comm/processes/exchange.h"

namespace fsdp::processes {
namespace {

constexpr std::size_t kLongestReason = 8192;  // bytes of a failure's text

// FNV-1a. Groups of a job are few, so that 64 bits tell them apart.
std::uint64_t hash(std::uint64_t world, const std::string& key) {
  std::uint64_t value = 14695981039346656037ULL;
  const auto add = [&](std::uint8_t byte) { value = (value ^ byte) * 1099511628211ULL; };
  for (int i = 0; i < 8; ++i) add(static_cast<std::uint8_t>(world >> (8 * i)));
  for (const char c : key) add(static_cast<std::uint8_t>(c));
  return value;
}

}  // namespace

ProcessGroup::ProcessGroup(std::shared_ptr<Process> process, GroupOptions options)
    : process_(std::move(process)), options_(std::move(options)), id_(hash(options_.world, options_.key)) {}

ProcessGroup::~ProcessGroup() { process_->forget(id_); }

void ProcessGroup::execute(const Collective& operation) {
  std::unique_lock running(collective_, std::defer_lock);
  if (operation.kind != trace::Kind::send_recv) running.lock();
  throw_if_failed(operation);
  try {
    Exchange(*this, operation).run();
  } catch (const Error& error) {
    std::lock_guard lock(mutex_);
    if (aborted_.empty()) aborted_ = error.what();
    throw;
  } catch (const std::exception& error) {  // of the transport
    const auto message = fmt::format("rank {}: {} on communicator {} failed: {}", options_.members[options_.rank],
                                     describe(operation), options_.name, error.what());
    abort(message);
    throw CommunicationError(message);
  }
}

void ProcessGroup::throw_if_failed(const Collective& operation) {
  std::string reason = process_->failure(options_.world);
  if (reason.empty()) {
    std::lock_guard lock(mutex_);
    if (aborted_.empty()) aborted_ = process_->aborted(id_, epoch_);
    reason = aborted_;
  }
  if (reason.empty()) return;
  detail::fail<AbortedError>("rank {}: {} on communicator {} was aborted: {}", options_.members[options_.rank],
                             describe(operation), options_.name, reason);
}

void ProcessGroup::abort(const std::string& reason) {
  {
    std::lock_guard lock(mutex_);
    if (!aborted_.empty()) return;
    aborted_ = reason;
  }
  Header header;
  header.message = MessageKind::abort;
  header.group = id_;
  header.epoch = epoch_;
  for (int r = 0; r < size(); ++r) {
    if (r == options_.rank) continue;
    process_->post(options_.processes[r],
                   encode(header, std::string_view(reason).substr(0, kLongestReason), {}, nullptr, 0));
  }
}

void ProcessGroup::reset() {
  std::lock_guard running(collective_);
  if (!reset_announced_) {
    Header header;
    header.message = MessageKind::reset;
    header.group = id_;
    header.epoch = epoch_ + 1;
    for (int r = 0; r < size(); ++r) {
      if (r != options_.rank) process_->post(options_.processes[r], encode(header, "", {}, nullptr, 0));
    }
    reset_announced_ = true;
  }
  Backoff backoff(options_.deadline);
  for (;;) {
    process_->progress();
    std::string missing;
    for (int r = 0; r < size(); ++r) {
      if (r == options_.rank || process_->has_reset(id_, options_.processes[r], epoch_ + 1)) continue;
      missing += (missing.empty() ? "" : ", ") + std::to_string(options_.members[r]);
    }
    if (missing.empty()) break;
    FSDP_CHECK(backoff.pause(), CommunicationError,
               "rank {}: reset of communicator {} waited {} ms; ranks that did not reset: {}",
               options_.members[options_.rank], options_.name, options_.deadline.count(), missing);
  }
  std::lock_guard lock(mutex_);
  ++epoch_;
  reset_announced_ = false;
  aborted_.clear();
}

}  // namespace fsdp::processes
