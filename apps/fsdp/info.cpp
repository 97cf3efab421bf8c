#include "apps/fsdp/info.h"

#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <fmt/format.h>
#include <torch/version.h>

#include <thread>

#include "fsdp/base/error.h"
#include "fsdp/comm/mpi/process.h"
#include "fsdp/runtime/runtime.h"

namespace fsdp::app {
namespace {

std::string cuda() {
  try {
    static_cast<void>(make_cuda_runtime(0));
    return "yes";
  } catch (const Error& error) {
    return fmt::format("no ({})", error.what());
  }
}

}  // namespace

std::string info() {
  const auto mpi = mpi::library_info();
  return fmt::format(
      "libfsdp          {}\n"
      "LibTorch         {} ({})\n"
      "cores            {}, {} threads for operators\n"
      "device cpu       yes\n"
      "device cuda      {}\n"
      "device simulated yes (virtual clock)\n"
      "comm threads     yes (in-process ranks)\n"
      "comm simulated   yes (virtual clock)\n"
      "comm mpi         {}\n"
      "comm nccl        no (not in this version)",
      FSDP_VERSION, TORCH_VERSION, at::get_cpu_capability(), std::thread::hardware_concurrency(), at::get_num_threads(),
      cuda(), fmt::format("{} ({})", mpi.available ? "yes" : "no", mpi.text));
}

}  // namespace fsdp::app
