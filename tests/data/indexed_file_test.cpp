#include "fsdp/data/indexed_file.h"

#include <gmock/gmock.h>

#include <random>
#include <vector>

#include "tests/data/indexed_pair.h"
#include "tests/data/temporary_folder.h"

namespace fsdp::testing {
namespace {

using data::IndexedFile;
using data::MappedFile;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class IndexedFileTest : public TemporaryFolder {
 protected:
  // What opening refuses with these bytes in place of the golden ones.
  std::string refuse(const std::string& idx, const std::string& bin = kGoldenBin) const {
    write("a.idx", idx);
    write("a.bin", bin);
    return refusal([&] { IndexedFile file(path("a")); });
  }
  // Of the golden .idx with other bytes at `offset`.
  std::string refuse_at(std::size_t offset, const std::string& bytes) const {
    auto idx = kGoldenIdx;
    return refuse(idx.replace(offset, bytes.size(), bytes));
  }
};

TEST_F(IndexedFileTest, ReadsBytesWrittenByHand) {
  write("a.idx", kGoldenIdx);
  write("a.bin", kGoldenBin);
  for (const auto* name : {"a", "a.idx", "a.bin"}) {
    const IndexedFile file(path(name));
    EXPECT_EQ(file.dtype(), data::TokenDtype::uint16);
    EXPECT_EQ(file.token_count(), 6);
    EXPECT_EQ(file.sequence_count(), 3);
    ASSERT_EQ(file.document_count(), 2);
    EXPECT_EQ(file.document_start(0), 0);
    EXPECT_EQ(file.document_start(1), 4);
    EXPECT_EQ(file.document_start(2), 6);
    std::vector<std::int64_t> tokens(6);
    file.read(0, tokens);
    EXPECT_THAT(tokens, ElementsAre(1, 2, 3, 500, 65535, 7));
    tokens.resize(2);
    file.read(3, tokens);
    EXPECT_THAT(tokens, ElementsAre(500, 65535));
    file.read(6, {});
  }
}

TEST_F(IndexedFileTest, ReadsOfTokensThatAreNotThereAreRefused) {
  write("a.idx", kGoldenIdx);
  write("a.bin", kGoldenBin);
  const IndexedFile file(path("a"));
  std::vector<std::int64_t> tokens(3);
  for (const std::int64_t first : {std::int64_t{-1}, std::int64_t{4}, std::numeric_limits<std::int64_t>::max()}) {
    EXPECT_THAT(refusal([&] { file.read(first, tokens); }), HasSubstr("were asked for, and it has 6"));
  }
  EXPECT_THAT(refusal([&] { (void)file.document_start(3); }), HasSubstr("document 3 of 2"));
  EXPECT_THAT(refusal([&] { (void)file.document_start(-1); }), HasSubstr("document -1 of 2"));
}

TEST_F(IndexedFileTest, FilesThatCannotBeReadAreNamed) {
  EXPECT_THAT(refusal([&] { IndexedFile file(path("none")); }), HasSubstr("none.idx does not exist"));
  write("half.idx", kGoldenIdx);
  EXPECT_THAT(refusal([&] { IndexedFile file(path("half")); }), HasSubstr("half.bin does not exist"));
  EXPECT_THAT(refusal([&] { MappedFile file(folder_); }), HasSubstr("is a folder, expected a file"));
  EXPECT_THAT(refusal([&] { MappedFile file("/dev/null"); }), HasSubstr("/dev/null is not a regular file"));
  EXPECT_THAT(refuse(kGoldenIdx, ""), HasSubstr("a.bin is empty"));
  EXPECT_THAT(refuse(""), HasSubstr("a.idx is empty"));
  EXPECT_THAT(refusal([&] { MappedFile file(write("secret", "x") + "/y"); }), HasSubstr("secret/y cannot be read"));
  if (::geteuid() != 0) {  // root may read anything
    std::filesystem::permissions(path("secret"), std::filesystem::perms::none);
    EXPECT_THAT(refusal([&] { MappedFile file(path("secret")); }), HasSubstr("secret cannot be read: Permission"));
  }
}

TEST_F(IndexedFileTest, HeadersThatAreWrongAreRefused) {
  EXPECT_THAT(refuse("plain text, much longer than a header would be"),
              HasSubstr("a.idx: at byte 0: expected the magic"));
  EXPECT_THAT(refuse("short"), HasSubstr("a.idx: at byte 0: expected the magic"));
  EXPECT_THAT(refuse_at(9, "\x02"), HasSubstr("a.idx: at byte 9: expected version 1, got 2"));
  const std::string types = "expected tokens of type uint8, uint16, int16, int32 or int64, got ";
  EXPECT_THAT(refuse_at(17, "\x02"), HasSubstr("a.idx: at byte 17: " + types + "int8 (code 2)"));
  EXPECT_THAT(refuse_at(17, "\x06"), HasSubstr(types + "float64 (code 6)"));
  EXPECT_THAT(refuse_at(17, "\x07"), HasSubstr(types + "float32 (code 7)"));
  EXPECT_THAT(refuse_at(17, "\x09"), HasSubstr(types + "an unknown type (code 9)"));
  EXPECT_THAT(refuse_at(18, "\x00"s), HasSubstr("a.idx: at byte 18: expected at least one sequence, got 0"));
  EXPECT_THAT(refuse_at(18, "\x06"),
              HasSubstr("at byte 18: expected at most 5 sequences in a file of 94 bytes, got 6"));
  EXPECT_THAT(refuse_at(18, "\xff\xff\xff\xff\xff\xff\xff\xff"), HasSubstr("got 18446744073709551615"));
  EXPECT_THAT(refuse_at(18, "\x56\x55\x55\x55\x55\x55\x55\x15"), HasSubstr("expected at most 5"));  // 12 x wraps to 8
  EXPECT_THAT(refuse_at(26, "\x00"s), HasSubstr("a.idx: at byte 26: expected at least two entries"));
  EXPECT_THAT(refuse_at(26, "\x04"), HasSubstr("a.idx: at byte 26: expected at most 3 entries of the document index "
                                               "beside 3 sequences in a file of 94 bytes, got 4"));
  EXPECT_THAT(refuse_at(26, "\x03\x00\x00\x00\x00\x00\x00\x20"s),
              HasSubstr("expected at most 3 entries"));  // 8 x wraps
  EXPECT_THAT(refuse_at(26, "\x02"), HasSubstr("a.idx: at byte 86: expected the end of the file, but 8 more"));
}

TEST_F(IndexedFileTest, TablesThatAreWrongAreRefused) {
  EXPECT_THAT(refuse_at(38, "\xff\xff\xff\xff"), HasSubstr("a.idx: at byte 38: sequence 1 has -1 tokens"));
  EXPECT_THAT(refuse_at(34, "\x04"),
              HasSubstr("a.idx: at byte 54: sequence 1 begins at byte 6 of the .bin, expected 8"));
  EXPECT_THAT(refuse_at(46, "\x02"),
              HasSubstr("a.idx: at byte 46: sequence 0 begins at byte 2 of the .bin, expected 0"));
  EXPECT_THAT(refuse_at(62, "\x0a"),
              HasSubstr("a.idx: at byte 62: sequence 2 begins at byte 10 of the .bin, expected 8"));
  EXPECT_THAT(refuse_at(70, "\x01"),
              HasSubstr("a.idx: at byte 70: the first document begins at sequence 1, expected 0"));
  EXPECT_THAT(refuse_at(78, "\x04"), HasSubstr("a.idx: at byte 78: document 0 ends at sequence 4, expected 0 to 3"));
  EXPECT_THAT(refuse_at(86, "\x01"), HasSubstr("a.idx: at byte 86: document 1 ends at sequence 1, expected 2 to 3"));
  EXPECT_THAT(refuse_at(86, "\x02"),
              HasSubstr("a.idx: at byte 86: the last document ends at sequence 2, expected all 3"));
  EXPECT_THAT(refuse(kGoldenIdx + "\x00\x01\x00"s),
              HasSubstr("a.idx: at byte 94: 3 bytes of sequence modes follow: this "
                        "is a multimodal index"));
  EXPECT_THAT(refuse(kGoldenIdx + "xy"), HasSubstr("a.idx: at byte 94: expected the end of the file, but 2 more"));
}

TEST_F(IndexedFileTest, EmptySequencesAndDocumentsAreLegal) {
  // Sizes 0 3 3, documents [0, 0) [0, 1) [1, 3): the first two are empty.
  const auto idx = kGoldenIdx.substr(0, 26) + "\x04\x00\x00\x00\x00\x00\x00\x00"s +
                   "\x00\x00\x00\x00\x03\x00\x00\x00\x03\x00\x00\x00"s + std::string(16, '\0') + "\x06"s +
                   std::string(7, '\0') + std::string(16, '\0') + "\x01"s + std::string(7, '\0') + "\x03"s +
                   std::string(7, '\0');
  EXPECT_EQ(refuse(idx), "no error");
  const IndexedFile file(path("a"));
  ASSERT_EQ(file.document_count(), 3);
  EXPECT_EQ(file.document_start(1), 0);
  EXPECT_EQ(file.document_start(2), 0);
  EXPECT_EQ(file.document_start(3), 6);
}

TEST_F(IndexedFileTest, ABinOfAnotherLengthIsRefused) {
  for (std::size_t length = 1; length < kGoldenBin.size(); ++length) {
    EXPECT_THAT(refuse(kGoldenIdx, kGoldenBin.substr(0, length)),
                HasSubstr("a.bin: at byte " + std::to_string(length) +
                          ": the file ends, expected 12 bytes (6 tokens of "
                          "uint16"));
  }
  EXPECT_THAT(refuse(kGoldenIdx, kGoldenBin + "\x01"),
              HasSubstr("a.bin: at byte 12: expected the end of the file (6 tokens of uint16"));
}

TEST_F(IndexedFileTest, AnIdxCutShortAnywhereIsRefused) {
  for (std::size_t length = 0; length < kGoldenIdx.size(); ++length) {
    EXPECT_THAT(refuse(kGoldenIdx.substr(0, length)), HasSubstr("a.idx")) << length;
  }
}

TEST_F(IndexedFileTest, EveryFlippedBitIsRefusedButWhereADocumentEnds) {
  for (std::size_t bit = 0; bit < 8 * kGoldenIdx.size(); ++bit) {
    auto idx = kGoldenIdx;
    idx[bit / 8] = static_cast<char>(idx[bit / 8] ^ (1 << bit % 8));
    const auto message = refuse(idx);
    if (bit / 8 == 78 && bit % 8 < 2) {  // document 0 ends at sequence 3 or 0 instead of 2: as good
      EXPECT_EQ(message, "no error") << bit;
    } else {
      EXPECT_THAT(message, HasSubstr("a.")) << "bit " << bit % 8 << " of byte " << bit / 8;
    }
  }
}

// Whatever the bytes: refused, or read without going beyond the files (the sanitizers see to that).
TEST_F(IndexedFileTest, RandomDamageNeverReadsOutside) {
  std::mt19937 random(1);
  int accepted = 0;
  for (int round = 0; round < 2000; ++round) {
    auto idx = kGoldenIdx;
    for (unsigned change = random() % 4 + 1; change > 0; --change) {
      const auto at = random() % 3 == 0 ? 17 + random() % 17 : random() % idx.size();
      idx[at] = static_cast<char>(random() % 2 == 0 ? random() : random() % 5);
    }
    if (refuse(idx) != "no error") continue;
    ++accepted;
    const IndexedFile file(path("a"));
    std::vector<std::int64_t> tokens(static_cast<std::size_t>(file.token_count()));
    file.read(0, tokens);
    for (std::int64_t d = 0; d <= file.document_count(); ++d) EXPECT_LE(file.document_start(d), file.token_count());
  }
  EXPECT_LT(accepted, 200);
}

}  // namespace
}  // namespace fsdp::testing
