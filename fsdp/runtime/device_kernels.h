// The kernels of a device for code that has no runtime at hand.
#pragma once

#include <memory>

#include "fsdp/runtime/kernels.h"

namespace fsdp {

// Of a CUDA device for which a runtime exists; null where there is none. Keeps that runtime alive.
[[nodiscard]] std::shared_ptr<Kernels> device_kernels(int device_index);

}  // namespace fsdp
