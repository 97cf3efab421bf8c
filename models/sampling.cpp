#include "models/sampling.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "fsdp/base/check.h"

namespace fsdp::models {

std::vector<std::int64_t> sample_tokens(const LogitsFunction& logits_of, const std::vector<std::int64_t>& prompt,
                                        const SamplingOptions& options) {
  FSDP_CHECK(!prompt.empty(), UsageError, "sampling: expected a prompt of at least one token, got none");
  FSDP_CHECK(options.temperature >= 0, UsageError, "sampling: expected a temperature of at least 0, got {}",
             options.temperature);
  at::NoGradGuard no_grad;
  auto generator = at::detail::createCPUGenerator(options.seed);
  FSDP_CHECK(options.context >= 1, UsageError, "sampling: expected a context of at least one token, got {}",
             options.context);
  auto tokens = prompt;
  for (std::int64_t i = 0; i < options.length && !(options.stop && options.stop()); ++i) {
    const auto visible = std::min<std::int64_t>(options.context, static_cast<std::int64_t>(tokens.size()));
    const auto input =
        at::tensor(at::ArrayRef<std::int64_t>(tokens.data() + tokens.size() - visible, visible), at::kLong)
            .unsqueeze(0)
            .to(options.device);
    const auto logits = logits_of(input).select(1, -1).select(0, 0).to(c10::kCPU, at::kFloat);
    const auto next = options.temperature == 0
                          ? at::argmax(logits)
                          : at::multinomial(at::softmax(logits / options.temperature, -1), 1, false, generator);
    tokens.push_back(next.item<std::int64_t>());
  }
  return {tokens.begin() + static_cast<std::ptrdiff_t>(prompt.size()), tokens.end()};
}

}  // namespace fsdp::models
