#include "fsdp/comm/processes/process.h"

#include <condition_variable>
#include <exception>
#include <thread>

#include "fsdp/base/check.h"
#include "fsdp/base/module_file.h"
#include "fsdp/comm/processes/backoff.h"

namespace fsdp::processes {
namespace {

constexpr int kMessageTag = 1, kFirstDataTag = 2;
constexpr std::size_t kLargestMessage = 1 << 20;
constexpr std::size_t kRoomForText = 512;  // what label and counts of a usual message take
constexpr std::chrono::milliseconds kPatienceAfterFailure{2000};

const Module& open_module(const char* name) {
  const auto needs = std::string("Debian: ") + (std::string(name) == kMpiModule ? "libopenmpi-dev" : "libzmq3-dev");
  const auto* module = static_cast<const Module*>(fsdp::open_module(name, kModuleSymbol, needs));
  FSDP_CHECK(module->version == kModuleVersion, UsageError,
             "the module {} belongs to another version of libfsdp; build and install both together", module_path(name));
  return *module;
}

// Joining has no time limit of its own: it waits in a thread that is left behind when the deadline passes.
std::unique_ptr<Transport> connect_within(const Module& module, const std::function<Bootstrap()>& bootstrap,
                                          std::chrono::milliseconds deadline) {
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    std::unique_ptr<Transport> transport;
    std::exception_ptr error;
  };
  auto shared = std::make_shared<Shared>();
  std::thread([shared, bootstrap, connect = module.connect] {
    std::unique_ptr<Transport> transport;
    std::exception_ptr error;
    try {
      transport = connect(bootstrap());
    } catch (...) {
      error = std::current_exception();
    }
    std::lock_guard lock(shared->mutex);
    shared->transport = std::move(transport);
    shared->error = error;
    shared->done = true;
    shared->changed.notify_all();
  }).detach();
  std::unique_lock lock(shared->mutex);
  FSDP_CHECK(shared->changed.wait_for(lock, deadline + kPatienceAfterFailure, [&] { return shared->done; }),
             CommunicationError,
             "waited {} ms for all processes of the job to join over {}: one has stopped, or never came to this point",
             deadline.count(), module.name);
  if (shared->error) {
    try {
      std::rethrow_exception(shared->error);
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      throw CommunicationError(fmt::format("{} could not be started: {}", module.library(), error.what()));
    }
  }
  return std::move(shared->transport);
}

}  // namespace

LibraryInfo library_info(const char* module) {
  try {
    return {true, open_module(module).library()};
  } catch (const Error& error) {
    return {false, error.what()};
  }
}

std::shared_ptr<Process> Process::connect(const char* module, const std::function<Bootstrap()>& bootstrap,
                                          std::chrono::milliseconds deadline) {
  static std::mutex mutex;
  static std::weak_ptr<Process> current;
  std::lock_guard lock(mutex);
  auto process = current.lock();
  if (!process) {
    const Module& opened = open_module(module);
    process.reset(new Process(opened.name, connect_within(opened, bootstrap, deadline), deadline));
    current = process;
  }
  return process;
}

Process::Process(std::string name, std::unique_ptr<Transport> transport, std::chrono::milliseconds deadline)
    : name_(std::move(name)), transport_(std::move(transport)), deadline_(deadline), incoming_(kLargestMessage) {
  inline_limit_ = transport_->eager_bytes() - sizeof(Header) - kRoomForText;
  receiving_ = transport_->receive_from_any(incoming_.data(), incoming_.size(), kMessageTag);
}

Process::~Process() {
  Header header;
  header.message = MessageKind::left;
  const auto everyone_left = [&] {
    std::lock_guard lock(mutex_);
    return static_cast<int>(left_.size()) == size() - 1;
  };
  const auto all_sent = [&] {
    std::lock_guard lock(mutex_);
    return outbox_.empty();
  };
  try {
    for (int r = 0; r < size(); ++r) {
      if (r != rank()) post(r, encode(header, "", {}, nullptr, 0));
    }
    const bool in_order = !failed_ && std::uncaught_exceptions() == 0;
    Backoff backoff(in_order ? deadline_ : std::min(deadline_, kPatienceAfterFailure));
    bool complete = false;
    do {
      progress();
      complete = everyone_left() && all_sent();
    } while (!complete && backoff.pause());
    transport_->abandon(receiving_, true);
    if (complete) transport_->close();
  } catch (const std::exception&) {
    // The job is ending anyway, and nobody is left to tell.
  }
}

void Process::post(int to, std::vector<std::byte> message) {
  FSDP_CHECK(message.size() <= kLargestMessage, UsageError, "a message of {} bytes is too large, at most {}",
             message.size(), kLargestMessage);
  std::lock_guard lock(mutex_);
  Outgoing outgoing{{}, std::move(message)};
  outgoing.request = transport_->send(outgoing.bytes.data(), outgoing.bytes.size(), to, kMessageTag);
  if (!transport_->test(outgoing.request)) outbox_.push_back(std::move(outgoing));
}

int Process::next_data_tag() {
  std::lock_guard lock(mutex_);
  const int range = transport_->largest_tag() - kFirstDataTag;
  data_tag_ = (data_tag_ + 1) % range;
  return kFirstDataTag + data_tag_;
}

void Process::reap_outbox() {
  std::lock_guard lock(mutex_);
  std::erase_if(outbox_, [&](Outgoing& outgoing) { return transport_->test(outgoing.request); });
}

void Process::progress() {
  std::unique_lock receiving(progress_mutex_, std::try_to_lock);
  if (!receiving.owns_lock()) return;  // another thread does it
  Arrival arrival;
  while (transport_->test(receiving_, &arrival)) {
    Message message = decode(incoming_.data(), arrival.bytes);
    receiving_ = transport_->receive_from_any(incoming_.data(), incoming_.size(), kMessageTag);
    deliver(arrival.from, std::move(message));
  }
  reap_outbox();
}

void Process::deliver(int from, Message message) {
  std::lock_guard lock(mutex_);
  const Header& header = message.header;
  switch (header.message) {
    case MessageKind::operation:
      announcements_[{header.group, header.lane, from}].push_back(std::move(message));
      break;
    case MessageKind::reset:
      notices_[header.group].resets[from] = header.epoch;
      break;
    case MessageKind::abort:
      notices_[header.group].aborts.try_emplace(header.epoch, std::move(message.text));
      break;
    case MessageKind::failure:
      failed_worlds_.try_emplace(header.group, std::move(message.text));
      failed_ = true;
      break;
    case MessageKind::left:
      left_.insert(from);
      break;
  }
}

std::unique_ptr<Message> Process::take(const Source& source, std::int32_t epoch) {
  std::lock_guard lock(mutex_);
  const auto found = announcements_.find(source);
  if (found == announcements_.end()) return nullptr;
  auto& queue = found->second;
  while (!queue.empty() && queue.front().header.epoch < epoch) queue.pop_front();
  if (queue.empty() || queue.front().header.epoch > epoch) return nullptr;
  auto message = std::make_unique<Message>(std::move(queue.front()));
  queue.pop_front();
  return message;
}

bool Process::has_left(int rank) {
  std::lock_guard lock(mutex_);
  return left_.contains(rank);
}

std::string Process::aborted(std::uint64_t group, std::int32_t epoch) {
  std::lock_guard lock(mutex_);
  auto& aborts = notices_[group].aborts;
  aborts.erase(aborts.begin(), aborts.lower_bound(epoch));
  const auto found = aborts.find(epoch);
  return found == aborts.end() ? "" : found->second;
}

bool Process::has_reset(std::uint64_t group, int from, std::int32_t epoch) {
  std::lock_guard lock(mutex_);
  const auto& resets = notices_[group].resets;
  const auto found = resets.find(from);
  return found != resets.end() && found->second >= epoch;
}

std::string Process::failure(std::uint64_t world) {
  std::lock_guard lock(mutex_);
  const auto found = failed_worlds_.find(world);
  return found == failed_worlds_.end() ? "" : found->second;
}

void Process::fail_world(std::uint64_t world, const std::string& reason) {
  {
    std::lock_guard lock(mutex_);
    if (!failed_worlds_.try_emplace(world, reason).second) return;
    failed_ = true;
  }
  Header header;
  header.message = MessageKind::failure;
  header.group = world;
  for (int r = 0; r < size(); ++r) {
    if (r != rank()) post(r, encode(header, reason, {}, nullptr, 0));
  }
}

void Process::forget(std::uint64_t group) {
  std::lock_guard lock(mutex_);
  notices_.erase(group);
  std::erase_if(announcements_, [&](const auto& entry) { return entry.first.group == group; });
}

}  // namespace fsdp::processes
