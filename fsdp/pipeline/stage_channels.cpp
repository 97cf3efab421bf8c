#include "fsdp/pipeline/stage_channels.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/mesh/axis_ranks.h"

namespace fsdp::pipeline {
namespace {

constexpr const char* kSend[] = {"FSDP:stage:send_activations", "FSDP:stage:send_gradients"};
constexpr const char* kReceive[] = {"FSDP:stage:receive_activations", "FSDP:stage:receive_gradients"};

void* data_of(const at::Tensor& tensor) { return tensor.is_meta() ? nullptr : tensor.mutable_data_ptr(); }

}  // namespace

std::shared_ptr<StageChannels> StageChannels::create(const DeviceMesh& mesh, const std::string& axis) {
  return std::shared_ptr<StageChannels>(new StageChannels(mesh, mesh.axis_index(axis)));
}

StageChannels::StageChannels(const DeviceMesh& mesh, int axis)
    : mesh_(mesh), axis_(axis), stages_(mesh.axis(axis).size), stage_(mesh.coordinate(axis)), runtime_(mesh.runtime()) {
  if (stages_ == 1) return;
  const auto ranks = ranks_on_axis(mesh, axis);
  const int before = (stage_ + stages_ - 1) % stages_;
  // Link l joins stage l and the next one.
  for (const int link : {std::min(before, stage_), std::max(before, stage_)}) {
    const int from = ranks[static_cast<std::size_t>(link)], to = ranks[static_cast<std::size_t>((link + 1) % stages_)];
    const bool here_begins = link == stage_;
    for (const Way way : {Way::activations, Way::gradients}) {
      const bool sends = here_begins == (way == Way::activations);
      End& end = sends ? out(way) : in(way);
      end.communicator = mesh.world().create_communicator(
          std::vector<int>{std::min(from, to), std::max(from, to)},
          fmt::format("{}.{}.{}", mesh.axis(axis).name, way == Way::activations ? "activations" : "gradients", link));
      end.peer = Rank(1 - end.communicator.rank().value());
      end.stream = runtime_->make_stream(sends ? "send" : "receive");
    }
  }
}

StageChannels::~StageChannels() {
  // What was expected and never taken may never come; what was sent will be taken.
  for (const End& end : in_) {
    if (!end.passing.empty()) end.communicator.abort("the channels between pipeline stages were destroyed");
  }
  for (auto* ends : {&out_, &in_}) {
    for (End& end : *ends) {
      if (!end.stream || end.passing.empty()) continue;
      try {
        end.stream.synchronize();
      } catch (const std::exception&) {  // was reported where it was waited for
      }
    }
  }
  // The end of a group between GPUs waits for its other ranks, as its making does.
  for (End* end : ends_in_order()) end->communicator = {};
}

void StageChannels::send(Way way, const at::Tensor& tensor, const Event& ready) {
  End& end = out(way);
  while (!end.passing.empty() && end.passing.front().done.query()) end.passing.pop_front();
  FSDP_INVARIANT(tensor.is_contiguous());
  end.stream.wait(ready);
  end.communicator.send(data_of(tensor), Elements(tensor.numel()), tensor.scalar_type(), end.peer, end.stream,
                        kSend[static_cast<int>(way)]);
  end.passing.push_back({tensor.detach(), {}});
  end.stream.record(end.passing.back().done);
}

void StageChannels::expect(Way way, const Boundary& boundary) {
  End& end = in(way);
  at::Tensor tensor = at::empty(boundary.sizes, at::TensorOptions().dtype(boundary.dtype).device(runtime_->device()));
  Event here;
  runtime_->compute_stream().record(here);  // the memory's last user was there
  end.stream.wait(here);
  end.communicator.receive(data_of(tensor), Elements(tensor.numel()), tensor.scalar_type(), end.peer, end.stream,
                           kReceive[static_cast<int>(way)]);
  end.passing.push_back({std::move(tensor), {}});
  end.stream.record(end.passing.back().done);
}

at::Tensor StageChannels::take(Way way, Event& arrived) {
  End& end = in(way);
  FSDP_INVARIANT(!end.passing.empty());
  Passing first = std::move(end.passing.front());
  end.passing.pop_front();
  arrived = first.done;
  return first.tensor;
}

bool StageChannels::all_equal(std::int64_t value) const {
  std::int64_t extremes[2] = {value, -value};
  const Communicator& hosts = mesh_.communicator(axis_, Use::host);
  if (!hosts || stages_ == 1) return true;
  const Stream stream = mesh_.world().host().runtime()->compute_stream();
  hosts.all_reduce(extremes, extremes, Elements(2), c10::kLong, ReduceOp::max, stream, "FSDP:stage:comparison");
  stream.synchronize();
  return extremes[0] == value && extremes[1] == -value;
}

void StageChannels::abort(const std::string& reason) {
  for (auto* ends : {&out_, &in_}) {
    for (End& end : *ends) {
      if (end.communicator) end.communicator.abort(reason);
    }
  }
}

void StageChannels::reset() {
  for (auto* ends : {&out_, &in_}) {
    for (End& end : *ends) {
      if (end.stream) end.stream.reset();
      end.passing.clear();
    }
  }
  for (End* end : ends_in_order()) end->communicator.reset();
}

std::vector<StageChannels::End*> StageChannels::ends_in_order() {
  std::vector<End*> ends;
  if (stages_ == 1) return ends;
  const int before = (stage_ + stages_ - 1) % stages_;
  for (const int link : {std::min(before, stage_), std::max(before, stage_)}) {
    const bool here_begins = link == stage_;
    for (const Way way : {Way::activations, Way::gradients})
      ends.push_back(here_begins == (way == Way::activations) ? &out(way) : &in(way));
  }
  return ends;
}

}  // namespace fsdp::pipeline
