#include "fsdp/data/indexed_writer.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <system_error>

#include "fsdp/base/check.h"
#include "fsdp/data/indexed_format.h"

namespace fsdp::data {
namespace {

constexpr std::int64_t kChunk = 1 << 16;  // entries of a table

template <typename T>
std::span<const std::byte> bytes_of(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

TokenDtype choose_dtype(const IndexedWriterOptions& options) {
  FSDP_CHECK(options.vocabulary >= 0, UsageError, "a vocabulary of {}: expected 1 or more", options.vocabulary);
  FSDP_CHECK(options.vocabulary > 0 || options.dtype, UsageError,
             "neither the vocabulary nor the type of the tokens is known: give one of them");
  return options.dtype ? *options.dtype : dtype_for_vocabulary(options.vocabulary);
}

// The final name of a file that may be written.
std::filesystem::path check_free(const std::filesystem::path& path, bool overwrite) {
  std::error_code ignored;
  const auto status = std::filesystem::status(path, ignored);
  FSDP_CHECK(!std::filesystem::exists(status) || std::filesystem::is_regular_file(status), UsageError,
             "{} exists and is not a regular file", path.string());
  FSDP_CHECK(!std::filesystem::exists(status) || overwrite, UsageError,
             "{} exists: choose another name, or give --overwrite", path.string());
  return path;
}

std::filesystem::path check_name(const std::filesystem::path& path) {
  FSDP_CHECK(path.has_filename(), UsageError, "\"{}\" names no file: expected a path such as folder/name",
             path.string());
  return path;
}

}  // namespace

IndexedWriter::IndexedWriter(const std::filesystem::path& path, const IndexedWriterOptions& options)
    : options_(options),
      dtype_(choose_dtype(options)),
      largest_(options.vocabulary > 0 ? std::min(options.vocabulary - 1, largest_token(dtype_))
                                      : largest_token(dtype_)),
      idx_(check_free(indexed_paths(check_name(path)).idx, options.overwrite)),
      bin_(check_free(indexed_paths(path).bin, options.overwrite)) {
  idx_.append(std::array<std::byte, kIndexHeader>{});  // filled in by finish()
}

void IndexedWriter::append(std::span<const std::int64_t> tokens) {
  const auto beyond = std::ranges::find_if(tokens, [&](auto token) { return token < 0 || token > largest_; });
  if (beyond != tokens.end()) [[unlikely]] {
    const auto what = options_.vocabulary > 0 && (*beyond < 0 || *beyond >= options_.vocabulary)
                          ? fmt::format("is beyond the vocabulary of {}", options_.vocabulary)
                          : fmt::format("does not fit {}, which holds 0 to {}", to_string(dtype_), largest_);
    detail::fail<UsageError>("{}: document {}, position {}: token {} {}", bin_.path().string(), documents_,
                             document_tokens_ + (beyond - tokens.begin()), *beyond, what);
  }
  bytes_.resize(tokens.size() * static_cast<std::size_t>(width(dtype_)));
  narrow(dtype_, tokens, bytes_.data());
  bin_.append(bytes_);
  for (auto left = static_cast<std::int64_t>(tokens.size()); left > 0;) {
    if (sequence_tokens_ == options_.longest_sequence) {
      end_sequence();
      continued_.push_back(sequences_);
    }
    const auto count = std::min(left, options_.longest_sequence - sequence_tokens_);
    sequence_tokens_ += count;
    document_tokens_ += count;
    left -= count;
  }
  tokens_ += static_cast<std::int64_t>(tokens.size());
}

void IndexedWriter::end_document() {
  end_sequence();
  document_tokens_ = 0;
  ++documents_;
}

void IndexedWriter::end_sequence() {
  idx_.append(bytes_of(static_cast<std::int32_t>(sequence_tokens_)));
  sequence_tokens_ = 0;
  ++sequences_;
}

void IndexedWriter::finish() {
  FSDP_CHECK(document_tokens_ == 0, UsageError, "{}: the last document was not ended", bin_.path().string());
  FSDP_CHECK(tokens_ > 0, UsageError, "{}: there are no tokens to write", bin_.path().string());
  write_pointers();
  write_documents();
  write_header();
  bin_.close();
  idx_.close();
  std::error_code error;
  std::filesystem::remove(idx_.path(), error);  // an old .idx must never stand beside the new .bin
  bin_.publish();
  try {
    idx_.publish();
  } catch (...) {
    std::filesystem::remove(bin_.path(), error);
    throw;
  }
}

void IndexedWriter::write_pointers() {
  std::vector<std::int32_t> sizes;
  std::vector<std::int64_t> pointers;
  std::int64_t pointer = 0;
  for (std::int64_t first = 0; first < sequences_; first += kChunk) {
    sizes.resize(static_cast<std::size_t>(std::min(kChunk, sequences_ - first)));
    idx_.read(kIndexHeader + 4 * first, std::as_writable_bytes(std::span(sizes)));
    pointers.clear();
    for (const auto size : sizes) {
      pointers.push_back(pointer);
      pointer += size * width(dtype_);
    }
    idx_.append(std::as_bytes(std::span(pointers)));
  }
}

void IndexedWriter::write_documents() {
  auto continued = continued_.begin();
  for (std::int64_t sequence = 0; sequence < sequences_; ++sequence) {
    if (continued != continued_.end() && *continued == sequence) {
      ++continued;
    } else {
      idx_.append(bytes_of(sequence));
    }
  }
  idx_.append(bytes_of(sequences_));
}

void IndexedWriter::write_header() {
  std::array<std::byte, kIndexHeader> header{};
  const auto put = [&](std::int64_t offset, auto value) { std::memcpy(header.data() + offset, &value, sizeof(value)); };
  std::memcpy(header.data(), kIndexMagic.data(), kIndexMagic.size());
  put(kVersionOffset, kIndexVersion);
  put(kDtypeOffset, static_cast<std::uint8_t>(dtype_));
  put(kSequencesOffset, static_cast<std::uint64_t>(sequences_));
  put(kDocumentsOffset, static_cast<std::uint64_t>(documents_ + 1));
  idx_.replace(0, header);
}

}  // namespace fsdp::data
