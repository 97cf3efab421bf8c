#include "fsdp/base/env.h"

#include <charconv>
#include <cstdlib>

#include "fsdp/base/check.h"

namespace fsdp::env {

std::optional<std::string> text(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return std::string(value);
}

std::optional<std::int64_t> integer(const char* name) {
  auto value = text(name);
  if (!value) return std::nullopt;
  std::int64_t number = 0;
  auto [end, error] = std::from_chars(value->data(), value->data() + value->size(), number);
  FSDP_CHECK(error == std::errc() && end == value->data() + value->size(), UsageError,
             "environment variable {} is \"{}\", expected a whole number", name, *value);
  return number;
}

}  // namespace fsdp::env
