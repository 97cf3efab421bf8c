// Stream and Event: small value handles over what "asynchronous" means on a device kind.
//
// A stream runs its tasks in order. Streams order each other through events: `record` marks what was enqueued so far,
// `wait` holds back everything enqueued later. Both only enqueue; `synchronize` is the one call that blocks the host.
//
// One host thread per rank uses a rank's streams (the thread that calls forward and backward). Errors of a task travel:
// the stream that failed is poisoned, skips what follows, and the error is thrown at the next wait on it or on an event
// recorded on it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "fsdp/base/task.h"
#include "fsdp/trace/span.h"

namespace fsdp {

class StreamBackend;

// A mark on a stream. A handle that was never recorded counts as complete. Copies refer to the same mark; recording
// again moves the handle to a new one. Cheap: no allocation.
class Event {
 public:
  // True when everything before the mark has run. Throws the stream's error.
  [[nodiscard]] bool query() const;
  // Blocks the host until then. Throws the stream's error.
  void synchronize() const;

  [[nodiscard]] bool recorded() const { return stream_ != nullptr; }
  [[nodiscard]] const std::shared_ptr<StreamBackend>& stream() const { return stream_; }
  [[nodiscard]] std::int64_t mark() const { return mark_; }

 private:
  friend class Stream;
  std::shared_ptr<StreamBackend> stream_;
  std::int64_t mark_ = 0;  // meaning known to the backend: a task count, a virtual time
};

// How a task should run.
struct TaskOptions {
  // Worth less than a hand-off to another thread: may run at once on the calling thread if the stream is idle.
  bool small = false;
  // Filled with the times at which the task really ran; null when not recording. Owned by the recorder.
  trace::Span* span = nullptr;
};

class Stream {
 public:
  Stream() = default;
  explicit Stream(std::shared_ptr<StreamBackend> backend) : backend_(std::move(backend)) {}

  void enqueue(Task task, TaskOptions options = {}) const;
  void record(Event& event) const;
  void wait(const Event& event) const;
  void synchronize() const;

  // Clears the error of a poisoned stream after everything on it has been skipped. Blocks the host.
  void reset() const;

  // Time of the stream's clock: wall clock, or the virtual time at which the stream has run everything enqueued so far.
  [[nodiscard]] trace::Nanoseconds now() const;
  [[nodiscard]] int id() const;  // 0 is compute; in traces
  [[nodiscard]] const std::string& name() const;

  [[nodiscard]] explicit operator bool() const { return backend_ != nullptr; }
  bool operator==(const Stream& other) const { return backend_ == other.backend_; }
  [[nodiscard]] StreamBackend* backend() const { return backend_.get(); }

 private:
  std::shared_ptr<StreamBackend> backend_;
};

// What a device kind implements. Called through the handles above only.
class StreamBackend : public std::enable_shared_from_this<StreamBackend> {
 public:
  StreamBackend(std::string name, int id) : name_(std::move(name)), id_(id) {}
  virtual ~StreamBackend() = default;
  StreamBackend(const StreamBackend&) = delete;
  StreamBackend& operator=(const StreamBackend&) = delete;

  virtual void enqueue(Task task, TaskOptions options) = 0;
  virtual std::int64_t record() = 0;  // -> mark
  virtual void wait(const Event& event) = 0;
  virtual bool reached(std::int64_t mark) = 0;           // throws the stream's error
  virtual void synchronize_host(std::int64_t mark) = 0;  // blocks; throws the stream's error
  virtual void reset() = 0;
  [[nodiscard]] virtual trace::Nanoseconds now() const = 0;

  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] int id() const { return id_; }

 private:
  std::string name_;
  int id_;
};

}  // namespace fsdp
