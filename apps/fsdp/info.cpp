#include "apps/fsdp/info.h"

#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <fmt/format.h>
#include <torch/version.h>

#include <thread>

#include "fsdp/base/error.h"
#include "fsdp/comm/nccl/nccl_module.h"
#include "fsdp/comm/processes/process.h"
#include "fsdp/runtime/runtime.h"

namespace fsdp::app {
namespace {

std::string cuda() {
  const std::string reason = why_no_cuda();
  return reason.empty() ? fmt::format("yes ({} seen)", cuda_device_count()) : fmt::format("no ({})", reason);
}

std::string nccl() {
  const std::string reason = why_no_cuda();
  if (!reason.empty()) return fmt::format("no ({})", reason);
  return fmt::format("yes: NCCL {}", nccl::module().library_version());
}

std::string describe(const processes::LibraryInfo& library) {
  return fmt::format("{}: {}", library.available ? "yes" : "no", library.text);
}

}  // namespace

std::string info() {
  const auto mpi = processes::library_info(processes::kMpiModule);
  const auto zeromq = processes::library_info(processes::kZeroMqModule);
  return fmt::format(
      "libfsdp          {}\n"
      "LibTorch         {} ({})\n"
      "cores            {}, {} threads for operators\n"
      "device cpu       yes\n"
      "device cuda      {}\n"
      "device simulated yes (virtual clock)\n"
      "comm threads     yes (in-process ranks)\n"
      "comm simulated   yes (virtual clock)\n"
      "comm mpi         {} (mpirun, srun)\n"
      "comm zeromq      {} (torchrun)\n"
      "comm nccl        {} (one process a GPU)\n"
      "comm loopback    {} (rank 0 of several on one GPU, for measuring)",
      FSDP_VERSION, TORCH_VERSION, at::get_cpu_capability(), std::thread::hardware_concurrency(), at::get_num_threads(),
      cuda(), describe(mpi), describe(zeromq), nccl(), why_no_cuda().empty() ? "yes" : "no");
}

}  // namespace fsdp::app
