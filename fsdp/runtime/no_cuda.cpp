// Stands in for runtime/cuda/ in a build without it.
#include "fsdp/base/check.h"
#include "fsdp/runtime/runtime.h"

namespace fsdp {

std::shared_ptr<Runtime> make_cuda_runtime(int device_index) {
  detail::fail<UsageError>("cannot use CUDA device {}: this build of libfsdp has no CUDA runtime; use device \"cpu\"",
                           device_index);
}

}  // namespace fsdp
