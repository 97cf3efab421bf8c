#include "apps/fsdp/data_command.h"

#include <gmock/gmock.h>

#include <CLI/CLI.hpp>

#include "apps/fsdp/line_reader.h"
#include "fsdp/data/token_source.h"
#include "tests/data/indexed_pair.h"
#include "tests/data/temporary_folder.h"

namespace fsdp::app {
namespace {

using data::TokenSource;
using fsdp::testing::kGoldenBin;
using fsdp::testing::kGoldenIdx;
using fsdp::testing::refusal;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using namespace std::string_literals;

class DataCommandTest : public fsdp::testing::TemporaryFolder {
 protected:
  // The documents that `options` make of these inputs, tokens as characters.
  std::vector<std::string> prepare(const std::vector<std::string>& inputs, DataPrepareOptions options = {}) {
    options.inputs.clear();
    for (std::size_t i = 0; i < inputs.size(); ++i)
      options.inputs.push_back(write("in" + std::to_string(i), inputs[i]));
    options.output = path("out");
    options.overwrite = true;
    report_ = data_prepare(options);
    const TokenSource source(options.output);
    std::vector<std::string> documents;
    for (std::int64_t d = 0; d < source.document_count(); ++d) {
      std::vector<std::int64_t> tokens(
          static_cast<std::size_t>(source.document_start(d + 1) - source.document_start(d)));
      source.read(source.document_start(d), tokens);
      documents.emplace_back(tokens.begin(), tokens.end());
    }
    return documents;
  }
  // The refusal; nothing may be left but the inputs.
  std::string refuse(const std::string& input, DataPrepareOptions options) {
    options.inputs = {write("in", input)};
    options.output = path("refused");
    const auto message = refusal([&] { (void)data_prepare(options); });
    for (const auto* ending : {".bin", ".idx", ".bin.part", ".idx.part"})
      EXPECT_FALSE(std::filesystem::exists(path("refused"s + ending))) << ending;
    return message;
  }

  std::string report_;
};

TEST_F(DataCommandTest, TextIsCutIntoDocuments) {
  const auto text = "one\n\ntwo\nthree \n \t\r\n\n\nfour"s;
  EXPECT_THAT(prepare({text, "five\n"}), ElementsAre(text, "five\n"));
  EXPECT_THAT(prepare({text, "five\n"}, {.document = "line"}),
              ElementsAre("one", "two", "three ", " \t\r", "four", "five"));
  EXPECT_THAT(report_, HasSubstr("6 documents, 23 tokens of uint8, "));
  EXPECT_THAT(report_, HasSubstr("; 3 empty documents were left out"));
  EXPECT_THAT(prepare({text, "five\n"}, {.document = "paragraph"}), ElementsAre("one", "two\nthree ", "four", "five"));
  EXPECT_THAT(prepare({"\n\na\n"}, {.document = "paragraph", .append_token = '#'}), ElementsAre("a#"));
  EXPECT_THAT(prepare({"a\0b\xff\r\nc"s}, {.document = "line", .append_token = 0}),
              ElementsAre("a\0b\xff\r\0"s, "c\0"s));
}

TEST_F(DataCommandTest, StringsOfJsonLinesAreDocuments) {
  EXPECT_THAT(
      prepare({"{\"text\": \"a\\nb\", \"id\": 1}\n\n{\"text\":\"\\u00e9\"}\r\n{\"text\":\"\"}\n{\"text\":\"last\"}"},
              {.format = "jsonl"}),
      ElementsAre("a\nb", "\xc3\xa9", "last"));
  EXPECT_THAT(report_, HasSubstr("; 1 empty documents were left out"));
  EXPECT_THAT(prepare({"{\"body\": \"x\"}"}, {.format = "jsonl", .key = "body"}), ElementsAre("x"));
}

TEST_F(DataCommandTest, ListsOfTokensAreDocuments) {
  EXPECT_THAT(prepare({"[97, 98]\n{\"tokens\": [99]}\n[]\n"}, {.format = "tokens", .vocabulary = 50257}),
              ElementsAre("ab", "c"));
  EXPECT_THAT(report_, HasSubstr("2 documents, 3 tokens of uint16"));
  (void)prepare({"[70000]"}, {.format = "tokens", .dtype = "int64"});
  EXPECT_EQ(data_sample({.file = path("out")}), "70000");
}

TEST_F(DataCommandTest, TheAppendedTokenWidensTheVocabulary) {
  (void)prepare({"ab", "c"}, {.append_token = 256});
  EXPECT_THAT(report_, HasSubstr("2 documents, 5 tokens of uint16"));
  EXPECT_EQ(data_sample({.file = path("out"), .position = 0}), "97 98 256 99 256");
  EXPECT_EQ(data_sample({.file = path("out"), .position = 0, .text = true}), "ab<256>c<256>");
}

TEST_F(DataCommandTest, LongLinesAndManyBlocksComeThrough) {
  std::string text;
  std::vector<std::string> lines;
  for (const std::size_t length : {3'000'000, 1, 1'048'575, 1'048'576, 7}) {
    lines.emplace_back(length, static_cast<char>('a' + lines.size()));
    text += lines.back() + "\n";
  }
  EXPECT_EQ(prepare({text}, {.document = "line"}), lines);
  EXPECT_EQ(prepare({text}), std::vector{text});
  LineReader reader(path("in0"));
  for (const auto& line : lines) EXPECT_EQ(reader.line(), line);
  EXPECT_EQ(reader.line(), std::nullopt);
  EXPECT_EQ(reader.line(), std::nullopt);
  EXPECT_THAT(reader.where(), HasSubstr("in0:5"));
}

TEST_F(DataCommandTest, WrongInputIsNamedWithItsLine) {
  const DataPrepareOptions jsonl{.format = "jsonl"}, tokens{.format = "tokens", .vocabulary = 100};
  EXPECT_THAT(refuse("{\"text\":\"a\"}\n{\"text\":", jsonl), HasSubstr("in:2: this is no JSON: parse error at"));
  EXPECT_THAT(refuse("{\"text\":\"\xff\"}", jsonl), HasSubstr("in:1: this is no JSON: parse error at"));
  EXPECT_THAT(refuse("\n{\"body\":\"a\",\"id\":1}", jsonl),
              HasSubstr("in:2: expected the key \"text\", got only body, id"));
  EXPECT_THAT(refuse("{}", jsonl), HasSubstr("in:1: expected the key \"text\", got an empty object"));
  EXPECT_THAT(refuse("[1]", jsonl), HasSubstr("in:1: expected an object with the key \"text\", got array"));
  EXPECT_THAT(refuse("{\"text\":5}", jsonl), HasSubstr("in:1: expected a string under \"text\", got number"));
  EXPECT_THAT(refuse("[1,2]\n[3,100]", tokens),
              HasSubstr("in:2: " + path("refused.bin") +
                        ": document 1, position 1: token 100 is beyond the vocabulary of 100"));
  EXPECT_THAT(refuse("[-1]", tokens), HasSubstr("token -1 is beyond the vocabulary"));
  EXPECT_THAT(refuse("[1, 2.5]", tokens), HasSubstr("in:1: token 1 of the list is 2.5, expected an integer"));
  EXPECT_THAT(refuse("[18446744073709551615]", tokens), HasSubstr("expected an integer"));
  EXPECT_THAT(refuse("[\"a\"]", tokens), HasSubstr("token 0 of the list is \"a\""));
  EXPECT_THAT(refuse("{\"ids\":[1]}", tokens), HasSubstr("in:1: expected the key \"tokens\", got only ids"));
  EXPECT_THAT(refuse("{\"tokens\":1}", tokens), HasSubstr("in:1: expected a list of tokens, got number"));
  EXPECT_THAT(refuse("7", tokens), HasSubstr("in:1: expected an object with the key \"tokens\", got number"));
  EXPECT_THAT(refuse("", {}), HasSubstr("the input holds no tokens"));
  EXPECT_THAT(refuse("\n\n", {.document = "line"}), HasSubstr("the input holds no tokens"));
  EXPECT_THAT(refuse("\xff", {.vocabulary = 255}), HasSubstr("position 0: token 255 is beyond the vocabulary of 255"));
}

TEST_F(DataCommandTest, WrongOptionsAreNamed) {
  EXPECT_THAT(refuse("a", {.format = "xml"}), HasSubstr("--format: expected one of text, jsonl, tokens, got \"xml\""));
  EXPECT_THAT(refuse("a", {.document = "page"}), HasSubstr("--document: expected one of file, line, paragraph"));
  EXPECT_THAT(refuse("a", {.format = "tokens"}), HasSubstr("--format tokens needs --vocabulary or --dtype"));
  EXPECT_THAT(refuse("a", {.append_token = 300, .vocabulary = 300}), HasSubstr("--append-token: 300 is beyond"));
  EXPECT_THAT(refuse("a", {.append_token = -2}), HasSubstr("--append-token: expected 0 or more"));
  EXPECT_THAT(refuse("a", {.vocabulary = -2}), HasSubstr("--vocabulary: expected 1 or more"));
  EXPECT_THAT(refuse("a", {.dtype = "float32"}),
              HasSubstr("tokens of type \"float32\": expected uint8, uint16, int16, int32 or int64"));
  const auto inputs = [&](const std::vector<std::string>& names) {
    return refusal([&] { (void)data_prepare({.inputs = names, .output = path("refused")}); });
  };
  EXPECT_THAT(inputs({}), HasSubstr("--input: expected at least one file"));
  EXPECT_THAT(inputs({path("none")}), HasSubstr("none does not exist"));
  EXPECT_THAT(inputs({path("")}), HasSubstr("is a folder, expected a file"));
  EXPECT_THAT(inputs({"-", "-"}), HasSubstr("standard input can be read only once"));
  EXPECT_THAT(refusal([&] { (void)data_prepare({.inputs = {path("in")}}); }), HasSubstr("--output: expected a prefix"));
}

TEST_F(DataCommandTest, OldOutputStays) {
  const DataPrepareOptions options{.inputs = {write("in", "abc")}, .output = path("new/folder/out")};
  EXPECT_THAT(data_prepare(options), HasSubstr("1 documents, 3 tokens of uint8"));
  write("in", "xyz");
  EXPECT_THAT(refusal([&] { (void)data_prepare(options); }),
              HasSubstr("out.idx exists: choose another name, or give --overwrite"));
  EXPECT_EQ(read("new/folder/out.bin"), "abc");
}

TEST_F(DataCommandTest, InspectTellsWhatIsThere) {
  write("a.idx", kGoldenIdx);
  write("a.bin", kGoldenBin);
  const auto text = write("text", "abca");
  EXPECT_EQ(data_inspect({.files = {path("a")}}), path("a") +
                                                      ": indexed pair of uint16\n"
                                                      "  tokens     6\n"
                                                      "  documents  2, shortest 2, mean 3.0, longest 4 tokens\n"
                                                      "  sequences  3\n"
                                                      "  token ids  6 distinct, the largest is 65535");
  EXPECT_EQ(data_inspect({.files = {path("a"), text}, .json = true}),
            "{\"file\":\"" + path("a") +
                "\",\"kind\":\"indexed\",\"dtype\":\"uint16\",\"documents\":2,\"sequences\":3,\"tokens\":6,"
                "\"shortest_document\":2,\"mean_document\":3.0,\"longest_document\":4,\"largest_token\":65535,"
                "\"distinct_tokens\":6}\n{\"file\":\"" +
                text +
                "\",\"kind\":\"bytes\",\"dtype\":\"uint8\",\"documents\":1,\"sequences\":1,\"tokens\":4,"
                "\"shortest_document\":4,\"mean_document\":4.0,\"longest_document\":4,\"largest_token\":99,"
                "\"distinct_tokens\":3}");
}

TEST_F(DataCommandTest, InspectCountsIdsOfAnySize) {
  (void)prepare({"[0, 5, 268435455, 268435456, 4611686018427387904, 5, 268435456]"},
                {.format = "tokens", .dtype = "int64"});
  EXPECT_THAT(data_inspect({.files = {path("out")}}), HasSubstr("5 distinct, the largest is 4611686018427387904"));
}

TEST_F(DataCommandTest, InspectRefusesDamage) {
  write("a.idx", kGoldenIdx);
  write("a.bin", kGoldenBin + "x");
  EXPECT_THAT(refusal([&] { (void)data_inspect({.files = {path("a")}}); }), HasSubstr("a.bin: at byte 12"));
  auto idx = kGoldenIdx;
  idx[17] = 3;  // int16
  write("a.idx", idx);
  write("a.bin", kGoldenBin);
  EXPECT_THAT(refusal([&] { (void)data_inspect({.files = {path("a")}}); }), HasSubstr("token -1 at position 4"));
  EXPECT_THAT(refusal([&] { (void)data_inspect({}); }), HasSubstr("at least one pair"));
}

TEST_F(DataCommandTest, SampleShowsAStretch) {
  write("a.idx", kGoldenIdx);
  write("a.bin", kGoldenBin);
  const auto file = path("a");
  EXPECT_EQ(data_sample({.file = file}), "1 2 3 500");
  EXPECT_EQ(data_sample({.file = file, .document = 1}), "65535 7");
  EXPECT_EQ(data_sample({.file = file, .position = 2}), "3 500 65535 7");
  EXPECT_EQ(data_sample({.file = file, .position = 2, .length = 2}), "3 500");
  EXPECT_EQ(data_sample({.file = file, .text = true}), "\\x01\\x02\\x03<500>");
  const auto refused = [&](const DataSampleOptions& options) { return refusal([&] { (void)data_sample(options); }); };
  EXPECT_THAT(refused({.file = file, .document = 2}), HasSubstr("a: document 2, expected 0 to 1"));
  EXPECT_THAT(refused({.file = file, .document = -1}), HasSubstr("document -1, expected 0 to 1"));
  EXPECT_THAT(refused({.file = file, .position = 6}), HasSubstr("a: position 6, expected 0 to 5"));
  EXPECT_THAT(refused({.file = file, .document = 0, .position = 0}), HasSubstr("give one of them"));
  EXPECT_THAT(refused({.file = file, .length = 0}), HasSubstr("--length: expected 1 or more, got 0"));
}

TEST_F(DataCommandTest, TextIsSafeForATerminal) {
  EXPECT_EQ(printable("a\nb\tc\\ \x1b[31m\x7f"), "a\\nb\\tc\\\\ \\x1b[31m\\x7f");
  EXPECT_EQ(printable("caf\xc3\xa9 \xe2\x82\xac \xf0\x9f\x99\x82"), "caf\xc3\xa9 \xe2\x82\xac \xf0\x9f\x99\x82");
  EXPECT_EQ(printable("\xc3"), "\\xc3");                             // cut short
  EXPECT_EQ(printable("\xc0\xaf"), "\\xc0\\xaf");                    // longer than needed
  EXPECT_EQ(printable("\xe0\x80\xaf"), "\\xe0\\x80\\xaf");           // the same
  EXPECT_EQ(printable("\xed\xa0\x80"), "\\xed\\xa0\\x80");           // half of a surrogate pair
  EXPECT_EQ(printable("\xf4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80");  // beyond Unicode
  EXPECT_EQ(printable("\xc2\x9b"
                      "31m"),
            "\\xc2\\x9b"
            "31m");  // a control character
  EXPECT_EQ(printable("\0"s), "\\x00");
}

TEST_F(DataCommandTest, TheCommandLineReachesTheFunctions) {
  const auto parse = [](DataCommand& command, const std::string& line) {
    CLI::App app;
    command.add_to(app);
    app.parse(line);
    return command.parsed();
  };
  {
    DataCommand command;
    EXPECT_TRUE(parse(command,
                      "data prepare --input a - b --output out --format jsonl --key body --document line "
                      "--append-token 7 --vocabulary 9 --dtype uint8 --overwrite"));
    EXPECT_THAT(command.prepare.inputs, ElementsAre("a", "-", "b"));
    EXPECT_EQ(command.prepare.output, "out");
    EXPECT_EQ(command.prepare.format, "jsonl");
    EXPECT_EQ(command.prepare.key, "body");
    EXPECT_EQ(command.prepare.document, "line");
    EXPECT_EQ(command.prepare.append_token, 7);
    EXPECT_EQ(command.prepare.vocabulary, 9);
    EXPECT_EQ(command.prepare.dtype, "uint8");
    EXPECT_TRUE(command.prepare.overwrite);
  }
  {
    DataCommand command;
    EXPECT_TRUE(parse(command, "data inspect a b --json"));
    EXPECT_THAT(command.inspect.files, ElementsAre("a", "b"));
    EXPECT_TRUE(command.inspect.json);
  }
  {
    DataCommand command;
    EXPECT_TRUE(parse(command, "data sample a --position 3 --length 5 --text"));
    EXPECT_EQ(command.sample.file, "a");
    EXPECT_EQ(command.sample.document, std::nullopt);
    EXPECT_EQ(command.sample.position, 3);
    EXPECT_EQ(command.sample.length, 5);
    EXPECT_TRUE(command.sample.text);
  }
  DataCommand command;
  EXPECT_FALSE(parse(command, ""));
  EXPECT_THROW(parse(command, "data"), CLI::ParseError);
}

}  // namespace
}  // namespace fsdp::app
