#include "fsdp/comm/nccl/nccl_module.h"

#include "fsdp/base/check.h"
#include "fsdp/base/module_file.h"
#include "fsdp/runtime/cuda_module.h"

namespace fsdp::nccl {

const Module& module() {
  const auto* found = static_cast<const Module*>(open_module(kCudaModule, kNcclSymbol, kCudaModuleNeeds));
  FSDP_CHECK(found->version == kCudaModuleVersion, UsageError,
             "the module {} belongs to another version of libfsdp; build and install both together",
             module_path(kCudaModule));
  return *found;
}

}  // namespace fsdp::nccl
