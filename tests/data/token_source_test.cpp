#include "fsdp/data/token_source.h"

#include <gmock/gmock.h>

#include "fsdp/data/indexed_writer.h"
#include "tests/data/indexed_pair.h"
#include "tests/data/temporary_folder.h"

namespace fsdp::testing {
namespace {

using data::IndexedWriter;
using data::TokenDtype;
using data::TokenSource;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Tokens = std::vector<std::int64_t>;

using TokenSourceTest = TemporaryFolder;

Tokens read_all(const TokenSource& source) {
  Tokens tokens(static_cast<std::size_t>(source.token_count()));
  source.read(0, tokens);
  return tokens;
}

TEST_F(TokenSourceTest, APairOrAPlainFileIsChosenByTheName) {
  write("a.idx", kGoldenIdx);
  write("a.bin", kGoldenBin);
  for (const auto* name : {"a", "a.idx", "a.bin"}) {
    const TokenSource source(path(name));
    EXPECT_TRUE(source.is_indexed()) << name;
    EXPECT_EQ(source.name(), path(name));
    EXPECT_EQ(source.token_count(), 6);
  }
  const TokenSource plain(write("text", "ab\xff"));
  EXPECT_FALSE(plain.is_indexed());
  EXPECT_THAT(read_all(plain), ElementsAre('a', 'b', 255));
  EXPECT_EQ(plain.document_count(), 1);
  EXPECT_EQ(plain.document_start(0), 0);
  EXPECT_EQ(plain.document_start(1), 3);
}

TEST_F(TokenSourceTest, FilesThatCannotServeAreNamed) {
  EXPECT_THAT(refusal([&] { TokenSource source(path("none")); }), HasSubstr("none does not exist"));
  EXPECT_THAT(refusal([&] { TokenSource source(path("none.bin")); }), HasSubstr("none.idx does not exist"));
  EXPECT_THAT(refusal([&] { TokenSource source(write("half.bin", "x")); }),
              HasSubstr("half.bin is only half of a pair without it"));
  EXPECT_THAT(refusal([&] { TokenSource source(write("empty", "")); }), HasSubstr("empty is empty"));
  EXPECT_THAT(refusal([&] { TokenSource source(folder_); }), HasSubstr("is a folder"));
  EXPECT_THAT(refusal([&] { TokenSource source(write("text", "x"), 0); }), HasSubstr("a vocabulary of 0"));
}

TEST_F(TokenSourceTest, DocumentsAreFoundByToken) {
  IndexedWriter writer(path("a"), {.vocabulary = 256});
  for (const std::size_t length : {3, 0, 0, 4, 1, 0}) writer.append_document(Tokens(length, 1));  // starts 0 3 3 3 7 8
  writer.finish();
  const TokenSource source(path("a"));
  const std::vector<std::int64_t> expected = {0, 1, 1, 1, 4, 4, 4, 4, 5, 6};
  for (std::size_t token = 0; token < expected.size(); ++token)
    EXPECT_EQ(source.document_from(static_cast<std::int64_t>(token)), expected[token]) << token;
}

TEST_F(TokenSourceTest, TokensBeyondTheVocabularyAreNamed) {
  write("a.idx", kGoldenIdx);
  write("a.bin", kGoldenBin);
  EXPECT_THAT(read_all(TokenSource(path("a"), 65536)), ElementsAre(1, 2, 3, 500, 65535, 7));
  EXPECT_THAT(refusal([&] { read_all(TokenSource(path("a"), 65535)); }),
              HasSubstr("a.bin: token 65535 at position 4 (byte offset 8) is beyond the vocabulary of 65535"));
  const TokenSource small(path("a"), 500);
  EXPECT_THAT(refusal([&] { read_all(small); }),
              HasSubstr("a.bin: token 500 at position 3 (byte offset 6) is beyond the vocabulary of 500"));
  Tokens two(2);
  small.read(1, two);  // others can be read
  EXPECT_THAT(two, ElementsAre(2, 3));
  EXPECT_THAT(refusal([&] { small.read(2, two); }), HasSubstr("position 3"));
  EXPECT_THAT(refusal([&] { read_all(TokenSource(write("text", "ab"), 98)); }),
              HasSubstr("text: token 98 at position 1 (byte offset 1) is beyond the vocabulary of 98"));
}

TEST_F(TokenSourceTest, EveryTypeIsCheckedAtEveryPosition) {
  for (const auto dtype :
       {TokenDtype::uint8, TokenDtype::uint16, TokenDtype::int16, TokenDtype::int32, TokenDtype::int64}) {
    constexpr std::size_t kTokens = 37;  // no multiple of what the processor takes at once
    for (const std::size_t bad : {0, 1, 15, 16, 31, 32, 36}) {
      IndexedWriter writer(path("a"), {.dtype = dtype, .overwrite = true});
      Tokens tokens(kTokens, 99);
      tokens[bad] = 100;
      writer.append_document(tokens);
      writer.finish();
      EXPECT_EQ(read_all(TokenSource(path("a"), 101)), tokens);
      EXPECT_THAT(refusal([&] { read_all(TokenSource(path("a"), 100)); }),
                  HasSubstr("token 100 at position " + std::to_string(bad) + " "));
    }
  }
}

TEST_F(TokenSourceTest, NegativeTokensAreRefused) {
  auto idx = kGoldenIdx;
  idx[17] = 3;  // int16: 65535 reads as -1
  write("a.idx", idx);
  write("a.bin", kGoldenBin);
  EXPECT_THAT(refusal([&] { read_all(TokenSource(path("a"), 1000)); }),
              HasSubstr("a.bin: token -1 at position 4 (byte offset 8) is beyond the vocabulary of 1000"));
  EXPECT_THAT(refusal([&] { read_all(TokenSource(path("a"))); }), HasSubstr("token -1 at position 4 (byte offset 8) is "
                                                                            "negative"));
}

}  // namespace
}  // namespace fsdp::testing
