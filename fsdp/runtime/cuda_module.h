// What the module libfsdp_cuda.so offers to the runtime layer; opened on demand by cuda_module.cpp.
#pragma once

#include <memory>
#include <string>

#include "fsdp/runtime/runtime.h"

namespace fsdp {

inline constexpr const char* kCudaModule = "libfsdp_cuda.so";
inline constexpr const char* kCudaModuleNeeds = "the CUDA build of LibTorch and the nvidia packages that it names";
inline constexpr const char* kCudaRuntimeSymbol = "fsdp_cuda_runtime";
inline constexpr int kCudaModuleVersion = 3;

struct CudaRuntimeModule {
  int version = kCudaModuleVersion;
  int (*device_count)() = nullptr;
  int (*current_device)() = nullptr;
  std::shared_ptr<Runtime> (*make_runtime)(int device_index) = nullptr;
};

// What is wrong with CUDA_DEVICE_MAX_CONNECTIONS for work on several streams; empty: nothing.
[[nodiscard]] std::string warning_of_connections();

}  // namespace fsdp
