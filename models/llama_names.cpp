#include "models/llama_names.h"

#include <array>
#include <string_view>
#include <utility>

#include "fsdp/base/check.h"

namespace fsdp::models {
namespace {

using Names = std::pair<std::string_view, std::string_view>;

constexpr std::array<Names, 3> kOutside{{{"embedding.weight", "model.embed_tokens.weight"},
                                         {"norm.weight", "model.norm.weight"},
                                         {"head.weight", "lm_head.weight"}}};
constexpr std::array<Names, 9> kInBlock{{{"attention_norm.weight", "input_layernorm.weight"},
                                         {"attention.query.weight", "self_attn.q_proj.weight"},
                                         {"attention.key.weight", "self_attn.k_proj.weight"},
                                         {"attention.value.weight", "self_attn.v_proj.weight"},
                                         {"attention.output.weight", "self_attn.o_proj.weight"},
                                         {"feed_forward_norm.weight", "post_attention_layernorm.weight"},
                                         {"feed_forward.gate.weight", "mlp.gate_proj.weight"},
                                         {"feed_forward.up.weight", "mlp.up_proj.weight"},
                                         {"feed_forward.down.weight", "mlp.down_proj.weight"}}};
constexpr std::string_view kBlocks = "blocks.";

}  // namespace

std::string llama_name(const std::string& name) {
  for (const auto& [own, theirs] : kOutside) {
    if (name == own) return std::string(theirs);
  }
  if (const auto dot = name.find('.', kBlocks.size()); name.starts_with(kBlocks) && dot != std::string::npos) {
    for (const auto& [own, theirs] : kInBlock) {
      if (std::string_view(name).substr(dot + 1) == own)
        return "model.layers." + name.substr(kBlocks.size(), dot - kBlocks.size()) + '.' + std::string(theirs);
    }
  }
  detail::fail<UsageError>("\"{}\" is no weight of a dense transformer: files of Llama have no name for it", name);
}

}  // namespace fsdp::models
