#include "apps/fsdp/data_prepare.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string_view>

#include "apps/fsdp/line_reader.h"
#include "apps/fsdp/output_path.h"
#include "fsdp/base/check.h"
#include "fsdp/data/indexed_writer.h"

namespace fsdp::app {
namespace {

using nlohmann::json;

constexpr std::int64_t kByteVocabulary = 256;

void check_choice(const char* option, const std::string& value, std::initializer_list<const char*> choices) {
  std::string names;
  for (const auto* choice : choices) {
    if (value == choice) return;
    names += (names.empty() ? "" : ", ") + std::string(choice);
  }
  detail::fail<UsageError>("{}: expected one of {}, got \"{}\"", option, names, value);
}

data::IndexedWriterOptions writer_options(const DataPrepareOptions& options) {
  data::IndexedWriterOptions result{.vocabulary = options.vocabulary, .overwrite = options.overwrite};
  if (!options.dtype.empty()) result.dtype = data::dtype_from_name(options.dtype);
  if (options.vocabulary == 0 && options.format != "tokens")
    result.vocabulary = std::max(kByteVocabulary, options.append_token + 1);
  return result;
}

void check_options(const DataPrepareOptions& options) {
  check_choice("--format", options.format, {"text", "jsonl", "tokens"});
  check_choice("--document", options.document, {"file", "line", "paragraph"});
  FSDP_CHECK(!options.inputs.empty(), UsageError, "--input: expected at least one file, or - for standard input");
  FSDP_CHECK(std::ranges::count(options.inputs, LineReader::kStandardInput) <= 1, UsageError,
             "--input: standard input can be read only once");
  for (const auto& input : options.inputs) {  // all of them now, not after an hour
    if (input == LineReader::kStandardInput) continue;
    FSDP_CHECK(std::filesystem::exists(input), UsageError, "--input: {} does not exist", input);
    FSDP_CHECK(!std::filesystem::is_directory(input), UsageError, "--input: {} is a folder, expected a file", input);
  }
  FSDP_CHECK(options.vocabulary >= 0, UsageError, "--vocabulary: expected 1 or more, got {}", options.vocabulary);
  FSDP_CHECK(options.append_token >= -1, UsageError, "--append-token: expected 0 or more, got {}",
             options.append_token);
  FSDP_CHECK(options.format != "tokens" || options.vocabulary > 0 || !options.dtype.empty(), UsageError,
             "--format tokens needs --vocabulary or --dtype: the size of the ids is not known before they are read");
  FSDP_CHECK(options.vocabulary == 0 || options.append_token < options.vocabulary, UsageError,
             "--append-token: {} is beyond the vocabulary of {}", options.append_token, options.vocabulary);
}

// Documents into the writer; those without a token are left out and counted.
class Documents {
 public:
  Documents(data::IndexedWriter& writer, std::int64_t append_token) : writer_(writer), append_token_(append_token) {}

  void add(std::span<const std::int64_t> tokens) {
    writer_.append(tokens);
    empty_ = empty_ && tokens.empty();
  }
  void add(std::string_view bytes) {
    tokens_.resize(bytes.size());
    std::ranges::transform(bytes, tokens_.begin(), [](char c) { return static_cast<unsigned char>(c); });
    add(tokens_);
  }
  void end() {
    if (empty_) {
      ++left_out_;
      return;
    }
    if (append_token_ >= 0) writer_.append({&append_token_, 1});
    writer_.end_document();
    empty_ = true;
  }
  [[nodiscard]] bool open() const { return !empty_; }
  [[nodiscard]] std::int64_t left_out() const { return left_out_; }

 private:
  data::IndexedWriter& writer_;
  std::int64_t append_token_;
  bool empty_ = true;  // the document that is open
  std::int64_t left_out_ = 0;
  std::vector<std::int64_t> tokens_;  // scratch
};

void add_text(LineReader& reader, const std::string& document, Documents& documents) {
  if (document == "file") {
    for (auto block = reader.block(); !block.empty(); block = reader.block()) documents.add(block);
    documents.end();
  } else if (document == "line") {
    while (const auto line = reader.line()) {
      documents.add(*line);
      documents.end();
    }
  } else {
    while (const auto line = reader.line()) {
      if (line->find_first_not_of(" \t\r\f\v") != std::string_view::npos) {
        if (documents.open()) documents.add("\n");
        documents.add(*line);
      } else if (documents.open()) {
        documents.end();
      }
    }
    if (documents.open()) documents.end();
  }
}

json parse(const LineReader& reader, std::string_view line) {
  try {
    return json::parse(line);
  } catch (const json::exception& error) {
    const std::string what = error.what();  // "[json.exception.parse_error.101] parse error at line 1, column 5: ..."
    detail::fail<UsageError>("{}: this is no JSON: {}", reader.where(), what.substr(what.find("] ") + 2));
  }
}

bool is_blank(std::string_view line) { return line.find_first_not_of(" \t\r") == std::string_view::npos; }

// The value under `key` of a line, with what is there instead when it is not.
const json& at_key(const LineReader& reader, const json& object, const std::string& key) {
  FSDP_CHECK(object.is_object(), UsageError, "{}: expected an object with the key \"{}\", got {}", reader.where(), key,
             object.type_name());
  const auto found = object.find(key);
  if (found == object.end()) {
    std::string keys;
    for (const auto& [name, value] : object.items()) keys += (keys.empty() ? "" : ", ") + name;
    detail::fail<UsageError>("{}: expected the key \"{}\", got {}", reader.where(), key,
                             keys.empty() ? "an empty object" : "only " + keys);
  }
  return *found;
}

void add_json_texts(LineReader& reader, const std::string& key, Documents& documents) {
  while (const auto line = reader.line()) {
    if (is_blank(*line)) continue;
    const auto object = parse(reader, *line);
    const auto& text = at_key(reader, object, key);
    FSDP_CHECK(text.is_string(), UsageError, "{}: expected a string under \"{}\", got {}", reader.where(), key,
               text.type_name());
    documents.add(text.get_ref<const std::string&>());
    documents.end();
  }
}

void add_json_tokens(LineReader& reader, Documents& documents) {
  std::vector<std::int64_t> tokens;
  while (const auto line = reader.line()) {
    if (is_blank(*line)) continue;
    const auto value = parse(reader, *line);
    const auto& list = value.is_array() ? value : at_key(reader, value, "tokens");
    FSDP_CHECK(list.is_array(), UsageError, "{}: expected a list of tokens, got {}", reader.where(), list.type_name());
    tokens.clear();
    for (const auto& token : list) {
      const bool fits = token.is_number_integer() &&
                        !(token.is_number_unsigned() && token.get<std::uint64_t>() > std::uint64_t{1} << 62);
      FSDP_CHECK(fits, UsageError, "{}: token {} of the list is {}, expected an integer", reader.where(), tokens.size(),
                 token.dump(-1, ' ', false, json::error_handler_t::replace));
      tokens.push_back(token.get<std::int64_t>());
    }
    try {
      documents.add(tokens);
    } catch (const UsageError& error) {
      throw UsageError(fmt::format("{}: {}", reader.where(), error.what()));
    }
    documents.end();
  }
}

}  // namespace

std::string data_prepare(const DataPrepareOptions& options) {
  check_options(options);
  FSDP_CHECK(!options.output.empty(), UsageError, "--output: expected a prefix for the two files");
  const std::vector<std::filesystem::path> inputs(options.inputs.begin(), options.inputs.end());
  for (const char* suffix : {".bin.part", ".idx.part"})
    check_output_file(options.output + suffix, "--output", inputs);  // they are replaced and removed on the way
  make_parent_folder(options.output, "--output");
  data::IndexedWriter writer(options.output, writer_options(options));
  Documents documents(writer, options.append_token);
  for (const auto& input : options.inputs) {
    LineReader reader(input);
    if (options.format == "text") {
      add_text(reader, options.document, documents);
    } else if (options.format == "jsonl") {
      add_json_texts(reader, options.key, documents);
    } else {
      add_json_tokens(reader, documents);
    }
  }
  FSDP_CHECK(writer.token_count() > 0, UsageError, "the input holds no tokens: {}{} was read", options.inputs.front(),
             options.inputs.size() > 1 ? fmt::format(" and {} more", options.inputs.size() - 1) : "");
  writer.finish();
  auto report = fmt::format(
      "wrote {} and {}\n{} documents, {} tokens of {}, {} bytes", writer.bin_path().string(),
      writer.idx_path().string(), writer.document_count(), writer.token_count(), data::to_string(writer.dtype()),
      std::filesystem::file_size(writer.bin_path()) + std::filesystem::file_size(writer.idx_path()));
  if (documents.left_out() > 0) report += fmt::format("; {} empty documents were left out", documents.left_out());
  return report;
}

}  // namespace fsdp::app
