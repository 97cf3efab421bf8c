#include "models/moe_config.h"

#include "fsdp/base/check.h"

namespace fsdp::models {

std::int64_t MoeConfig::parameter_count() const {
  const std::int64_t moe_layers = base.layers - dense_layers;
  const std::int64_t of_layer = experts * 3 * base.width * expert_width + experts * base.width;
  return active_parameter_count() +
         moe_layers * (of_layer - top_k * 3 * base.width * expert_width - experts * base.width);
}

std::int64_t MoeConfig::active_parameter_count() const {
  const std::int64_t attention = 2 * base.width * base.width + 2 * base.width * base.kv_heads * base.head_width();
  const std::int64_t dense = 3 * base.width * base.ffn_width;
  const std::int64_t moe = experts * base.width + 3 * base.width * (shared_width + top_k * expert_width);
  return base.layers * (attention + 2 * base.width) + dense_layers * dense + (base.layers - dense_layers) * moe +
         base.width + 2 * base.vocabulary * base.width;
}

void MoeConfig::validate() const {
  base.validate();
  FSDP_CHECK(experts >= 1, UsageError, "model.experts: expected at least 1, got {}", experts);
  FSDP_CHECK(top_k >= 1 && top_k <= experts, UsageError, "model.top_k: expected 1 to model.experts = {}, got {}",
             experts, top_k);
  FSDP_CHECK(expert_width >= 1, UsageError, "model.expert_width: expected at least 1, got {}", expert_width);
  FSDP_CHECK(shared_width >= 0, UsageError, "model.shared_width: expected 0 or more, got {}", shared_width);
  FSDP_CHECK(dense_layers >= 0 && dense_layers <= base.layers, UsageError,
             "model.dense_layers: expected 0 to model.layers = {}, got {}", base.layers, dense_layers);
  FSDP_CHECK(
      !base.tied_embeddings, UsageError,
      "model.tied_embeddings: a mixture of experts needs an output head of its own, for embedding and head belong "
      "to different backwards");
  FSDP_CHECK(!base.recompute, UsageError, "model.recompute: not for mixtures of experts");
}

}  // namespace fsdp::models
