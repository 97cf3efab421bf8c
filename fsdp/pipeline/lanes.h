// The two streams of a schedule, and memory that crosses between them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "fsdp/moe/expert_exchange.h"
#include "fsdp/runtime/runtime.h"

namespace fsdp::pipeline {

enum class Lane : std::uint8_t { compute, exchange };

class Lanes {
 public:
  // `exchange` may be null: everything is compute then.
  Lanes(std::shared_ptr<Runtime> runtime, std::shared_ptr<moe::ExpertExchange> exchange);

  [[nodiscard]] Runtime& runtime() const { return *runtime_; }
  [[nodiscard]] Stream stream(Lane lane) const;
  // Runs `body` with the lane's stream current. On CPUs, where arithmetic is the calling thread's, exchanges that
  // `body` makes stay on their own stream.
  void run(Lane lane, const std::function<void()>& body) const;

  // Tensors last used by what `lane` has been given so far, perhaps allocated on the other one: they are kept until
  // that has run, so that their memory is not used again before.
  void retire(std::vector<at::Tensor> tensors, Lane lane);
  void drop_retired();                 // the caller's stream has waited for both lanes
  void forget() { retired_.clear(); }  // after an error, with both lanes idle

 private:
  const std::shared_ptr<Runtime> runtime_;
  const std::shared_ptr<moe::ExpertExchange> exchange_;
  struct Retired {
    std::vector<at::Tensor> tensors;
    Event used;
  };
  std::deque<Retired> retired_;
};

}  // namespace fsdp::pipeline
