// What pipeline stages send each other: activations to the next stage, their gradients back to the one before.
//
// The stages form a ring, for the last one's parts are followed by further parts of the first. Each pair of neighbours
// has a communicator and a stream at both ends for each of the two ways, so nobody who waits to send holds back what
// arrives. Tensors of one way arrive in the order in which they were sent. Host thread of the rank only.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/comm/communicator.h"
#include "fsdp/mesh/device_mesh.h"
#include "fsdp/pipeline/staged_model.h"
#include "fsdp/runtime/stream.h"

namespace fsdp::pipeline {

class StageChannels {
 public:
  enum class Way : std::uint8_t { activations, gradients };

  // The ranks of one axis of the mesh are the stages, in order; all of them make it.
  static std::shared_ptr<StageChannels> create(const DeviceMesh& mesh, const std::string& axis);
  ~StageChannels();
  StageChannels(const StageChannels&) = delete;
  StageChannels& operator=(const StageChannels&) = delete;

  [[nodiscard]] int stages() const { return stages_; }
  [[nodiscard]] int stage() const { return stage_; }

  // To the neighbour, once `ready` is reached. The tensor is contiguous; it is kept until it has gone.
  void send(Way way, const at::Tensor& tensor, const Event& ready);
  // Begins to receive the next tensor of that way: of that size, into memory that what computes now no longer uses.
  void expect(Way way, const Boundary& boundary);
  // The tensor expected longest; it is there at `arrived`.
  [[nodiscard]] at::Tensor take(Way way, Event& arrived);

  // Whether all stages hold `value`. Collective, blocks the host.
  [[nodiscard]] bool all_equal(std::int64_t value) const;

  // Makes what is under way, and what follows, fail with `reason` at both ends; `reset`, by all stages, ends that.
  void abort(const std::string& reason);
  void reset();

 private:
  struct Passing {
    at::Tensor tensor;
    Event done;
  };
  // One end of a channel.
  struct End {
    Communicator communicator;
    Rank peer;
    Stream stream;
    std::deque<Passing> passing;  // sent and perhaps not gone, or expected
  };

  StageChannels(const DeviceMesh& mesh, int axis);
  [[nodiscard]] End& out(Way way) { return out_[static_cast<std::size_t>(way)]; }
  [[nodiscard]] End& in(Way way) { return in_[static_cast<std::size_t>(way)]; }
  // This stage's ends: in ascending order of the links, so that nobody waits in a circle where both ends must come.
  [[nodiscard]] std::vector<End*> ends_in_order();

  const DeviceMesh mesh_;
  const int axis_, stages_, stage_;
  const std::shared_ptr<Runtime> runtime_;
  std::array<End, 2> out_, in_;  // [way]; without communicators when there is one stage
};

}  // namespace fsdp::pipeline
