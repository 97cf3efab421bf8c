// Continues a text token by token, by a full forward each time.
//
// Every rank calls it with the same arguments: the forwards gather sharded weights. Results are equal on all ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace fsdp::models {

// tokens (1, position) -> logits (1, position, vocabulary).
using LogitsFunction = std::function<at::Tensor(const at::Tensor& tokens)>;

struct SamplingOptions {
  std::int64_t length = 128;   // tokens to add
  std::int64_t context = 128;  // latest tokens that the model sees
  double temperature = 0.8;    // 0: always the likeliest token
  std::uint64_t seed = 0;
  c10::Device device = c10::kCPU;   // where the model computes
  std::function<bool()> stop = {};  // asked before each token, with equal answers on all ranks; empty: never
};

// The added tokens, without the prompt. The prompt has at least one token.
[[nodiscard]] std::vector<std::int64_t> sample_tokens(const LogitsFunction& logits,
                                                      const std::vector<std::int64_t>& prompt,
                                                      const SamplingOptions& options);

}  // namespace fsdp::models
