#include "apps/fsdp/data_sample.h"

#include <algorithm>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/data/token_source.h"

namespace fsdp::app {
namespace {

// Bytes of the UTF-8 character at the front; 0 when there is none that is well formed.
std::size_t utf8_length(std::string_view text) {
  const auto byte = [&](std::size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
  const auto lead = byte(0);
  const std::size_t length = lead < 0x80   ? 1
                             : lead < 0xc2 ? 0
                             : lead < 0xe0 ? 2
                             : lead < 0xf0 ? 3
                             : lead < 0xf5 ? 4
                                           : 0;
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  const bool overlong = (lead == 0xe0 && byte(1) < 0xa0) || (lead == 0xf0 && byte(1) < 0x90);
  const bool surrogate = lead == 0xed && byte(1) >= 0xa0, too_large = lead == 0xf4 && byte(1) >= 0x90;
  return overlong || surrogate || too_large ? 0 : length;
}

struct Stretch {
  std::int64_t first = 0, end = 0;  // tokens
};

Stretch find_stretch(const data::TokenSource& source, const DataSampleOptions& options) {
  if (options.position) {
    FSDP_CHECK(*options.position >= 0 && *options.position < source.token_count(), UsageError,
               "{}: position {}, expected 0 to {}", options.file, *options.position, source.token_count() - 1);
    return {*options.position, source.token_count()};
  }
  const auto document = options.document.value_or(0);
  FSDP_CHECK(document >= 0 && document < source.document_count(), UsageError, "{}: document {}, expected 0 to {}",
             options.file, document, source.document_count() - 1);
  return {source.document_start(document), source.document_start(document + 1)};
}

}  // namespace

std::string printable(std::string_view bytes) {
  std::string text;
  while (!bytes.empty()) {
    const auto length = utf8_length(bytes);
    const auto character = static_cast<unsigned char>(bytes.front());
    const bool control = character < 0x20 || character == 0x7f ||
                         (character == 0xc2 && length == 2 && static_cast<unsigned char>(bytes[1]) < 0xa0);
    if (character == '\n') {
      text += "\\n";
    } else if (character == '\t') {
      text += "\\t";
    } else if (character == '\\') {
      text += "\\\\";
    } else if (length == 0 || control) {
      text += fmt::format("\\x{:02x}", character);
      bytes.remove_prefix(1);
      continue;
    } else {
      text += bytes.substr(0, length);
    }
    bytes.remove_prefix(length);
  }
  return text;
}

std::string data_sample(const DataSampleOptions& options) {
  FSDP_CHECK(!options.document || !options.position, UsageError, "--document and --position: give one of them");
  FSDP_CHECK(options.length >= 1, UsageError, "--length: expected 1 or more, got {}", options.length);
  const data::TokenSource source(options.file);
  const auto [first, end] = find_stretch(source, options);
  std::vector<std::int64_t> tokens(static_cast<std::size_t>(std::min(options.length, end - first)));
  source.read(first, tokens);
  std::string text, bytes;
  for (const auto token : tokens) {
    if (!options.text) {
      text += fmt::format("{}{}", text.empty() ? "" : " ", token);
    } else if (token < 256) {
      bytes += static_cast<char>(token);
    } else {
      text += printable(bytes) + fmt::format("<{}>", token);
      bytes.clear();
    }
  }
  return text + printable(bytes);
}

}  // namespace fsdp::app
