#include "fsdp/module/backward_watch.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace fsdp::backward_watch {
namespace {

// Nodes with numbers from `begin` to the next segment's belong to `unit`.
struct Segment {
  std::uint64_t begin;
  FsdpModule* unit;
  std::uint64_t version;  // of its weights
};

// Of one thread that runs forwards: numbers are counted per thread.
struct Segments {
  std::mutex mutex;           // a backward may run on another thread, and contexts go on any
  std::vector<Segment> list;  // ascending
  FsdpModule* current = nullptr;
};

struct Registry {
  std::mutex mutex;
  std::unordered_map<std::uint64_t, std::shared_ptr<Segments>> threads;  // by RecordFunction's thread id
  std::atomic<std::uint64_t> generation{1};                              // grows when a thread ends
};

Registry& registry() {
  static auto* instance = new Registry;  // never destroyed: threads may end after main does
  return *instance;
}

std::atomic<Callback> callback_of_all{nullptr};

struct OwnSegments {
  std::uint64_t thread = at::RecordFunction::currentThreadId();
  std::shared_ptr<Segments> segments = std::make_shared<Segments>();
  OwnSegments() {
    segments->list.reserve(kMaximumSegments + 1);  // once: nothing grows with the steps
    std::lock_guard lock(registry().mutex);
    registry().threads[thread] = segments;
  }
  ~OwnSegments() {
    std::lock_guard lock(registry().mutex);
    registry().threads.erase(thread);
    ++registry().generation;
  }
};

Segments& own_segments() {
  static thread_local OwnSegments own;
  return *own.segments;
}

// Null when that thread has run no forward of a unit, or has ended.
Segments* segments_of(std::uint64_t thread) {
  struct Cache {
    std::uint64_t thread = 0, generation = 0;
    std::shared_ptr<Segments> segments;
  };
  static thread_local Cache cache;
  if (cache.thread == thread && cache.generation == registry().generation.load(std::memory_order_acquire))
    return cache.segments.get();
  std::lock_guard lock(registry().mutex);
  const auto found = registry().threads.find(thread);
  if (found == registry().threads.end()) return nullptr;
  cache = {thread, registry().generation.load(), found->second};
  return cache.segments.get();
}

Segment find(Segments& segments, std::uint64_t number) {
  std::lock_guard lock(segments.mutex);
  const auto after = std::upper_bound(segments.list.begin(), segments.list.end(), number,
                                      [](std::uint64_t n, const Segment& segment) { return n < segment.begin; });
  return after == segments.list.begin() ? Segment{0, nullptr, 0} : *std::prev(after);
}

std::unique_ptr<at::ObserverContext> before_node(const at::RecordFunction& node) {
  if (node.seqNr() < 0) return nullptr;  // accumulators
  Segments* segments = segments_of(node.forwardThreadId());
  if (segments == nullptr) return nullptr;
  const auto number = static_cast<std::uint64_t>(node.seqNr());
  const Segment segment = find(*segments, number);
  if (segment.unit != nullptr) callback_of_all.load(std::memory_order_relaxed)(*segment.unit, number, segment.version);
  return nullptr;
}

}  // namespace

void install(Callback callback) {
  callback_of_all = callback;
  static const auto handle = at::addGlobalCallback(
      at::RecordFunctionCallback(before_node).needsIds(false).scopes({at::RecordScope::BACKWARD_FUNCTION}));
  (void)handle;
}

std::uint64_t next_number() { return at::sequence_number::peek(); }

FsdpModule* enter(FsdpModule* unit, std::uint64_t version) {
  Segments& segments = own_segments();
  std::lock_guard lock(segments.mutex);
  FsdpModule* previous = std::exchange(segments.current, unit);
  const std::uint64_t now = at::sequence_number::peek();
  auto& list = segments.list;
  if (!list.empty() && list.back().begin == now) list.pop_back();  // nothing was made meanwhile
  const bool same = list.empty() ? unit == nullptr : list.back().unit == unit && list.back().version == version;
  if (!same) list.push_back({now, unit, version});
  if (list.size() > kMaximumSegments)
    list.erase(list.begin(), list.begin() + static_cast<std::ptrdiff_t>(kMaximumSegments / 2));
  return previous;
}

void forget(const FsdpModule& unit) {
  std::lock_guard lock(registry().mutex);
  for (auto& [thread, segments] : registry().threads) {
    std::lock_guard inner(segments->mutex);
    for (Segment& segment : segments->list) {
      if (segment.unit == &unit) segment.unit = nullptr;
    }
    if (segments->current == &unit) segments->current = nullptr;
  }
}

}  // namespace fsdp::backward_watch
