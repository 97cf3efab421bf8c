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

void check_output_file(const std::filesystem::path& path, const char* option,
                       const std::vector<std::filesystem::path>& inputs) {
  if (path.empty()) return;
  std::error_code ignored;
  FSDP_CHECK(!std::filesystem::exists(path, ignored) || std::filesystem::is_regular_file(path, ignored), UsageError,
             "{}: {} exists and is not a regular file", option, path.string());
  for (const auto& input : inputs) {
    const bool same =
        std::filesystem::weakly_canonical(path, ignored) == std::filesystem::weakly_canonical(input, ignored) ||
        std::filesystem::equivalent(path, input, ignored);
    FSDP_CHECK(!same, UsageError, "{}: {} is {}, which this run uses already; choose another file", option,
               path.string(), input.string());
  }
}

}  // namespace fsdp::app
