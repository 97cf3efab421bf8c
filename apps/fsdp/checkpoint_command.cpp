#include "apps/fsdp/checkpoint_command.h"

#include <ATen/ops/empty.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <vector>

#include "apps/fsdp/console.h"
#include "apps/fsdp/output_path.h"
#include "apps/fsdp/progress.h"
#include "fsdp/base/check.h"
#include "fsdp/checkpoint/safetensors.h"
#include "fsdp/checkpoint/sharded_state.h"
#include "fsdp/checkpoint/tensor_index.h"
#include "fsdp/checkpoint/tensor_reader.h"
#include "fsdp/data/part_file.h"
#include "models/llama_names.h"

namespace fsdp::app {
namespace {

using checkpoint::StoredTensor;
using checkpoint::TensorIndex;
using checkpoint::TensorReader;

constexpr std::string_view kWeights = "weights/";

// "weights", "optimizer/exp_avg", ...: what comes before a parameter's name.
std::string kind_of(const std::string& key) {
  const auto first = key.find('/');
  return key.substr(0, key.starts_with("optimizer/") ? key.find('/', first + 1) : first);
}

// All elements in the order of the sizes.
at::Tensor read_whole(TensorReader& reader, const std::string& key, const StoredTensor& stored) {
  at::Tensor flat = at::empty({stored.elements()}, checkpoint::dtype_of(stored.dtype));
  reader.read(key, {0, stored.elements()}, {static_cast<std::byte*>(flat.mutable_data_ptr()), flat.nbytes()});
  return flat.as_strided(stored.sizes, stored.strides).contiguous();
}

}  // namespace

void CheckpointCommand::add_to(CLI::App& app) {
  command_ = app.add_subcommand("checkpoint", "Show, check and export checkpoints");
  command_->require_subcommand(1);
  inspect_ = command_->add_subcommand("inspect", "What a checkpoint, or a .safetensors file, holds");
  verify_ = command_->add_subcommand("verify", "Read all of it and compare with the checksums");
  auto* exported = command_->add_subcommand("export", "Write the weights, whole, into one .safetensors file");
  for (auto* command : {inspect_, verify_, exported})
    command->add_option("path", path_, "A checkpoint's folder, or a .safetensors file")->required();
  inspect_->add_flag("--tensors", tensors_, "List every tensor");
  inspect_->add_flag("--json", json_, "Print one JSON object");
  exported->add_option("--output", output_, "The file to write")->required();
  exported->add_option("--dtype", dtype_, "Of the weights: stored, fp32, bf16 or fp16")
      ->check(CLI::IsMember({"stored", "fp32", "bf16", "fp16"}));
  exported->add_option("--names", names_, "own, or llama: as Llama's files on Hugging Face have them")
      ->check(CLI::IsMember({"own", "llama"}));
}

bool CheckpointCommand::parsed() const { return command_ != nullptr && command_->parsed(); }

int CheckpointCommand::run() const {
  console::print(inspect_->parsed() ? inspect() : verify_->parsed() ? verify() : export_weights());
  return 0;
}

std::string CheckpointCommand::inspect() const {
  const auto index = TensorIndex::open(path_);
  struct Total {
    std::int64_t tensors = 0, elements = 0;
    std::set<std::string> dtypes;
  };
  std::map<std::string, Total> totals;
  for (const auto& [key, tensor] : index.tensors()) {
    Total& total = totals[kind_of(key)];
    ++total.tensors;
    total.elements += tensor.elements();
    total.dtypes.insert(tensor.dtype);
  }
  if (json_) {
    nlohmann::ordered_json kinds = nlohmann::ordered_json::object();
    nlohmann::json tensors = nlohmann::json::object();  // many
    for (const auto& [kind, total] : totals)
      kinds[kind] = {{"tensors", total.tensors}, {"elements", total.elements}, {"dtypes", total.dtypes}};
    nlohmann::ordered_json object{
        {"path", path_},          {"ranks", index.ranks()},           {"files", index.files().size()},
        {"bytes", index.bytes()}, {"attributes", index.attributes()}, {"kinds", kinds}};
    if (tensors_) {
      for (const auto& [key, tensor] : index.tensors())
        tensors[key] = {{"dtype", tensor.dtype}, {"shape", tensor.sizes}, {"pieces", tensor.pieces.size()}};
      object["tensors"] = tensors;
    }
    return object.dump();
  }
  std::string text = index.ranks() == 0 ? fmt::format("{}: plain weights", path_)
                                        : fmt::format("{}: saved by {} ranks", path_, index.ranks());
  if (const auto step = index.attributes().find("step"); step != index.attributes().end())
    text += fmt::format(" after {} steps", step->second);
  text += fmt::format(", {} in {} files", format_bytes(index.bytes()), index.files().size());
  for (const auto& [kind, total] : totals)
    text += fmt::format("\n  {:<28} {:>6} tensors {:>15} elements  {}", kind, total.tensors, total.elements,
                        fmt::join(total.dtypes, ", "));
  for (const auto& [key, tensor] : index.tensors()) {
    if (tensors_)
      text += fmt::format("\n{:<56} {:<5} ({}) in {} pieces", key, tensor.dtype, fmt::join(tensor.sizes, ", "),
                          tensor.pieces.size());
  }
  return text;
}

std::string CheckpointCommand::verify() const {
  const auto index = TensorIndex::open(path_);
  TensorReader reader(index);
  std::vector<std::byte> part;
  bool unchecked = false;
  for (const auto& [key, tensor] : index.tensors()) {
    const std::int64_t width = checkpoint::element_bytes(tensor.dtype);
    for (const auto& piece : tensor.pieces) {
      unchecked |= piece.checksums.empty();
      const std::int64_t step = checkpoint::kChecksumBlock / width;  // whole blocks, so that each is read once
      for (auto at = piece.elements.begin; at < piece.elements.end; at += step) {
        const ElementRange range{at, std::min(at + step, piece.elements.end)};
        part.resize(static_cast<std::size_t>(range.length() * width));
        reader.read(key, range, part);
      }
    }
  }
  return fmt::format("{}: {} tensors, {} read; {}", path_, index.tensors().size(), format_bytes(reader.bytes_read()),
                     unchecked ? "there are no checksums to compare with" : "all as they were saved");
}

std::string CheckpointCommand::export_weights() const {
  const auto index = TensorIndex::open(path_);
  std::vector<std::filesystem::path> inputs;
  for (const auto& file : index.files()) inputs.push_back(file.path);
  check_output_file(output_, "--output", inputs);
  std::error_code ignored;
  const auto folder = std::filesystem::path(output_).parent_path();
  FSDP_CHECK(!std::filesystem::path(output_).filename().empty() &&
                 !std::filesystem::equivalent(path_, folder.empty() ? "." : folder, ignored),
             UsageError, "--output: \"{}\" is no name of a file outside of {}", output_, path_);
  make_parent_folder(output_, "--output");
  const std::map<std::string, c10::ScalarType> dtypes{
      {"fp32", c10::kFloat}, {"bf16", c10::kBFloat16}, {"fp16", c10::kHalf}};
  checkpoint::SafetensorsHeader header;
  header.metadata["format"] = "pt";  // what Hugging Face's readers ask for
  std::vector<std::string> keys;
  for (const auto& [key, stored] : index.tensors()) {
    if (!key.starts_with(kWeights)) continue;
    keys.push_back(key);
    std::string name = key.substr(kWeights.size()), dtype = stored.dtype;
    if (dtype_ != "stored") dtype = checkpoint::dtype_name(dtypes.at(dtype_), key);
    if (names_ == "llama") name = models::llama_name(name);
    const std::int64_t bytes = stored.elements() * checkpoint::element_bytes(dtype);
    header.entries.push_back(
        {.name = std::move(name), .dtype = std::move(dtype), .sizes = stored.sizes, .bytes = bytes});
  }
  FSDP_CHECK(!keys.empty(), UsageError, "{} holds no weights", path_);
  data::PartFile file(output_);
  const std::string start = make_safetensors_header(header);
  file.append(std::as_bytes(std::span(start)));
  TensorReader reader(index);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const at::Tensor whole =
        read_whole(reader, keys[i], *index.find(keys[i])).to(checkpoint::dtype_of(header.entries[i].dtype));
    file.append({static_cast<const std::byte*>(whole.const_data_ptr()), whole.nbytes()});
  }
  const std::int64_t bytes = file.size();
  file.close();
  file.publish();
  return fmt::format("{}: {} weights, {}", output_, keys.size(), format_bytes(bytes));
}

}  // namespace fsdp::app
