// Names that live as long as the process: the same text gives the same pointer.
//
// For labels of operations, which other ranks and traces may still read when their owner is gone. Any thread. Meant for
// names of units and operations, of which there are few; never for text made anew each step.
#pragma once

#include <string_view>

namespace fsdp {

[[nodiscard]] const char* intern(std::string_view text);

}  // namespace fsdp
