#include "fsdp/runtime/cuda_module.h"

#include <dlfcn.h>

#include <map>
#include <mutex>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/env.h"
#include "fsdp/base/log.h"
#include "fsdp/base/module_file.h"
#include "fsdp/runtime/device_kernels.h"

namespace fsdp {
namespace {

const CudaRuntimeModule& module() {
  const auto* found =
      static_cast<const CudaRuntimeModule*>(open_module(kCudaModule, kCudaRuntimeSymbol, kCudaModuleNeeds));
  FSDP_CHECK(found->version == kCudaModuleVersion, UsageError,
             "the module {} belongs to another version of libfsdp; build and install both together",
             module_path(kCudaModule));
  return *found;
}

struct Runtimes {
  std::mutex mutex;
  std::map<int, std::weak_ptr<Runtime>> latest;  // by device
};
Runtimes& runtimes() {
  static Runtimes instance;
  return instance;
}

}  // namespace

int cuda_device_count() { return why_no_cuda().empty() ? module().device_count() : 0; }

int current_cuda_device() { return why_no_cuda().empty() ? module().current_device() : 0; }

std::string why_no_cuda() {
  // Opening the module takes a second or two: not where there is no driver.
  static void* const driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (driver == nullptr) return "this machine has no CUDA driver (libcuda.so.1)";
  try {
    if (module().device_count() > 0) return "";
    return "no CUDA device, or no driver for one, is visible to this process (CUDA_VISIBLE_DEVICES?)";
  } catch (const Error& error) {
    return error.what();
  }
}

std::string warning_of_connections() {
  if (env::text("CUDA_DEVICE_MAX_CONNECTIONS") != "1") return {};
  return "CUDA_DEVICE_MAX_CONNECTIONS is 1: the device takes work of all streams from one queue, in the order of the "
         "host's calls, so collectives may wait for compute that does not concern them. Unset it, or set 8 or more";
}

std::shared_ptr<Runtime> make_cuda_runtime(int device_index) {
  const int count = cuda_device_count();
  FSDP_CHECK(count > 0, UsageError, "cannot use CUDA device {}: {}", device_index, why_no_cuda());
  FSDP_CHECK(device_index >= 0 && device_index < count, UsageError, "cannot use CUDA device {}: this process sees {}",
             device_index, count);
  static std::once_flag told;
  std::call_once(told, [] {
    if (const std::string warning = warning_of_connections(); !warning.empty())
      log::write(log::Level::warning, "fsdp: " + warning);
  });
  auto runtime = module().make_runtime(device_index);
  std::lock_guard lock(runtimes().mutex);
  runtimes().latest[device_index] = runtime;
  return runtime;
}

std::shared_ptr<Kernels> device_kernels(int device_index) {
  std::lock_guard lock(runtimes().mutex);
  auto runtime = runtimes().latest[device_index].lock();
  Kernels* kernels = runtime ? runtime->kernels() : nullptr;
  return {std::move(runtime), kernels};
}

}  // namespace fsdp
