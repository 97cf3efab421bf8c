// The library's own kernels on one CUDA device, compiled for it by NVRTC and loaded here: a first use beside a waiting
// collective would block the host until that ends.
#pragma once

#include <memory>

#include "fsdp/runtime/kernels.h"

namespace fsdp::cuda {

// For the current device. Throws Error with the compiler's log.
[[nodiscard]] std::unique_ptr<Kernels> make_kernels();

}  // namespace fsdp::cuda
