#include "fsdp/runtime/cpu/worker_stream.h"

#include <ATen/Parallel.h>

#include <chrono>

namespace fsdp {

trace::Nanoseconds wall_clock() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

WorkerStream::WorkerStream(std::string name, int id, std::atomic<trace::Nanoseconds>& blocked)
    : StreamBackend(std::move(name), id), blocked_(blocked), ring_(16), thread_([this] { work(); }) {}

WorkerStream::~WorkerStream() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  work_available_.notify_one();
  thread_.join();
}

void WorkerStream::enqueue(Task task, TaskOptions options) {
  if (options.small && idle()) {
    const auto start = wall_clock();
    ++submitted_;
    run(task, options.span);
    completed_.store(submitted_, std::memory_order_release);  // the worker is parked: nobody else writes it
    blocked_.fetch_add(wall_clock() - start, std::memory_order_relaxed);
    return;
  }
  push({std::move(task), options.span});
}

void WorkerStream::push(Entry entry) {
  {
    std::lock_guard lock(mutex_);
    if (count_ == ring_.size()) {
      std::vector<Entry> larger(ring_.size() * 2);
      for (std::size_t i = 0; i < count_; ++i) larger[i] = std::move(ring_[(head_ + i) & (ring_.size() - 1)]);
      ring_ = std::move(larger);
      head_ = 0;
    }
    ring_[(head_ + count_) & (ring_.size() - 1)] = std::move(entry);
    ++count_;
    ++submitted_;
  }
  work_available_.notify_one();
}

void WorkerStream::wait(const Event& event) {
  if (event.stream()->reached(event.mark())) return;
  push({Task([event] { event.synchronize(); }), nullptr});
}

bool WorkerStream::reached(std::int64_t mark) {
  if (completed_.load(std::memory_order_acquire) < mark) return false;
  throw_if_failed();
  return true;
}

void WorkerStream::synchronize_host(std::int64_t mark) {
  if (completed_.load(std::memory_order_acquire) < mark) {
    std::unique_lock lock(mutex_);
    ++waiters_;
    progress_.wait(lock, [&] { return completed_.load(std::memory_order_acquire) >= mark; });
    --waiters_;
  }
  throw_if_failed();
}

void WorkerStream::throw_if_failed() {
  if (!failed_.load(std::memory_order_acquire)) return;
  std::lock_guard lock(mutex_);
  if (error_) std::rethrow_exception(error_);
}

void WorkerStream::reset() {
  {
    std::unique_lock lock(mutex_);
    ++waiters_;
    progress_.wait(lock, [&] { return completed_.load(std::memory_order_acquire) >= submitted_; });
    --waiters_;
    error_ = nullptr;
  }
  failed_.store(false, std::memory_order_release);
}

void WorkerStream::run(Task& task, trace::Span* span) noexcept {
  if (failed_.load(std::memory_order_acquire)) return;  // poisoned: skip until reset
  try {
    if (span != nullptr) span->begin = wall_clock();
    task();
    if (span != nullptr) span->end = wall_clock();
  } catch (...) {
    std::lock_guard lock(mutex_);
    error_ = std::current_exception();
    failed_.store(true, std::memory_order_release);
  }
}

void WorkerStream::work() {
  at::set_num_threads(1);  // a stream is one thread; the cores belong to compute
  std::unique_lock lock(mutex_);
  for (;;) {
    work_available_.wait(lock, [&] { return stopping_ || count_ > 0; });
    if (count_ == 0) return;
    Entry entry = std::move(ring_[head_]);
    head_ = (head_ + 1) & (ring_.size() - 1);
    --count_;
    lock.unlock();
    run(entry.task, entry.span);
    entry = Entry{};  // releases what the task holds before anyone is told that it ended
    lock.lock();
    completed_.fetch_add(1, std::memory_order_release);
    if (waiters_ > 0) progress_.notify_all();
  }
}

}  // namespace fsdp
