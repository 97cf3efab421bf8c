#include "fsdp/runtime/stream.h"

namespace fsdp {

bool Event::query() const { return stream_ == nullptr || stream_->reached(mark_); }

void Event::synchronize() const {
  if (stream_ != nullptr) stream_->synchronize_host(mark_);
}

void Stream::enqueue(Task task, TaskOptions options) const { backend_->enqueue(std::move(task), options); }

void Stream::record(Event& event) const {
  if (event.stream_ != backend_) event.stream_ = backend_;
  event.mark_ = backend_->record();
}

void Stream::wait(const Event& event) const {
  if (event.stream_ == nullptr || event.stream_ == backend_) return;  // in order already
  backend_->wait(event);
}

void Stream::synchronize() const { backend_->synchronize_host(backend_->record()); }
void Stream::reset() const { backend_->reset(); }
trace::Nanoseconds Stream::now() const { return backend_->now(); }
int Stream::id() const { return backend_->id(); }
const std::string& Stream::name() const { return backend_->name(); }

}  // namespace fsdp
