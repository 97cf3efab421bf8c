#include "fsdp/checkpoint/checkpoint_folder.h"

#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include <system_error>

#include "fsdp/base/check.h"
#include "fsdp/checkpoint/tensor_index.h"

namespace fsdp::checkpoint {
namespace {

namespace fs = std::filesystem;

fs::path old_of(const fs::path& folder) { return folder.native() + ".old"; }

// So that a rename is on the disk, and not only the files it is about.
void sync_folder(const fs::path& folder) {
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return;
  ::fsync(descriptor);
  ::close(descriptor);
}

}  // namespace

fs::path part_of(const fs::path& folder) { return folder.native() + ".part"; }

void recover(const fs::path& folder) noexcept {
  std::error_code ignored;
  if (!fs::exists(folder, ignored) && TensorIndex::is_checkpoint(old_of(folder)))
    fs::rename(old_of(folder), folder, ignored);
}

void discard_part(const fs::path& folder) noexcept {
  std::error_code ignored;
  fs::remove_all(part_of(folder), ignored);
}

void make_part(const fs::path& folder) {
  FSDP_CHECK(folder.has_filename(), UsageError, "\"{}\" cannot be the name of a checkpoint", folder.string());
  recover(folder);
  std::error_code error;
  FSDP_CHECK(!fs::exists(fs::symlink_status(folder, error)) || TensorIndex::is_checkpoint(folder), UsageError,
             "{} is there and is no checkpoint: it is not replaced", folder.string());
  const fs::path part = part_of(folder);
  fs::remove_all(part, error);
  if (!error) fs::create_directories(part, error);
  FSDP_CHECK(!error, UsageError, "{} cannot be written: {}", part.string(), error.message());
}

void publish_part(const fs::path& folder) {
  std::error_code error;
  const fs::path part = part_of(folder), old = old_of(folder);
  sync_folder(part);
  if (!fs::exists(folder)) {
    fs::rename(part, folder, error);
  } else if (::renameat2(AT_FDCWD, part.c_str(), AT_FDCWD, folder.c_str(), RENAME_EXCHANGE) != 0) {
    fs::remove_all(old, error);
    fs::rename(folder, old, error);
    if (!error) fs::rename(part, folder, error);
    if (error) recover(folder);
  }
  FSDP_CHECK(!error, Error, "{} cannot be put in its place: {}", part.string(), error.message());
  sync_folder(folder.has_parent_path() ? folder.parent_path() : fs::path("."));
  fs::remove_all(part, error);  // the old one, where names were exchanged
  fs::remove_all(old, error);
}

void remove_checkpoint(const fs::path& folder) noexcept {
  std::error_code error;
  fs::remove_all(part_of(folder), error);
  fs::rename(folder, part_of(folder), error);
  if (!error) fs::remove_all(part_of(folder), error);
}

}  // namespace fsdp::checkpoint
