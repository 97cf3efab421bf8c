// Shape of a decoder transformer with mixtures of experts. Plain numbers; no weights.
#pragma once

#include <cstdint>

#include "models/transformer_config.h"

namespace fsdp::models {

struct MoeConfig {
  TransformerConfig base;    // ffn_width: of dense layers
  std::int64_t experts = 0;  // 0: none, a dense transformer
  std::int64_t top_k = 2;
  std::int64_t expert_width = 64;  // features inside an expert
  std::int64_t shared_width = 0;   // of the expert that every token goes to; 0: none
  std::int64_t dense_layers = 0;   // first layers without experts
  double auxiliary_loss = 0.01;    // coefficient of the load-balancing loss
  double bias_rate = 0;            // of balancing by biases; 0: none

  [[nodiscard]] std::int64_t parameter_count() const;         // of all ranks together
  [[nodiscard]] std::int64_t active_parameter_count() const;  // that a token passes
  void validate() const;                                      // throws UsageError naming the field
};

}  // namespace fsdp::models
