// Functions of the CUDA driver, found at run time: nothing is linked against libcuda.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "fsdp/runtime/cuda/cuda_check.h"

namespace fsdp {

template <typename F>
void find_driver_function(const char* name, F& function) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found{};
  FSDP_CUDA_CHECK(cudaGetDriverEntryPointByVersion(name, &address, 12000, cudaEnableDefault, &found));
  FSDP_CHECK(found == cudaDriverEntryPointSuccess, Error, "the CUDA driver has no {}", name);
  function = reinterpret_cast<F>(address);
}

}  // namespace fsdp
