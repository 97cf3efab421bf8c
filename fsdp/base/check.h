// Checks that stay in release builds. Include from source files only: it brings in fmt.
#pragma once

#include <fmt/format.h>

#include <utility>

#include "fsdp/base/error.h"

namespace fsdp::detail {

template <typename E, typename... Args>
[[noreturn, gnu::cold, gnu::noinline]] void fail(fmt::format_string<Args...> format, Args&&... args) {
  throw E(fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace fsdp::detail

// FSDP_CHECK(condition, ErrorType, "message {}", value): the message is only built when the condition is false.
#define FSDP_CHECK(condition, Type, ...)       \
  do {                                         \
    if (!(condition)) [[unlikely]]             \
      ::fsdp::detail::fail<Type>(__VA_ARGS__); \
  } while (false)

// For what only a defect of the library can break.
#define FSDP_INVARIANT(condition)                                                                            \
  FSDP_CHECK(condition, ::fsdp::InternalError, "internal error: {} does not hold ({}:{}); please report it", \
             #condition, __FILE__, __LINE__)
