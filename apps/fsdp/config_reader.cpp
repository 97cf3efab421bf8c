#include "apps/fsdp/config_reader.h"

#include <toml++/toml.h>

#include <algorithm>
#include <map>
#include <utility>

#include "apps/fsdp/config_table.h"
#include "fsdp/base/check.h"

namespace fsdp::app {
namespace {

struct Setting {
  Value value;
  std::string origin;
};
using Settings = std::map<std::string, Setting>;  // [key]

std::optional<Value> to_value(const toml::node& node) {
  if (const auto* integer = node.as_integer()) return Value(integer->get());
  if (const auto* number = node.as_floating_point()) return Value(number->get());
  if (const auto* flag = node.as_boolean()) return Value(flag->get());
  if (const auto* text = node.as_string()) return Value(text->get());
  const auto* array = node.as_array();
  if (array == nullptr) return std::nullopt;
  TextList texts;
  NumberList numbers;
  for (const auto& element : *array) {
    if (const auto* text = element.as_string()) {
      texts.push_back(text->get());
    } else if (const auto number = element.value<double>(); number && !element.is_boolean()) {
      numbers.push_back(*number);
    } else {
      return std::nullopt;
    }
  }
  if (!texts.empty() && !numbers.empty()) return std::nullopt;
  if (!numbers.empty()) return Value(std::move(numbers));
  return Value(std::move(texts));  // an empty one stands for either kind
}

void collect(const toml::table& table, const std::string& prefix, const std::string& file, Settings& settings) {
  for (const auto& [name, node] : table) {
    const std::string key = prefix + std::string(name.str());
    const std::string origin = fmt::format("{}:{}", file, node.source().begin.line);
    if (const auto* nested = node.as_table()) {
      const auto known = [&](const Field& field) { return field.key.starts_with(key + "."); };
      if (std::ranges::none_of(config_fields(), known)) static_cast<void>(find_field(key, origin));
      collect(*nested, key + ".", file, settings);
      continue;
    }
    const Field& field = find_field(key, origin);
    auto value = to_value(node);
    FSDP_CHECK(value.has_value(), UsageError, "{}: {}: expected {}, got a TOML value of another type", origin, key,
               expectation(field));
    settings[key] = {std::move(*value), origin};
  }
}

toml::table parse_file(const std::filesystem::path& path) {
  FSDP_CHECK(std::filesystem::is_regular_file(path), UsageError, "{}: no such config file", path.string());
  try {
    return toml::parse_file(path.string());
  } catch (const toml::parse_error& error) {
    throw UsageError(fmt::format("{}:{}: {}", path.string(), error.source().begin.line, error.description()));
  }
}

// The text after "=" as TOML; a bare word is a text.
Value parse_value(const std::string& text, const Field& field, const std::string& origin) {
  if (std::holds_alternative<std::string& (*)(TrainConfig&)>(field.target) && !text.starts_with('"') &&
      !text.starts_with('\''))
    return text;
  try {
    const auto table = toml::parse("value = " + text);
    if (auto value = to_value(*table.get("value"))) return *value;
  } catch (const toml::parse_error&) {
    // Refused below, with what was expected.
  }
  if (std::holds_alternative<TextList& (*)(TrainConfig&)>(field.target) && !text.starts_with('['))
    return TextList{text};
  throw UsageError(fmt::format("{}: {}: expected {}, got {}", origin, field.key, expectation(field), text));
}

}  // namespace

TrainConfig read_train_config(const ConfigSources& sources) {
  Settings settings;
  collect(parse_file(sources.file), "", sources.file.string(), settings);
  for (const auto& text : sources.settings) {
    const auto split = text.find('=');
    FSDP_CHECK(split != std::string::npos && split > 0, UsageError, "--set: expected key=value, got \"{}\"", text);
    const std::string key = text.substr(0, split);
    const Field& field = find_field(key, "--set");
    settings[key] = {parse_value(text.substr(split + 1), field, "--set"), "--set"};
  }
  if (sources.ranks) settings["run.ranks"] = {std::int64_t{*sources.ranks}, "--ranks"};

  // In the order of the table: the preset comes before the fields that override it.
  TrainConfig config;
  for (const Field& field : config_fields()) {
    const auto setting = settings.find(std::string(field.key));
    if (setting != settings.end()) {
      assign(field, config, setting->second.value, setting->second.origin);
    } else if (field.key == "model.preset") {
      assign(field, config, config.model.preset, "default");
    } else {
      FSDP_CHECK(!field.required, UsageError, "{}: {} is missing; expected {} ({})", sources.file.string(), field.key,
                 expectation(field), field.meaning);
    }
  }
  return config;
}

}  // namespace fsdp::app
