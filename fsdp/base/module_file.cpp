#include "fsdp/base/module_file.h"

#include <dlfcn.h>

#include <filesystem>

#include "fsdp/base/check.h"
#include "fsdp/base/env.h"

namespace fsdp {

std::string module_path(const std::string& name) {
  if (const auto folder = env::text("FSDP_MODULE_DIR")) return *folder + "/" + name;
  std::error_code error;
  const auto program = std::filesystem::read_symlink("/proc/self/exe", error);
  const auto beside = program.parent_path().parent_path() / "lib" / name;
  return !error && std::filesystem::exists(beside, error) ? beside.string() : name;
}

const void* open_module(const char* name, const char* symbol, const std::string& needs) {
  const std::string file = module_path(name);
  // Global: MPI finds its own plug-ins' symbols only then.
  void* handle = dlopen(file.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (handle == nullptr) {
    const char* reason = dlerror();
    detail::fail<UsageError>(
        "the module {} cannot be opened ({}); it is built where its library is installed ({}), and found beside "
        "libfsdp or in the folder FSDP_MODULE_DIR",
        file, reason, needs);
  }
  const void* address = dlsym(handle, symbol);
  FSDP_CHECK(address != nullptr, UsageError,
             "the module {} belongs to another version of libfsdp; build and install both together", file);
  return address;
}

}  // namespace fsdp
