// The one table of the settings of `fsdp train`: name, type, range or choices, meaning, place in TrainConfig.
// Reading, checking and listing all follow it.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "apps/fsdp/train_config.h"

namespace fsdp::app {

using TextList = std::vector<std::string>;
using NumberList = std::vector<double>;
using Value = std::variant<std::int64_t, double, bool, std::string, TextList, NumberList>;

// Where the value lives.
using Target = std::variant<std::int64_t& (*)(TrainConfig&), double& (*)(TrainConfig&), bool& (*)(TrainConfig&),
                            std::string& (*)(TrainConfig&), TextList& (*)(TrainConfig&), NumberList& (*)(TrainConfig&)>;

struct Field {
  std::string_view key;
  std::string_view meaning;
  Target target;
  double minimum = -std::numeric_limits<double>::infinity();  // of numbers; both ends included
  double maximum = std::numeric_limits<double>::infinity();
  std::vector<std::string_view> choices = {};  // of texts; empty: any
  bool required = false;
};

[[nodiscard]] const std::vector<Field>& config_fields();

// Throws UsageError, starting with `origin` (such as "demo.toml:3"), for a key that does not exist and names the
// nearest.
[[nodiscard]] const Field& find_field(std::string_view key, const std::string& origin);

// Throws UsageError naming origin, key, what is expected and what came. "model.preset" also sets the other model
// fields.
void assign(const Field& field, TrainConfig& config, const Value& value, const std::string& origin);

// "an integer from 1 to 4096", "one of adamw, sgd"
[[nodiscard]] std::string expectation(const Field& field);

// The field's value as TOML.
[[nodiscard]] std::string shown_value(const Field& field, TrainConfig config);

// For readers: every field with type, range or choices, default and meaning, by section.
[[nodiscard]] std::string describe_fields();

// `config` as a TOML file that reads back as the same settings.
[[nodiscard]] std::string to_toml(TrainConfig config);

}  // namespace fsdp::app
