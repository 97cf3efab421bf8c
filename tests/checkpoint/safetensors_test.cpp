// The header of .safetensors files: what it says, and what is refused.
#include "fsdp/checkpoint/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

#include "fsdp/base/error.h"

namespace fsdp::checkpoint {
namespace {

using ::testing::HasSubstr;

class Safetensors : public ::testing::Test {
 protected:
  ~Safetensors() override { std::filesystem::remove(path_); }
  void write(const std::string& header, std::size_t data) {
    const std::uint64_t length = header.size();
    std::ofstream file(path_, std::ios::binary);
    file.write(reinterpret_cast<const char*>(&length), sizeof(length));
    file << header << std::string(data, 'x');
  }
  std::string refusal() {
    try {
      static_cast<void>(read_safetensors_header(path_));
    } catch (const UsageError& error) {
      return error.what();
    }
    return "accepted";
  }
  std::filesystem::path path_ =
      std::filesystem::temp_directory_path() / ("fsdp-" + std::to_string(getpid()) + ".safetensors");
};

TEST_F(Safetensors, WhatWasWrittenIsRead) {
  SafetensorsHeader header;
  header.entries = {{.name = "a", .dtype = "F32", .sizes = {2, 3}, .bytes = 24},
                    {.name = "none", .dtype = "BF16", .sizes = {0, 4}, .bytes = 0},
                    {.name = "scalar", .dtype = "I64", .sizes = {}, .bytes = 8}};
  header.metadata = {{"format", "pt"}};
  const std::string start = make_safetensors_header(header);
  EXPECT_EQ(start.size() % 8, 0U);
  std::ofstream(path_, std::ios::binary) << start << std::string(32, 'x');
  const auto read = read_safetensors_header(path_);
  ASSERT_EQ(read.entries.size(), 3U);
  EXPECT_EQ(read.metadata, header.metadata);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(read.entries[i].name, header.entries[i].name);
    EXPECT_EQ(read.entries[i].begin, header.entries[i].begin);
    EXPECT_EQ(read.entries[i].bytes, header.entries[i].bytes);
    EXPECT_EQ(read.entries[i].sizes, header.entries[i].sizes);
  }
  EXPECT_EQ(read.entries[0].begin, static_cast<std::int64_t>(start.size()));
}

TEST_F(Safetensors, WhatIsNoneIsRefused) {
  EXPECT_THAT(refusal(), HasSubstr("cannot be read"));
  std::ofstream(path_) << "abc";
  EXPECT_THAT(refusal(), HasSubstr("is no safetensors file"));
  std::ofstream(path_) << std::string(64, '\xff');
  EXPECT_THAT(refusal(), HasSubstr("is no safetensors file"));
  write("[1, 2]", 0);
  EXPECT_THAT(refusal(), HasSubstr("no JSON object"));
  write(R"({"a": {"dtype": "F32", "shape": [2]}})", 8);
  EXPECT_THAT(refusal(), HasSubstr("\"a\""));
  write(R"({"a": {"dtype": "F32", "shape": "2", "data_offsets": [0, 8]}})", 8);
  EXPECT_THAT(refusal(), HasSubstr("\"a\""));
  write(R"({"a": {"dtype": "Q3", "shape": [2], "data_offsets": [0, 8]}})", 8);
  EXPECT_THAT(refusal(), HasSubstr("unknown dtype \"Q3\""));
  write(R"({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}})", 8);
  EXPECT_THAT(refusal(), HasSubstr("need 12"));
  write(R"({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}})", 8);
  EXPECT_THAT(refusal(), HasSubstr("impossible size"));
  write(R"({"a": {"dtype": "F64", "shape": [4611686018427387904, 4], "data_offsets": [0, 8]}})", 8);
  EXPECT_THAT(refusal(), HasSubstr("impossible size"));
  write(R"({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}})", 7);
  EXPECT_THAT(refusal(), HasSubstr("cut short"));
  write(
      R"({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}})",
      12);
  EXPECT_THAT(refusal(), HasSubstr("begins at byte"));
}

}  // namespace
}  // namespace fsdp::checkpoint
