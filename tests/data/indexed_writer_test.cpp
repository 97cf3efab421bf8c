#include "fsdp/data/indexed_writer.h"

#include <gmock/gmock.h>
#include <sys/resource.h>

#include <csignal>
#include <limits>

#include "fsdp/data/indexed_file.h"
#include "tests/data/indexed_pair.h"
#include "tests/data/temporary_folder.h"

namespace fsdp::testing {
namespace {

using data::IndexedFile;
using data::IndexedWriter;
using data::TokenDtype;
using ::testing::HasSubstr;
using Tokens = std::vector<std::int64_t>;

using IndexedWriterTest = TemporaryFolder;

Tokens read_all(const IndexedFile& file) {
  Tokens tokens(static_cast<std::size_t>(file.token_count()));
  file.read(0, tokens);
  return tokens;
}

TEST_F(IndexedWriterTest, WritesTheBytesThatMegatronReads) {
  IndexedWriter writer(path("a"), {.vocabulary = 65536});
  writer.append_document(Tokens{1, 2, 3});
  writer.append(Tokens{500});
  writer.end_document();
  writer.append_document(Tokens{65535, 7});
  writer.finish();
  EXPECT_EQ(read("a.bin"), kGoldenBin);
  auto idx = kGoldenIdx;  // here each sequence is a document
  idx[26] = 4;
  idx.insert(78, "\x01\x00\x00\x00\x00\x00\x00\x00"s);
  EXPECT_EQ(read("a.idx"), idx);
  EXPECT_EQ(file_count(), 2u);  // no .part
}

TEST_F(IndexedWriterTest, EveryTypeComesBack) {
  for (const auto dtype :
       {TokenDtype::uint8, TokenDtype::uint16, TokenDtype::int16, TokenDtype::int32, TokenDtype::int64}) {
    const auto largest = data::largest_token(dtype);
    IndexedWriter writer(path("a"), {.dtype = dtype, .overwrite = true});
    writer.append_document(Tokens{0, largest, 1});
    writer.append_document({});
    writer.append_document(Tokens{largest - 1});
    writer.finish();
    const IndexedFile file(path("a"));
    EXPECT_EQ(file.dtype(), dtype);
    EXPECT_EQ(read_all(file), (Tokens{0, largest, 1, largest - 1}));
    ASSERT_EQ(file.document_count(), 3);
    EXPECT_EQ(file.document_start(1), 3);
    EXPECT_EQ(file.document_start(2), 3);
    EXPECT_EQ(std::filesystem::file_size(path("a.bin")), static_cast<std::uintmax_t>(4 * data::width(dtype)));
  }
}

TEST_F(IndexedWriterTest, TheTypeFollowsFromTheVocabulary) {
  const std::vector<std::pair<std::int64_t, TokenDtype>> expected = {{1, TokenDtype::uint8},
                                                                     {256, TokenDtype::uint8},
                                                                     {257, TokenDtype::uint16},
                                                                     {65536, TokenDtype::uint16},
                                                                     {65537, TokenDtype::int32},
                                                                     {std::int64_t{1} << 31, TokenDtype::int32},
                                                                     {(std::int64_t{1} << 31) + 1, TokenDtype::int64}};
  for (const auto& [vocabulary, dtype] : expected)
    EXPECT_EQ(data::dtype_for_vocabulary(vocabulary), dtype) << vocabulary;
}

TEST_F(IndexedWriterTest, LongDocumentsAreSeveralSequences) {
  IndexedWriter writer(path("a"), {.vocabulary = 256, .longest_sequence = 4});
  Tokens all;
  for (const std::int64_t length : {3, 4, 5, 0, 9, 1}) {
    Tokens document;
    for (std::int64_t i = 0; i < length; ++i) document.push_back(static_cast<std::int64_t>(all.size()) + i);
    all.insert(all.end(), document.begin(), document.end());
    writer.append_document(document);
  }
  writer.finish();
  const IndexedFile file(path("a"));
  EXPECT_EQ(read_all(file), all);
  EXPECT_EQ(file.sequence_count(), 1 + 1 + 2 + 1 + 3 + 1);
  std::vector<std::int64_t> starts;
  for (std::int64_t d = 0; d <= file.document_count(); ++d) starts.push_back(file.document_start(d));
  EXPECT_EQ(starts, (std::vector<std::int64_t>{0, 3, 7, 12, 12, 21, 22}));
}

TEST_F(IndexedWriterTest, ManyDocumentsComeBack) {  // more than one chunk of each table, and of the buffers
  constexpr std::int64_t kDocuments = 200'000;
  IndexedWriter writer(path("a"), {.vocabulary = 65537});
  std::int64_t next = 0;
  for (std::int64_t d = 0; d < kDocuments; ++d) {
    Tokens document;
    for (std::int64_t i = 0; i < d % 5; ++i) document.push_back(next++ % 65537);
    writer.append_document(document);
  }
  writer.finish();
  const IndexedFile file(path("a"));
  ASSERT_EQ(file.document_count(), kDocuments);
  ASSERT_EQ(file.token_count(), next);
  const auto tokens = read_all(file);
  for (std::int64_t i = 0; i < next; ++i) ASSERT_EQ(tokens[static_cast<std::size_t>(i)], i % 65537);
  for (std::int64_t d = 0; d < kDocuments; ++d) ASSERT_EQ(file.document_start(d + 1) - file.document_start(d), d % 5);
}

TEST_F(IndexedWriterTest, TokensThatDoNotFitAreNamed) {
  IndexedWriter writer(path("a"), {.vocabulary = 300});
  writer.append_document(Tokens{1, 2});
  writer.append(Tokens{1, 2, 3});
  EXPECT_THAT(refusal([&] {
                writer.append(Tokens{5, 300});
              }),
              HasSubstr("a.bin: document 1, position 4: token 300 is beyond the vocabulary of 300"));
  EXPECT_THAT(refusal([&] { writer.append(Tokens{-1}); }),
              HasSubstr("document 1, position 3: token -1 is beyond the vocabulary"));
  writer.end_document();
  writer.finish();
  EXPECT_EQ(read_all(IndexedFile(path("a"))), (Tokens{1, 2, 1, 2, 3}));  // what was refused left nothing

  IndexedWriter narrow(path("b"), {.dtype = TokenDtype::int16});
  EXPECT_THAT(refusal([&] {
                narrow.append(Tokens{32767, 32768});
              }),
              HasSubstr("document 0, position 1: token 32768 does not fit int16, which holds 0 to 32767"));
  IndexedWriter both(path("c"), {.vocabulary = 1000, .dtype = TokenDtype::uint8});
  EXPECT_THAT(refusal([&] { both.append(Tokens{256}); }), HasSubstr("token 256 does not fit uint8"));
}

TEST_F(IndexedWriterTest, NothingAppearsBeforeFinish) {
  {
    IndexedWriter writer(path("a"), {.vocabulary = 256});
    writer.append_document(Tokens(100, 7));
    EXPECT_FALSE(std::filesystem::exists(path("a.bin")));
    EXPECT_FALSE(std::filesystem::exists(path("a.idx")));
    EXPECT_TRUE(std::filesystem::exists(path("a.bin.part")));
    EXPECT_THAT(refusal([&] { IndexedWriter second(path("a"), {.vocabulary = 256}); }),
                HasSubstr("a.idx.part is being written by another process"));
    EXPECT_TRUE(std::filesystem::exists(path("a.idx.part")));
  }
  EXPECT_EQ(file_count(), 0u);
}

TEST_F(IndexedWriterTest, OldFilesStayUnlessOverwritten) {
  for (const auto* old : {"a.idx", "a.bin"}) {
    write(old, "old");
    EXPECT_THAT(refusal([&] { IndexedWriter writer(path("a"), {.vocabulary = 256}); }),
                HasSubstr(std::string(old) + " exists: choose another name, or give --overwrite"));
    EXPECT_EQ(read(old), "old");
    EXPECT_EQ(file_count(), 1u);
    {
      IndexedWriter abandoned(path("a"), {.vocabulary = 256, .overwrite = true});
      abandoned.append_document(Tokens{1});
    }
    EXPECT_EQ(read(old), "old");
    std::filesystem::remove(path(old));
  }
  write("a.idx", "old");
  write("a.bin", "old");
  IndexedWriter writer(path("a.idx"), {.vocabulary = 256, .overwrite = true});
  writer.append_document(Tokens{1, 2});
  writer.finish();
  EXPECT_EQ(read("a.bin"), "\x01\x02");
  EXPECT_EQ(IndexedFile(path("a")).token_count(), 2);
}

TEST_F(IndexedWriterTest, WhatCannotBeWrittenIsNamed) {
  EXPECT_THAT(refusal([&] { IndexedWriter writer(path("a"), {}); }), HasSubstr("neither the vocabulary nor the type"));
  EXPECT_THAT(refusal([&] { IndexedWriter writer(path("a"), {.vocabulary = -1}); }), HasSubstr("a vocabulary of -1"));
  EXPECT_THAT(refusal([&] { IndexedWriter writer(path("no/a"), {.vocabulary = 9}); }),
              HasSubstr("no/a.idx.part cannot be written: No such file"));
  EXPECT_THAT(refusal([&] { IndexedWriter writer(path("no") + "/", {.vocabulary = 9}); }), HasSubstr("names no file"));
  std::filesystem::create_directory(path("b.bin"));
  EXPECT_THAT(refusal([&] { IndexedWriter writer(path("b"), {.vocabulary = 9, .overwrite = true}); }),
              HasSubstr("b.bin exists and is not a regular file"));
  IndexedWriter writer(path("a"), {.vocabulary = 9});
  EXPECT_THAT(refusal([&] { writer.finish(); }), HasSubstr("a.bin: there are no tokens to write"));
  writer.append(Tokens{1});
  EXPECT_THAT(refusal([&] { writer.finish(); }), HasSubstr("a.bin: the last document was not ended"));
}

TEST_F(IndexedWriterTest, AFullDiskIsAnErrorAndLeavesNothing) {
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, SIG_IGN);  // the write fails instead
  const rlimit small{1 << 20, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  std::string message = "no error";
  try {
    IndexedWriter writer(path("a"), {.vocabulary = 256});
    for (int i = 0; i < 40; ++i) writer.append_document(Tokens(40'000, 1));
    writer.finish();
  } catch (const UsageError&) {
    message = "not the caller's fault";
  } catch (const Error& error) {
    message = error.what();
  }
  setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_THAT(message, HasSubstr("a.bin.part failed: File too large"));
  EXPECT_EQ(file_count(), 0u);
}

}  // namespace
}  // namespace fsdp::testing
