// Meta kernels that LibTorch's C++ side lacks (Python adds its own), so that a whole training step runs on meta
// tensors.
#pragma once

namespace fsdp {

// Process-wide, once; later calls do nothing. Does not clash with Python's torch in the same process.
void register_meta_kernels();

}  // namespace fsdp
