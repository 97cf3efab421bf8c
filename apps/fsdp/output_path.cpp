#include "apps/fsdp/output_path.h"

#include "fsdp/base/check.h"

namespace fsdp::app {

void make_parent_folder(const std::filesystem::path& path, const char* option) {
  if (!path.has_parent_path()) return;
  std::error_code error;
  std::filesystem::create_directories(path.parent_path(), error);
  FSDP_CHECK(!error, UsageError, "{}: cannot make the folder {}: {}", option, path.parent_path().string(),
             error.message());
}

}  // namespace fsdp::app
