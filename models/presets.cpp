#include "models/presets.h"

#include <utility>

namespace fsdp::models {
namespace {

const std::vector<std::pair<std::string_view, TransformerConfig>>& presets() {
  static const std::vector<std::pair<std::string_view, TransformerConfig>> table = {
      // Byte-level models for CPUs.
      {"tiny",
       {.vocabulary = 256, .layers = 2, .width = 64, .heads = 4, .kv_heads = 2, .ffn_width = 192, .max_context = 512}},
      {"small",
       {.vocabulary = 256,
        .layers = 4,
        .width = 128,
        .heads = 4,
        .kv_heads = 2,
        .ffn_width = 384,
        .max_context = 1024}},
      // With the vocabulary of Llama 3.
      {"160M",
       {.vocabulary = 128256,
        .layers = 12,
        .width = 768,
        .heads = 12,
        .kv_heads = 4,
        .ffn_width = 1536,
        .max_context = 8192,
        .rope_theta = 5e5,
        .tied_embeddings = true}},
      {"1B",
       {.vocabulary = 128256,
        .layers = 16,
        .width = 2048,
        .heads = 32,
        .kv_heads = 8,
        .ffn_width = 8192,
        .max_context = 131072,
        .rope_theta = 5e5,
        .tied_embeddings = true}},
      {"8B",
       {.vocabulary = 128256,
        .layers = 32,
        .width = 4096,
        .heads = 32,
        .kv_heads = 8,
        .ffn_width = 14336,
        .max_context = 8192,
        .rope_theta = 5e5}},
  };
  return table;
}

}  // namespace

const std::vector<std::string_view>& preset_names() {
  static const std::vector<std::string_view> names = [] {
    std::vector<std::string_view> result;
    for (const auto& [name, config] : presets()) result.push_back(name);
    return result;
  }();
  return names;
}

std::optional<TransformerConfig> find_preset(std::string_view name) {
  for (const auto& [key, config] : presets()) {
    if (key == name) return config;
  }
  return std::nullopt;
}

}  // namespace fsdp::models
