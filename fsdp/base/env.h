// The one reader of the environment. Every variable the library looks at is read through here.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace fsdp::env {

// Empty when the variable is unset or empty.
std::optional<std::string> text(const char* name);

// Throws UsageError naming the variable when its text is not a whole number.
std::optional<std::int64_t> integer(const char* name);

}  // namespace fsdp::env
