// How the data of a unit rests on each axis of a mesh, and the presets that name the common strategies.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

namespace fsdp {

enum class Placement : std::uint8_t {
  replicate,  // every rank of the axis holds all of it
  partial,    // every rank holds all of it, the true value is the sum over the axis
  flat,       // every rank holds one contiguous share of the packed elements
};

[[nodiscard]] const char* to_string(Placement placement);

using PlacementList = std::vector<Placement>;  // [axis]
[[nodiscard]] std::string to_string(const PlacementList& placements);

// The placements of one strategy: how the compute weight, the accumulated gradient and the main (optimizer) weight
// rest. The three lists have one entry per axis, in the order of `axes`. Several flat axes split the packed range one
// inside the other: the last axis makes the large pieces, the first one the smallest.
struct Strategy {
  std::string name;
  std::vector<std::string> axes;
  PlacementList parameter;  // replicate or flat
  PlacementList gradient;   // partial or flat, as it rests between microbatches
  PlacementList optimizer;  // replicate or flat; finished gradients take this placement as well

  // Throws UsageError when the lists do not fit together, naming axis and placements.
  void validate() const;
};

// Presets; each takes one axis or several that act as one. Parameter / gradient / optimizer:
Strategy ddp(std::vector<std::string> axes);    // replicate / partial / replicate
Strategy zero1(std::vector<std::string> axes);  // replicate / partial / flat
Strategy zero2(std::vector<std::string> axes);  // replicate / flat / flat
Strategy zero3(std::vector<std::string> axes);  // flat / flat / flat
inline Strategy ddp(std::string axis) { return ddp(std::vector{std::move(axis)}); }
inline Strategy ddp(std::initializer_list<std::string> axes) { return ddp(std::vector(axes)); }
inline Strategy zero1(std::string axis) { return zero1(std::vector{std::move(axis)}); }
inline Strategy zero1(std::initializer_list<std::string> axes) { return zero1(std::vector(axes)); }
inline Strategy zero2(std::string axis) { return zero2(std::vector{std::move(axis)}); }
inline Strategy zero2(std::initializer_list<std::string> axes) { return zero2(std::vector(axes)); }
inline Strategy zero3(std::string axis) { return zero3(std::vector{std::move(axis)}); }
inline Strategy zero3(std::initializer_list<std::string> axes) { return zero3(std::vector(axes)); }

// Hybrid: sharded over `inner` as zero3; copies over `outer` whose gradients are summed on the last microbatch only.
Strategy hsdp(std::string outer, std::string inner);
// As hsdp, with the optimizer state sharded over `outer` as well.
Strategy hfsdp(std::string outer, std::string inner);

}  // namespace fsdp
