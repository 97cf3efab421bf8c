// A folder that appears under its name only when it is whole: written as NAME.part, put in its place at the end.
//
// Rank 0 alone calls these. Whatever kills the process in between, the old checkpoint or the new one is there under its
// name, or as NAME.old where the file system cannot exchange two names.
#pragma once

#include <filesystem>

namespace fsdp::checkpoint {

[[nodiscard]] std::filesystem::path part_of(const std::filesystem::path& folder);

// An empty NAME.part; one of an earlier attempt goes. Throws UsageError when NAME is something else than a checkpoint,
// or nothing can be written there.
void make_part(const std::filesystem::path& folder);
// NAME.part becomes NAME, on the disk when this returns; what was there before is removed. Throws Error.
void publish_part(const std::filesystem::path& folder);
void discard_part(const std::filesystem::path& folder) noexcept;
// Puts NAME.old back where NAME is missing.
void recover(const std::filesystem::path& folder) noexcept;
// Removes a checkpoint. One that is half removed is NAME.part.
void remove_checkpoint(const std::filesystem::path& folder) noexcept;

}  // namespace fsdp::checkpoint
