#include "fsdp/data/token_source.h"

#include <system_error>

#include "fsdp/base/check.h"
#include "fsdp/data/indexed_format.h"

namespace fsdp::data {
namespace {

std::variant<IndexedFile, MappedFile> open(const std::filesystem::path& path) {
  std::error_code ignored;
  const auto pair = indexed_paths(path);
  const bool named = path == pair.idx || path == pair.bin;
  if (std::filesystem::exists(pair.idx, ignored)) return IndexedFile(path);
  FSDP_CHECK(!named || !std::filesystem::exists(pair.bin, ignored), UsageError,
             "{} does not exist, and {} is only half of a pair without it; if that is a plain file, give it another "
             "ending",
             pair.idx.string(), pair.bin.string());
  FSDP_CHECK(!named, UsageError, "{} does not exist", pair.idx.string());
  return MappedFile(path);
}

}  // namespace

TokenSource::TokenSource(const std::filesystem::path& path, std::int64_t vocabulary)
    : name_(path.string()), vocabulary_(vocabulary), file_(open(path)) {
  FSDP_CHECK(vocabulary > 0, UsageError, "a vocabulary of {}: expected 1 or more", vocabulary);
  const auto* indexed = std::get_if<IndexedFile>(&file_);
  dtype_ = indexed != nullptr ? indexed->dtype() : TokenDtype::uint8;
  token_count_ = indexed != nullptr ? indexed->token_count() : static_cast<std::int64_t>(bytes().size());
}

std::int64_t TokenSource::sequence_count() const {
  const auto* indexed = std::get_if<IndexedFile>(&file_);
  return indexed != nullptr ? indexed->sequence_count() : 1;
}

std::int64_t TokenSource::document_count() const {
  const auto* indexed = std::get_if<IndexedFile>(&file_);
  return indexed != nullptr ? indexed->document_count() : 1;
}

std::int64_t TokenSource::document_start(std::int64_t document) const {
  if (const auto* indexed = std::get_if<IndexedFile>(&file_)) return indexed->document_start(document);
  FSDP_CHECK(document == 0 || document == 1, UsageError, "{}: document {} of 1", name_, document);
  return document == 0 ? 0 : token_count_;
}

std::int64_t TokenSource::document_from(std::int64_t token) const {
  std::int64_t begin = 0, end = document_count();
  while (begin < end) {
    const auto middle = begin + (end - begin) / 2;
    if (document_start(middle) < token) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin;
}

void TokenSource::read(std::int64_t first, std::span<std::int64_t> out) const {
  const auto count = static_cast<std::int64_t>(out.size());
  FSDP_CHECK(first >= 0 && count <= token_count_ && first <= token_count_ - count, UsageError,
             "{}: {} tokens from {} on were asked for, and it has {}", name_, count, first, token_count_);
  const auto token_width = width(dtype_);
  const std::byte* tokens = bytes().data() + first * token_width;
  const auto beyond = find_beyond(dtype_, tokens, count, vocabulary_);
  widen(dtype_, tokens, out);
  if (beyond < count) [[unlikely]] {
    const auto token = out[static_cast<std::size_t>(beyond)], position = first + beyond;
    const auto where = fmt::format("{}: token {} at position {} (byte offset {})", path().string(), token, position,
                                   position * token_width);
    FSDP_CHECK(vocabulary_ != kAnyVocabulary, UsageError, "{} is negative: ids begin at 0", where);
    detail::fail<UsageError>("{} is beyond the vocabulary of {}", where, vocabulary_);
  }
}

std::span<const std::byte> TokenSource::bytes() const {
  const auto* indexed = std::get_if<IndexedFile>(&file_);
  return indexed != nullptr ? indexed->tokens() : std::get<MappedFile>(file_).bytes();
}

const std::filesystem::path& TokenSource::path() const {
  const auto* indexed = std::get_if<IndexedFile>(&file_);
  return indexed != nullptr ? indexed->bin_path() : std::get<MappedFile>(file_).path();
}

}  // namespace fsdp::data
