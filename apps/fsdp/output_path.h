// Places for files that the user named.
#pragma once

#include <filesystem>

namespace fsdp::app {

// Makes the folder in which `path` will lie. Throws UsageError naming `option`, such as "--log", and the folder.
void make_parent_folder(const std::filesystem::path& path, const char* option);

}  // namespace fsdp::app
