// A stream of the CPU runtime: one worker thread with a queue.
//
// The host thread submits, the worker runs. Small tasks run on the host thread when the worker is idle, since a
// hand-off costs 10-80 us. Waiting parks the thread, it never spins: in-process ranks may outnumber the cores.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "fsdp/runtime/stream.h"

namespace fsdp {

[[nodiscard]] trace::Nanoseconds wall_clock();

class WorkerStream final : public StreamBackend {
 public:
  // `blocked` counts the host time that small tasks take on the host thread; it outlives the stream.
  WorkerStream(std::string name, int id, std::atomic<trace::Nanoseconds>& blocked);
  ~WorkerStream() override;  // runs what is queued, then joins

  void enqueue(Task task, TaskOptions options) override;
  std::int64_t record() override { return submitted_; }
  void wait(const Event& event) override;
  bool reached(std::int64_t mark) override;
  void synchronize_host(std::int64_t mark) override;
  void reset() override;
  [[nodiscard]] trace::Nanoseconds now() const override { return wall_clock(); }

 private:
  struct Entry {
    Task task;
    trace::Span* span = nullptr;
  };

  void work();
  void run(Task& task, trace::Span* span) noexcept;
  void push(Entry entry);
  [[nodiscard]] bool idle() const { return completed_.load(std::memory_order_acquire) == submitted_; }
  void throw_if_failed();

  std::atomic<trace::Nanoseconds>& blocked_;
  std::int64_t submitted_ = 0;  // host thread only
  std::atomic<std::int64_t> completed_{0};
  std::atomic<bool> failed_{false};

  std::mutex mutex_;  // guards everything below
  std::condition_variable work_available_;
  std::condition_variable progress_;
  std::vector<Entry> ring_;  // power-of-two ring, grows and never shrinks: no allocation when steady
  std::size_t head_ = 0;
  std::size_t count_ = 0;
  int waiters_ = 0;
  bool stopping_ = false;
  std::exception_ptr error_;  // the first one
  std::thread thread_;
};

}  // namespace fsdp
