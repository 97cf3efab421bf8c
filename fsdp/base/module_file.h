// Shared objects of the library that are opened on demand, so that one binary serves machines with and without what
// they need (CUDA, MPI, ZeroMQ).
#pragma once

#include <string>

namespace fsdp {

// Opens `name` from the folder FSDP_MODULE_DIR when that is set; else from ../lib of the program, or wherever its run
// path leads; and returns the address of `symbol` in it. The module stays open for the life of the process: the
// libraries behind it cannot be started twice. `needs` says what must be installed, for the message.
// Throws UsageError when the module cannot be opened or has no such symbol.
[[nodiscard]] const void* open_module(const char* name, const char* symbol, const std::string& needs);

}  // namespace fsdp
