#include "models/transformer_config.h"

#include <utility>

#include "fsdp/base/check.h"

namespace fsdp::models {

std::int64_t TransformerConfig::parameter_count() const {
  const std::int64_t attention = 2 * width * width + 2 * width * kv_heads * head_width();
  const std::int64_t block = attention + 3 * width * ffn_width + 2 * width;
  return layers * block + width + vocabulary * width * (tied_embeddings ? 1 : 2);
}

void TransformerConfig::validate() const {
  const std::pair<const char*, std::int64_t> sizes[] = {{"vocabulary", vocabulary},
                                                        {"layers", layers},
                                                        {"width", width},
                                                        {"heads", heads},
                                                        {"kv_heads", kv_heads},
                                                        {"ffn_width", ffn_width},
                                                        {"max_context", max_context}};
  for (const auto& [name, value] : sizes) {
    FSDP_CHECK(value >= 1, UsageError, "model.{}: expected at least 1, got {}", name, value);
  }
  FSDP_CHECK(width % heads == 0, UsageError, "model.heads: expected a divisor of model.width {}, got {}", width, heads);
  FSDP_CHECK(heads % kv_heads == 0, UsageError, "model.kv_heads: expected a divisor of model.heads {}, got {}", heads,
             kv_heads);
  FSDP_CHECK(head_width() % 2 == 0, UsageError,
             "model.heads: rotary embedding turns pairs, so the head width (model.width / model.heads) must be even, "
             "got {} / {} = {}",
             width, heads, head_width());
  FSDP_CHECK(rope_theta > 0, UsageError, "model.rope_theta: expected a positive number, got {}", rope_theta);
  FSDP_CHECK(norm_epsilon > 0, UsageError, "model.norm_epsilon: expected a positive number, got {}", norm_epsilon);
}

}  // namespace fsdp::models
