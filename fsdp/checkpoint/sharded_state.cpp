#include "fsdp/checkpoint/sharded_state.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>

#include "fsdp/base/check.h"
#include "fsdp/base/fingerprint.h"
#include "fsdp/checkpoint/tensor_index.h"

namespace fsdp::checkpoint {
namespace {

constexpr std::array<std::pair<c10::ScalarType, const char*>, 12> kDtypes{{{c10::kDouble, "F64"},
                                                                           {c10::kFloat, "F32"},
                                                                           {c10::kHalf, "F16"},
                                                                           {c10::kBFloat16, "BF16"},
                                                                           {c10::kLong, "I64"},
                                                                           {c10::kInt, "I32"},
                                                                           {c10::kShort, "I16"},
                                                                           {c10::kChar, "I8"},
                                                                           {c10::kByte, "U8"},
                                                                           {c10::kBool, "BOOL"},
                                                                           {c10::kFloat8_e4m3fn, "F8_E4M3"},
                                                                           {c10::kFloat8_e5m2, "F8_E5M2"}}};

// Of a unit: equal on ranks that hold parameters under the same names.
std::int64_t names_of(const FsdpModule& unit) {
  std::string text;
  for (const auto& group : unit.groups()) {
    for (const auto& p : group->parameters()) text += p.name + ';';
  }
  for (const auto& [name, tensor] : unit.buffers()) text += name + ';';
  return fingerprint(text);
}

// Where this rank stands on the axes whose ranks hold other parameters than this one's.
std::int64_t place_of(const FsdpModule& unit, const DeviceMesh& mesh) {
  std::int64_t place = 0;
  for (const auto& name : unit.options().partitioned_axes) {
    const int axis = mesh.axis_index(name);
    place = place * mesh.axis(axis).size + mesh.coordinate(axis);
  }
  return place;
}

void check_axes(const FsdpModule& unit, const DeviceMesh& mesh) {
  for (int axis = 0; axis < mesh.axis_count(); ++axis) {
    const auto& name = mesh.axis(axis).name;
    const auto among = [&](const std::vector<std::string>& names) {
      return std::ranges::find(names, name) != names.end();
    };
    FSDP_CHECK(
        mesh.axis(axis).size == 1 || among(unit.options().placements.axes) || among(unit.options().partitioned_axes),
        UsageError,
        "unit \"{}\" is not sharded over the mesh axis \"{}\", so a checkpoint cannot know whether its ranks hold "
        "the same weights: name the axis in its placements, or in UnitOptions::partitioned_axes",
        unit.name(), name);
  }
}

// The whole tensor of all partitions is theirs one after the other along its first dimension.
LocalTensor piece_of_whole(std::string key, std::vector<std::int64_t> sizes, std::vector<std::int64_t> strides,
                           ElementRange elements, at::Tensor values, const Partition& partition) {
  std::int64_t own = 1;
  for (const auto size : sizes) own *= size;
  if (partition.count > 1) {
    if (sizes.empty()) sizes = {1}, strides = {1};
    FSDP_CHECK(strides == row_major_strides(sizes), UsageError,
               "\"{}\" is of a unit with partitioned axes and not contiguous: its parts cannot be put together", key);
    sizes.front() *= partition.count;
    elements = {elements.begin + partition.index * own, elements.end + partition.index * own};
  }
  return {std::move(key), std::move(sizes), std::move(strides), elements, std::move(values)};
}

LocalTensor whole_tensor(std::string key, const at::Tensor& tensor, const Partition& partition) {
  FSDP_CHECK(tensor.is_non_overlapping_and_dense(), UsageError,
             "\"{}\" is a part of another tensor's memory and cannot be stored in place: make it contiguous", key);
  const auto sizes = tensor.sizes().vec();
  return piece_of_whole(std::move(key), sizes,
                        tensor.is_contiguous() ? row_major_strides(sizes) : tensor.strides().vec(), {0, tensor.numel()},
                        tensor.detach().as_strided({tensor.numel()}, {1}), partition);
}

std::int64_t signature_of(const std::vector<LocalTensor>& tensors) {
  std::string text;
  for (const auto& t : tensors)
    text += t.key + ':' + std::to_string(t.elements.begin) + '-' + std::to_string(t.elements.end) + ';';
  return fingerprint(text);
}

}  // namespace

std::vector<std::int64_t> partition_claims(FsdpContext& context) {
  context.finalize();
  std::vector<std::int64_t> claims;
  for (const auto& unit : context.units()) {
    check_axes(*unit, context.mesh());
    claims.push_back(names_of(*unit));
    claims.push_back(place_of(*unit, context.mesh()));
  }
  return claims;
}

LocalState local_state(FsdpContext& context, ShardedOptimizer* optimizer, const NamedTensors& added,
                       const std::vector<std::vector<std::int64_t>>& claims) {
  const DeviceMesh& mesh = context.mesh();
  // Ranks with the same names at other places hold other parts: they lie one after the other. (Stages of a pipeline
  // have other names.)
  std::map<std::int64_t, std::set<std::int64_t>> places;
  for (const auto& of_rank : claims) {
    for (std::size_t i = 0; i + 1 < of_rank.size(); i += 2) places[of_rank[i]].insert(of_rank[i + 1]);
  }
  const auto partition_of = [&](const FsdpModule& unit) {
    const auto& all = places.at(names_of(unit));
    return Partition{std::distance(all.begin(), all.find(place_of(unit, mesh))), static_cast<std::int64_t>(all.size())};
  };
  FSDP_CHECK(mesh.runtime()->device() != c10::kMeta, UsageError,
             "a checkpoint needs values, and simulated ranks have none");
  FSDP_CHECK(mesh.world().backend_name() != "loopback", UsageError,
             "a checkpoint needs all ranks, and on a loopback there is one");
  std::set<std::string> keys;
  LocalState result;
  auto& blocks = result.blocks;
  const auto add = [&](LocalBlock& block, LocalTensor tensor) {
    FSDP_CHECK(keys.insert(tensor.key).second, UsageError,
               "there are two tensors \"{}\": give the modules of a context different names", tensor.key);
    block.tensors.push_back(std::move(tensor));
  };
  std::map<const FsdpParameterGroup*, std::vector<ShardedOptimizer::ParameterState>> states;
  if (optimizer != nullptr) {
    for (auto& state : optimizer->parameter_states()) {
      result.steps.push_back(
          {kStepPrefix + state.group->parameters()[state.parameter].name, partition_of(state.group->unit())});
      states[state.group].push_back(std::move(state));
    }
  }
  const auto groups = context.groups();
  for (FsdpParameterGroup* group : groups) {
    FSDP_CHECK(!group->on_meta(), UsageError,
               "unit \"{}\" has no values yet: call context->materialize(init) before a checkpoint is saved or loaded",
               group->unit().name());
    const Partition partition = partition_of(group->unit());
    const DBuffer& weight = group->main_weight();
    LocalBlock block;
    const auto add_piece = [&](const std::string& key, int index, const at::Tensor& values) {
      const auto& p = group->parameters()[index];
      const std::int64_t start = weight.layout().tensors()[index].begin;
      const ElementRange piece = weight.piece(index);
      add(block, piece_of_whole(key, p.sizes, p.strides, {piece.begin - start, piece.end - start}, values, partition));
    };
    for (std::size_t i = 0; i < group->parameters().size(); ++i) {
      const int index = static_cast<int>(i);
      add_piece("weights/" + group->parameters()[i].name, index, weight.slice(weight.piece(index)));
    }
    for (const auto& state : states[group]) {
      const auto& name = group->parameters()[state.parameter].name;
      for (const auto& [kind, values] : state.tensors)
        add_piece("optimizer/" + kind + '/' + name, state.parameter, values);
      // Of all ranks that hold some of the parameter, the one with its first element.
      if (weight.piece(state.parameter).begin == weight.layout().tensors()[state.parameter].begin)
        add(block, whole_tensor(kStepPrefix + name, state.step, partition));
    }
    blocks.push_back(std::move(block));
  }
  for (const auto& [group, state] : states) {
    FSDP_CHECK(state.empty() || std::ranges::find(groups, group) != groups.end(), UsageError,
               "the optimizer of this checkpoint updates parameter \"{}\", which is of another FsdpContext",
               group->parameters()[state.front().parameter].name);
  }
  for (const auto& unit : context.units()) {
    LocalBlock block;
    for (const auto& [name, tensor] : unit->buffers())
      add(block, whole_tensor("buffers/" + name, tensor, partition_of(*unit)));
    blocks.push_back(std::move(block));
  }
  const auto add_alone = [&](const std::string& key, const at::Tensor& tensor) {
    add(blocks.emplace_back(), whole_tensor(key, tensor, {}));
  };
  if (optimizer != nullptr) add_alone("optimizer/skipped_steps", optimizer->skipped_counter());
  for (const auto& [name, tensor] : added) add_alone("tensors/" + name, tensor);
  std::erase_if(blocks, [](const auto& block) { return block.tensors.empty(); });
  for (auto& block : blocks) block.signature = signature_of(block.tensors);
  return result;
}

std::string dtype_name(c10::ScalarType dtype, const std::string& key) {
  const auto found = std::find_if(kDtypes.begin(), kDtypes.end(), [&](const auto& d) { return d.first == dtype; });
  FSDP_CHECK(found != kDtypes.end(), UsageError, "\"{}\" has dtype {}, which a safetensors file cannot hold", key,
             c10::toString(dtype));
  return found->second;
}

c10::ScalarType dtype_of(const std::string& name) {
  const auto found = std::find_if(kDtypes.begin(), kDtypes.end(), [&](const auto& d) { return name == d.second; });
  FSDP_CHECK(found != kDtypes.end(), UsageError, "the dtype \"{}\" is unknown", name);
  return found->first;
}

}  // namespace fsdp::checkpoint
