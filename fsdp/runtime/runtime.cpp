#include "fsdp/runtime/runtime.h"

#include <cstring>

#include "fsdp/base/check.h"

namespace fsdp {

void Runtime::copy(void* to, const void* from, Bytes size, const Stream& stream) {
  if (to == nullptr || from == nullptr || size == Bytes(0)) return;
  stream.enqueue([to, from, bytes = static_cast<std::size_t>(size.value())] { std::memcpy(to, from, bytes); });
}

void Runtime::clear(void* data, Bytes size, const Stream& stream) {
  if (data == nullptr || size == Bytes(0)) return;
  stream.enqueue([data, bytes = static_cast<std::size_t>(size.value())] { std::memset(data, 0, bytes); });
}

std::unique_ptr<DeviceGraph> Runtime::capture(const std::function<void()>&) {
  detail::fail<UsageError>("a step can be captured on CUDA only; this rank runs on {}", device().str());
}

}  // namespace fsdp
