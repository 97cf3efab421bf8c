// Errors of the CUDA runtime become exceptions that say what was tried.
#pragma once

#include <cuda_runtime_api.h>

#include "fsdp/base/check.h"

#define FSDP_CUDA_CHECK(call)                                                                           \
  do {                                                                                                  \
    const cudaError_t code_ = (call);                                                                   \
    if (code_ != cudaSuccess) [[unlikely]]                                                              \
      ::fsdp::detail::fail<::fsdp::Error>("CUDA: {} failed: {} ({})", #call, cudaGetErrorString(code_), \
                                          cudaGetErrorName(code_));                                     \
  } while (false)
