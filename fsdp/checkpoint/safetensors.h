// The header of a .safetensors file: 8 bytes of length, then JSON that gives every tensor its dtype, sizes and place.
//
// Format: https://huggingface.co/docs/safetensors, version 0.x. Tensors are row-major, little-endian, one after the
// other without gaps. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/base/types.h"

namespace fsdp::checkpoint {

struct SafetensorsEntry {
  std::string name;
  std::string dtype;                // "F32", "BF16", ...
  std::vector<std::int64_t> sizes;  // empty: a scalar
  std::int64_t begin = 0;           // byte of the file
  std::int64_t bytes = 0;
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  // in the order of the file
  std::map<std::string, std::string> metadata;
};

// Bytes of an element of a dtype of the format; 0 for one that is unknown.
[[nodiscard]] std::int64_t element_bytes(std::string_view dtype);

// Throws UsageError naming the file, and what of it is no safetensors file: too short, no JSON, sizes that do not give
// the bytes, places outside of the file or over each other.
[[nodiscard]] SafetensorsHeader read_safetensors_header(const std::filesystem::path& path);

// What a file begins with; gives the entries their `begin` in the order they have. `bytes` must be set.
[[nodiscard]] std::string make_safetensors_header(SafetensorsHeader& header);

}  // namespace fsdp::checkpoint
