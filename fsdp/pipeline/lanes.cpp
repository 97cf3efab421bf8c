#include "fsdp/pipeline/lanes.h"

#include <optional>

namespace fsdp::pipeline {

Lanes::Lanes(std::shared_ptr<Runtime> runtime, std::shared_ptr<moe::ExpertExchange> exchange)
    : runtime_(std::move(runtime)), exchange_(std::move(exchange)) {}

Stream Lanes::stream(Lane lane) const {
  return lane == Lane::exchange && exchange_ != nullptr ? exchange_->stream() : runtime_->compute_stream();
}

void Lanes::run(Lane lane, const std::function<void()>& body) const {
  if (lane == Lane::compute || exchange_ == nullptr) return body();
  if (runtime_->enqueue_sets_current_stream()) {
    exchange_->stream().enqueue([&] { body(); });
    return;
  }
  const moe::ExpertExchange::Unordered unordered(*exchange_);
  body();
}

void Lanes::retire(std::vector<at::Tensor> tensors, Lane lane) {
  if (runtime_->device().is_meta() || tensors.empty()) return;
  while (!retired_.empty() && retired_.front().used.query()) retired_.pop_front();
  retired_.push_back({std::move(tensors), {}});
  stream(lane).record(retired_.back().used);
}

void Lanes::drop_retired() {
  if (exchange_ != nullptr) {  // the other way round as well: memory of exchanges may still be read by compute
    Event here;
    runtime_->compute_stream().record(here);
    exchange_->stream().wait(here);
  }
  retired_.clear();
}

}  // namespace fsdp::pipeline
