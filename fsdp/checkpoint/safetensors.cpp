#include "fsdp/checkpoint/safetensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>

#include "fsdp/base/check.h"

namespace fsdp::checkpoint {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

constexpr std::int64_t kLengthBytes = 8, kAlignment = 8;
constexpr std::int64_t kLongestHeader = 100'000'000;  // bytes; the format's own limit

constexpr std::array<std::pair<std::string_view, std::int64_t>, 12> kDtypes{{{"F64", 8},
                                                                             {"F32", 4},
                                                                             {"F16", 2},
                                                                             {"BF16", 2},
                                                                             {"I64", 8},
                                                                             {"I32", 4},
                                                                             {"I16", 2},
                                                                             {"I8", 1},
                                                                             {"U8", 1},
                                                                             {"BOOL", 1},
                                                                             {"F8_E4M3", 1},
                                                                             {"F8_E5M2", 1}}};

SafetensorsEntry entry_of(const std::string& name, const nlohmann::json& value, std::int64_t data,
                          const std::filesystem::path& path) {
  SafetensorsEntry entry;
  std::int64_t end = 0;
  try {
    entry.name = name;
    entry.dtype = value.at("dtype").get<std::string>();
    entry.sizes = value.at("shape").get<std::vector<std::int64_t>>();
    const auto& offsets = value.at("data_offsets");
    entry.begin = data + offsets.at(0).get<std::int64_t>();
    end = data + offsets.at(1).get<std::int64_t>();
  } catch (const nlohmann::json::exception& error) {
    detail::fail<UsageError>("{}: the header's entry \"{}\" is not one of safetensors: {}", path.string(), name,
                             error.what());
  }
  const std::int64_t width = element_bytes(entry.dtype);
  FSDP_CHECK(width > 0, UsageError, "{}: tensor \"{}\" has the unknown dtype \"{}\"", path.string(), name, entry.dtype);
  std::int64_t expected = width;
  for (const auto size : entry.sizes) {
    FSDP_CHECK(size >= 0 && !__builtin_mul_overflow(expected, size, &expected), UsageError,
               "{}: tensor \"{}\" has an impossible size of {}", path.string(), name, size);
  }
  entry.bytes = end - entry.begin;
  FSDP_CHECK(entry.begin >= data && entry.bytes == expected, UsageError,
             "{}: tensor \"{}\" has {} bytes in the file, its sizes and dtype {} need {}", path.string(), name,
             entry.bytes, entry.dtype, expected);
  return entry;
}

}  // namespace

std::int64_t element_bytes(std::string_view dtype) {
  const auto found = std::find_if(kDtypes.begin(), kDtypes.end(), [&](const auto& d) { return d.first == dtype; });
  return found == kDtypes.end() ? 0 : found->second;
}

SafetensorsHeader read_safetensors_header(const std::filesystem::path& path) {
  std::error_code error;
  const auto size = static_cast<std::int64_t>(std::filesystem::file_size(path, error));
  FSDP_CHECK(!error, UsageError, "{} cannot be read: {}", path.string(), error.message());
  std::ifstream file(path, std::ios::binary);
  std::uint64_t length = 0;
  file.read(reinterpret_cast<char*>(&length), kLengthBytes);
  FSDP_CHECK(file.good() && length > 0 && length <= static_cast<std::uint64_t>(kLongestHeader) &&
                 static_cast<std::int64_t>(length) <= size - kLengthBytes,
             UsageError, "{} is no safetensors file: of its {} bytes, the first 8 say that the header has {}",
             path.string(), size, length);
  std::string text(length, '\0');
  file.read(text.data(), static_cast<std::streamsize>(length));
  FSDP_CHECK(file.good(), UsageError, "{}: reading the header failed", path.string());
  const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  FSDP_CHECK(json.is_object(), UsageError, "{} is no safetensors file: its header is no JSON object", path.string());

  SafetensorsHeader header;
  const std::int64_t data = kLengthBytes + static_cast<std::int64_t>(length);
  for (const auto& [name, value] : json.items()) {
    if (name != "__metadata__") {
      header.entries.push_back(entry_of(name, value, data, path));
      continue;
    }
    for (const auto& [key, item] : value.items()) {
      FSDP_CHECK(item.is_string(), UsageError, "{}: the header's metadata \"{}\" is no text", path.string(), key);
      header.metadata[key] = item.get<std::string>();
    }
  }
  std::stable_sort(header.entries.begin(), header.entries.end(), [](const auto& a, const auto& b) {
    return std::pair(a.begin, a.bytes) < std::pair(b.begin, b.bytes);
  });
  std::int64_t end = data;
  for (const auto& entry : header.entries) {
    FSDP_CHECK(entry.begin == end, UsageError, "{}: tensor \"{}\" begins at byte {}, expected {}", path.string(),
               entry.name, entry.begin, end);
    end = entry.begin + entry.bytes;
  }
  FSDP_CHECK(end == size, UsageError,
             "{} has {} bytes, its header describes {}: it was cut short, or is not what its header says",
             path.string(), size, end);
  return header;
}

std::string make_safetensors_header(SafetensorsHeader& header) {
  nlohmann::json json = nlohmann::json::object();
  if (!header.metadata.empty()) json["__metadata__"] = header.metadata;
  std::int64_t end = 0;
  for (const auto& entry : header.entries) {
    json[entry.name] = {{"dtype", entry.dtype}, {"shape", entry.sizes}, {"data_offsets", {end, end + entry.bytes}}};
    end += entry.bytes;
  }
  std::string text = json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  text.resize((text.size() + kAlignment - 1) / kAlignment * kAlignment, ' ');
  FSDP_CHECK(static_cast<std::int64_t>(text.size()) <= kLongestHeader, UsageError,
             "{} tensors need a header of {} bytes, a safetensors file has at most {}", header.entries.size(),
             text.size(), kLongestHeader);
  const std::uint64_t length = text.size();
  std::int64_t begin = kLengthBytes + static_cast<std::int64_t>(length);
  for (auto& entry : header.entries) begin = (entry.begin = begin) + entry.bytes;
  std::string bytes(kLengthBytes, '\0');
  std::memcpy(bytes.data(), &length, kLengthBytes);
  return bytes + text;
}

}  // namespace fsdp::checkpoint
