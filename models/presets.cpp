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

const std::vector<std::pair<std::string_view, MoeConfig>>& moe_presets() {
  static const std::vector<std::pair<std::string_view, MoeConfig>> table = {
      // Byte-level, for CPUs.
      {"tiny-moe",
       {.base = {.vocabulary = 256,
                 .layers = 2,
                 .width = 64,
                 .heads = 4,
                 .kv_heads = 2,
                 .ffn_width = 192,
                 .max_context = 512},
        .experts = 4,
        .top_k = 2,
        .expert_width = 64,
        .shared_width = 64}},
      // The proportions of DeepSeek-V3 (arXiv:2412.19437, table of section 4.2) at a size for a few GPUs: one shared
      // expert as wide as the others, the first layer dense, balancing by biases.
      {"deepseek-proxy",
       {.base = {.vocabulary = 32000,
                 .layers = 8,
                 .width = 2048,
                 .heads = 16,
                 .kv_heads = 16,
                 .ffn_width = 6144,
                 .max_context = 8192,
                 .rope_theta = 1e4},
        .experts = 32,
        .top_k = 4,
        .expert_width = 1024,
        .shared_width = 1024,
        .dense_layers = 1,
        .auxiliary_loss = 0.0001,
        .bias_rate = 0.001}},
  };
  return table;
}

}  // namespace

const std::vector<std::string_view>& preset_names() {
  static const std::vector<std::string_view> names = [] {
    std::vector<std::string_view> result;
    for (const auto& [name, config] : presets()) result.push_back(name);
    for (const auto& [name, config] : moe_presets()) result.push_back(name);
    return result;
  }();
  return names;
}

std::optional<TransformerConfig> find_preset(std::string_view name) {
  const auto found = find_moe_preset(name);
  return found ? std::optional(found->base) : std::nullopt;
}

std::optional<MoeConfig> find_moe_preset(std::string_view name) {
  for (const auto& [key, config] : presets()) {
    if (key == name) return MoeConfig{.base = config};
  }
  for (const auto& [key, config] : moe_presets()) {
    if (key == name) return config;
  }
  return std::nullopt;
}

}  // namespace fsdp::models
