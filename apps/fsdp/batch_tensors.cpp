#include "apps/fsdp/batch_tensors.h"

#include <ATen/ops/from_blob.h>

#include <memory>
#include <utility>

namespace fsdp::app {
namespace {

at::Tensor to_tensor(std::vector<std::int64_t> values, std::int64_t sequences, std::int64_t context) {
  auto owner = std::make_shared<std::vector<std::int64_t>>(std::move(values));
  auto* data = owner->data();
  return at::from_blob(
      data, {sequences, context}, [owner](void*) {}, at::kLong);
}

}  // namespace

BatchTensors to_tensors(data::TokenBatch batch, c10::Device device) {
  return {to_tensor(std::move(batch.tokens), batch.sequences, batch.context).to(device),
          to_tensor(std::move(batch.targets), batch.sequences, batch.context).to(device)};
}

}  // namespace fsdp::app
