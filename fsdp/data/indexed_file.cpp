#include "fsdp/data/indexed_file.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "fsdp/base/check.h"
#include "fsdp/data/indexed_format.h"

namespace fsdp::data {

IndexedFile::IndexedFile(const std::filesystem::path& path)
    : idx_(indexed_paths(path).idx), bin_(indexed_paths(path).bin) {
  check_header();
  check_sequences();
  check_documents();
  check_bin();
}

std::int64_t IndexedFile::document_start(std::int64_t document) const {
  FSDP_CHECK(document >= 0 && document <= document_count_, UsageError, "{}: document {} of {}", idx_.path().string(),
             document, document_count_);
  const auto sequence = at<std::int64_t>(documents_ + 8 * document);
  return sequence == sequence_count_ ? token_count_ : at<std::int64_t>(pointers_ + 8 * sequence) / width(dtype_);
}

void IndexedFile::read(std::int64_t first, std::span<std::int64_t> out) const {
  const auto count = static_cast<std::int64_t>(out.size());
  FSDP_CHECK(first >= 0 && count <= token_count_ && first <= token_count_ - count, UsageError,
             "{}: {} tokens from {} on were asked for, and it has {}", bin_.path().string(), count, first,
             token_count_);
  widen(dtype_, bin_.bytes().data() + first * width(dtype_), out);
}

void IndexedFile::check_header() {
  const auto bytes = idx_.bytes();
  const auto size = static_cast<std::int64_t>(bytes.size());
  const auto shown = std::min(bytes.size(), kIndexMagic.size());
  if (std::memcmp(bytes.data(), kIndexMagic.data(), shown) != 0) {
    refuse(0, "expected the magic \"MMIDIDX\" of an index; this is another kind of file, or one of an older format");
  }
  if (size < kIndexHeader) refuse(size, fmt::format("expected a header of {} bytes, the file ends", kIndexHeader));
  const auto version = at<std::uint64_t>(kVersionOffset);
  if (version != kIndexVersion) {
    refuse(kVersionOffset, fmt::format("expected version {}, got {}", kIndexVersion, version));
  }
  const auto code = at<std::uint8_t>(kDtypeOffset);
  const auto dtype = dtype_from_code(code);
  if (!dtype) {
    refuse(kDtypeOffset, fmt::format("expected tokens of type {}, got {}", kTokenDtypes, describe_code(code)));
  }
  dtype_ = *dtype;

  // The counts, against what is there: neither may make an offset that overflows.
  const auto sequences = at<std::uint64_t>(kSequencesOffset), entries = at<std::uint64_t>(kDocumentsOffset);
  const auto body = static_cast<std::uint64_t>(size - kIndexHeader);
  if (sequences == 0) refuse(kSequencesOffset, "expected at least one sequence, got 0");
  if (sequences > body / 12) {
    refuse(kSequencesOffset,
           fmt::format("expected at most {} sequences in a file of {} bytes, got {}: it is cut short, or "
                       "this count is damaged; copy it again",
                       body / 12, size, sequences));
  }
  const auto rest = body - sequences * 12;
  if (entries == 0) refuse(kDocumentsOffset, "expected at least two entries of the document index, got 0");
  if (entries > rest / 8) {
    refuse(kDocumentsOffset,
           fmt::format("expected at most {} entries of the document index beside {} sequences in a file "
                       "of {} bytes, got {}: it is cut short, or a count is damaged; copy it again",
                       rest / 8, sequences, size, entries));
  }
  const auto end = static_cast<std::int64_t>(kIndexHeader + sequences * 12 + entries * 8);
  if (rest - entries * 8 == sequences) {
    refuse(end, fmt::format("{} bytes of sequence modes follow: this is a multimodal index, and only text is read",
                            sequences));
  }
  if (end != size) refuse(end, fmt::format("expected the end of the file, but {} more bytes follow", size - end));
  sequence_count_ = static_cast<std::int64_t>(sequences);
  document_count_ = static_cast<std::int64_t>(entries) - 1;
  pointers_ = kIndexHeader + 4 * sequence_count_;
  documents_ = pointers_ + 8 * sequence_count_;
}

void IndexedFile::check_sequences() {
  const std::byte* sizes = idx_.bytes().data() + kIndexHeader;
  const std::byte* pointers = idx_.bytes().data() + pointers_;
  const auto token_width = static_cast<std::uint64_t>(width(dtype_));
  std::uint64_t expected = 0;  // byte offset in the .bin; wraps in no file that passes check_bin()
  for (std::int64_t i = 0; i < sequence_count_; ++i) {
    std::int32_t size;
    std::uint64_t pointer;
    std::memcpy(&size, sizes + 4 * i, 4);
    std::memcpy(&pointer, pointers + 8 * i, 8);
    if (size < 0) [[unlikely]] {
      refuse(kIndexHeader + 4 * i, fmt::format("sequence {} has {} tokens, expected 0 or more", i, size));
    }
    if (pointer != expected) [[unlikely]] {
      refuse(pointers_ + 8 * i, fmt::format("sequence {} begins at byte {} of the .bin, expected {}, where the one "
                                            "before it ends; only sequences without gaps are read",
                                            i, static_cast<std::int64_t>(pointer), expected));
    }
    expected += static_cast<std::uint64_t>(size) * token_width;
  }
  token_count_ = static_cast<std::int64_t>(expected / token_width);
}

void IndexedFile::check_documents() const {
  std::int64_t before = at<std::int64_t>(documents_);
  if (before != 0) refuse(documents_, fmt::format("the first document begins at sequence {}, expected 0", before));
  for (std::int64_t d = 1; d <= document_count_; ++d) {
    const auto entry = at<std::int64_t>(documents_ + 8 * d);
    if (entry < before || entry > sequence_count_) [[unlikely]] {
      refuse(documents_ + 8 * d,
             fmt::format("document {} ends at sequence {}, expected {} to {}", d - 1, entry, before, sequence_count_));
    }
    before = entry;
  }
  if (before != sequence_count_) {
    refuse(documents_ + 8 * document_count_,
           fmt::format("the last document ends at sequence {}, expected all {}", before, sequence_count_));
  }
}

void IndexedFile::check_bin() const {
  const auto size = static_cast<std::int64_t>(bin_.bytes().size());
  const auto expected = token_count_ * width(dtype_);
  FSDP_CHECK(size >= expected, UsageError,
             "{}: at byte {}: the file ends, expected {} bytes ({} tokens of {}, as {} says): it is cut short; copy it "
             "again",
             bin_.path().string(), size, expected, token_count_, to_string(dtype_), idx_.path().string());
  FSDP_CHECK(size == expected, UsageError,
             "{}: at byte {}: expected the end of the file ({} tokens of {}, as {} says), but {} more bytes follow: do "
             "the two files belong together?",
             bin_.path().string(), expected, token_count_, to_string(dtype_), idx_.path().string(), size - expected);
}

void IndexedFile::refuse(std::int64_t offset, const std::string& what) const {
  detail::fail<UsageError>("{}: at byte {}: {}", idx_.path().string(), offset, what);
}

template <typename T>
T IndexedFile::at(std::int64_t offset) const {
  T value;
  std::memcpy(&value, idx_.bytes().data() + offset, sizeof(T));
  return value;
}

}  // namespace fsdp::data
