// Shared objects of the library that are opened on demand, so that one binary serves machines with and without what
// they need (CUDA, MPI, ZeroMQ).
#pragma once

#include <string>

namespace fsdp {

// Where the module is: in the folder FSDP_MODULE_DIR when that is set; else in ../lib of the program; else its bare
// name, for the program's run path.
[[nodiscard]] std::string module_path(const std::string& name);

// Opens the module and returns the address of `symbol` in it. The module stays open for the life of the process: the
// libraries behind it cannot be started twice. `needs` says what must be installed, for the message.
// Throws UsageError when the module cannot be opened or has no such symbol.
[[nodiscard]] const void* open_module(const char* name, const char* symbol, const std::string& needs);

}  // namespace fsdp
