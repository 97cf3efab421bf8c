// The types that a token may have in a file, numbered as in the header of an .idx file, and tokens of each as int64.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace fsdp::data {

enum class TokenDtype : std::uint8_t { uint8 = 1, int16 = 3, int32 = 4, int64 = 5, uint16 = 8 };

inline constexpr const char* kTokenDtypes = "uint8, uint16, int16, int32 or int64";  // for messages

[[nodiscard]] const char* to_string(TokenDtype dtype);
[[nodiscard]] std::int64_t width(TokenDtype dtype);          // bytes
[[nodiscard]] std::int64_t largest_token(TokenDtype dtype);  // the largest id that fits

// What a code of an .idx file names, also of types that hold no tokens: "float32 (code 7)".
[[nodiscard]] std::string describe_code(std::uint8_t code);
// Empty for codes of other types and unknown ones.
[[nodiscard]] std::optional<TokenDtype> dtype_from_code(std::uint8_t code);
// Throws UsageError with the names that there are.
[[nodiscard]] TokenDtype dtype_from_name(std::string_view name);
// The smallest of uint8, uint16, int32 and int64 that holds the ids 0 to vocabulary - 1.
[[nodiscard]] TokenDtype dtype_for_vocabulary(std::int64_t vocabulary);

// Tokens of a file as int64; `from` holds to.size() of them.
void widen(TokenDtype dtype, const std::byte* from, std::span<std::int64_t> to);
// Back, ids must fit.
void narrow(TokenDtype dtype, std::span<const std::int64_t> from, std::byte* to);
// Position of the first of `count` tokens that is negative or >= vocabulary; `count` when there is none.
[[nodiscard]] std::int64_t find_beyond(TokenDtype dtype, const std::byte* tokens, std::int64_t count,
                                       std::int64_t vocabulary);

}  // namespace fsdp::data
