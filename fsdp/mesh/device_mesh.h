// Ranks arranged on named axes, with the communicators of every axis.
//
// Ranks are laid out row-major: the last axis varies fastest, so it spans neighbouring ranks. Each axis has two
// communicators, one for gathers and one for reductions, since one alone serialises the two whatever the streams. They
// are created here, once, owned by the mesh and gone with its last handle. All ranks create their meshes in the same
// order.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "fsdp/comm/communicator.h"
#include "fsdp/mesh/world.h"

namespace fsdp {

struct MeshAxis {
  std::string name;
  int size = 1;
};

// What the communicators of an axis are for. `host` exchanges host memory; on CPUs it is the one for gathers.
enum class Use : std::uint8_t { gather, reduce, host };

class DeviceMesh {
 public:
  // Throws UsageError when the sizes do not multiply to the world's, a size is below 1 or a name repeats.
  DeviceMesh(World world, std::vector<MeshAxis> axes);

  // Over communicators the caller made and keeps alive, [axis]; rank and size of an axis are its communicators'.
  struct AxisCommunicators {
    Communicator gather, reduce;
    Communicator host = {};  // may be left out: then units of different ranks are not compared
  };
  DeviceMesh(World world, std::vector<std::string> names, std::vector<AxisCommunicators> communicators);

  [[nodiscard]] const World& world() const { return state_->world; }
  [[nodiscard]] const std::shared_ptr<Runtime>& runtime() const { return state_->world.runtime(); }
  [[nodiscard]] int axis_count() const { return static_cast<int>(state_->axes.size()); }
  [[nodiscard]] const MeshAxis& axis(int index) const { return state_->axes[index]; }
  [[nodiscard]] int axis_index(const std::string& name) const;  // throws UsageError listing the names there are
  [[nodiscard]] int coordinate(int axis) const {
    return static_cast<int>(communicator(axis, Use::gather).rank().value());
  }
  [[nodiscard]] const Communicator& communicator(int axis, Use use) const {
    const auto& pair = state_->communicators[axis];
    return use == Use::gather ? pair.gather : use == Use::reduce ? pair.reduce : pair.host;
  }
  [[nodiscard]] std::string describe() const;  // "outer=2 x inner=4"

  bool operator==(const DeviceMesh& other) const { return state_ == other.state_; }

 private:
  struct State {
    World world;
    std::vector<MeshAxis> axes;
    std::vector<AxisCommunicators> communicators;  // [axis]
  };
  std::shared_ptr<State> state_;
};

}  // namespace fsdp
