// `fsdp info`: what this build is made of and what it can run on here.
#pragma once

#include <string>

namespace fsdp::app {

[[nodiscard]] std::string info();

}  // namespace fsdp::app
