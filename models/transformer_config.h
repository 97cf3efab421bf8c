// Shape of a decoder transformer as in Llama 3. Plain numbers; no weights.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

namespace fsdp::models {

struct TransformerConfig {
  std::int64_t vocabulary = 256;
  std::int64_t layers = 2;
  std::int64_t width = 64;
  std::int64_t heads = 4;     // of queries
  std::int64_t kv_heads = 2;  // of keys and values; each serves heads / kv_heads query heads
  std::int64_t ffn_width = 192;
  std::int64_t max_context = 256;  // tokens
  double rope_theta = 10000.0;
  double norm_epsilon = 1e-5;
  bool tied_embeddings = false;    // the output head is the token embedding
  bool recompute = false;          // blocks are computed again in backward, their intermediate values are not kept
  c10::Device device = c10::kCPU;  // where weights are built; meta: shapes only, values come later

  [[nodiscard]] std::int64_t head_width() const { return width / heads; }
  [[nodiscard]] std::int64_t parameter_count() const;

  // Throws UsageError naming the field, what is expected and what came.
  void validate() const;
};

}  // namespace fsdp::models
