// Places for files that the user named.
#pragma once

#include <filesystem>
#include <vector>

namespace fsdp::app {

// Makes the folder in which `path` will lie. Throws UsageError naming `option`, such as "--log", and the folder.
void make_parent_folder(const std::filesystem::path& path, const char* option);

// Throws UsageError naming `option` when `path` exists and is no regular file, or is one of `inputs`.
void check_output_file(const std::filesystem::path& path, const char* option,
                       const std::vector<std::filesystem::path>& inputs);

}  // namespace fsdp::app
