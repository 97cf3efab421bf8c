#include "fsdp/data/token_dtype.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <type_traits>

#include "fsdp/base/check.h"

namespace fsdp::data {
namespace {

static_assert(std::endian::native == std::endian::little, "files are little endian and are read as they are");

constexpr std::array kAllDtypes = {TokenDtype::uint8, TokenDtype::uint16, TokenDtype::int16, TokenDtype::int32,
                                   TokenDtype::int64};

// Calls function(T()) with the C++ type of `dtype`.
template <typename Function>
auto with_type(TokenDtype dtype, Function&& function) {
  switch (dtype) {
    case TokenDtype::uint8:
      return function(std::uint8_t());
    case TokenDtype::int16:
      return function(std::int16_t());
    case TokenDtype::int32:
      return function(std::int32_t());
    case TokenDtype::int64:
      return function(std::int64_t());
    case TokenDtype::uint16:
      return function(std::uint16_t());
  }
  detail::fail<InternalError>("internal error: token type {}", static_cast<int>(dtype));
}

template <typename T>
T load(const std::byte* tokens, std::int64_t index) {  // unaligned
  T value;
  std::memcpy(&value, tokens + index * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
  return value;
}

}  // namespace

const char* to_string(TokenDtype dtype) {
  switch (dtype) {
    case TokenDtype::uint8:
      return "uint8";
    case TokenDtype::int16:
      return "int16";
    case TokenDtype::int32:
      return "int32";
    case TokenDtype::int64:
      return "int64";
    case TokenDtype::uint16:
      return "uint16";
  }
  return "?";
}

std::int64_t width(TokenDtype dtype) {
  return with_type(dtype, [](auto type) { return static_cast<std::int64_t>(sizeof(type)); });
}

std::int64_t largest_token(TokenDtype dtype) {
  return with_type(dtype,
                   [](auto type) { return static_cast<std::int64_t>(std::numeric_limits<decltype(type)>::max()); });
}

std::string describe_code(std::uint8_t code) {
  constexpr std::array kNames = {"no type", "uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16"};
  return fmt::format("{} (code {})", code < kNames.size() ? kNames[code] : "an unknown type", code);
}

std::optional<TokenDtype> dtype_from_code(std::uint8_t code) {
  for (const auto dtype : kAllDtypes) {
    if (static_cast<std::uint8_t>(dtype) == code) return dtype;
  }
  return std::nullopt;
}

TokenDtype dtype_from_name(std::string_view name) {
  for (const auto dtype : kAllDtypes) {
    if (name == to_string(dtype)) return dtype;
  }
  detail::fail<UsageError>("tokens of type \"{}\": expected {}", name, kTokenDtypes);
}

TokenDtype dtype_for_vocabulary(std::int64_t vocabulary) {
  for (const auto dtype : {TokenDtype::uint8, TokenDtype::uint16, TokenDtype::int32}) {
    if (vocabulary - 1 <= largest_token(dtype)) return dtype;
  }
  return TokenDtype::int64;
}

void widen(TokenDtype dtype, const std::byte* from, std::span<std::int64_t> to) {
  with_type(dtype, [&](auto type) {
    for (std::size_t i = 0; i < to.size(); ++i) to[i] = load<decltype(type)>(from, static_cast<std::int64_t>(i));
  });
}

void narrow(TokenDtype dtype, std::span<const std::int64_t> from, std::byte* to) {
  with_type(dtype, [&](auto type) {
    for (std::size_t i = 0; i < from.size(); ++i) {
      const auto token = static_cast<decltype(type)>(from[i]);
      std::memcpy(to + i * sizeof(token), &token, sizeof(token));
    }
  });
}

std::int64_t find_beyond(TokenDtype dtype, const std::byte* tokens, std::int64_t count, std::int64_t vocabulary) {
  return with_type(dtype, [&](auto type) {
    using T = decltype(type);
    if (std::is_unsigned_v<T> && largest_token(dtype) < vocabulary) return count;
    // All of them first, without a branch a token: nearly always there is none.
    T smallest = 0, largest = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      const auto token = load<T>(tokens, i);
      if constexpr (std::is_signed_v<T>) smallest = std::min(smallest, token);
      largest = std::max(largest, token);
    }
    if (smallest == 0 && std::int64_t{largest} < vocabulary) return count;
    std::int64_t at = 0;
    for (auto token = load<T>(tokens, at); std::int64_t{token} >= 0 && std::int64_t{token} < vocabulary;)
      token = load<T>(tokens, ++at);
    return at;
  });
}

}  // namespace fsdp::data
