// Names of weights as files of the Llama family have them on Hugging Face ("model.layers.0.self_attn.q_proj.weight").
#pragma once

#include <string>

namespace fsdp::models {

// Of a weight of models::Transformer. Layouts are the same: rotary positions turn the two halves of a head against each
// other. Throws UsageError for a name that no dense transformer has.
[[nodiscard]] std::string llama_name(const std::string& name);

}  // namespace fsdp::models
