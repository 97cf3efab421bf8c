// A flat buffer that holds many tensors under a placement: one rank's share of one packed range.
//
// The layout gives the coordinates, the placements give this rank's range of them, the storage gives memory that may
// come and go. Host thread of the rank only.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "fsdp/dbuffer/flat_storage.h"
#include "fsdp/layout/global_layout.h"
#include "fsdp/mesh/sub_mesh.h"

namespace fsdp {

class DBuffer {
 public:
  // Without memory until `storage().attach` or `allocate`. Reads of it throw `released_message` until then.
  DBuffer(std::shared_ptr<const SubMesh> mesh, std::shared_ptr<const GlobalLayout> layout, PlacementList placements,
          c10::ScalarType dtype, const std::string& released_message);

  // A buffer over the part of `whole` that `placements` leave to this rank; shares its storage and dtype.
  static DBuffer part_of(const DBuffer& whole, PlacementList placements);

  // Memory of its own, for the stream that computes: zero-filled on it, or with unspecified values.
  void allocate();
  void allocate_unset();

  [[nodiscard]] const SubMesh& mesh() const { return *mesh_; }
  [[nodiscard]] const GlobalLayout& layout() const { return *layout_; }
  [[nodiscard]] const PlacementList& placements() const { return placements_; }
  [[nodiscard]] c10::ScalarType dtype() const { return dtype_; }
  [[nodiscard]] ElementRange range() const { return range_; }  // of the packed coordinates
  [[nodiscard]] Bytes size() const {
    return bytes_of(Elements(range_.length()), static_cast<std::int64_t>(c10::elementSize(dtype_)));
  }

  [[nodiscard]] FlatStorage& storage() const { return *storage_; }

  // Address of a packed coordinate inside `range()`; null without data.
  [[nodiscard]] void* address(std::int64_t coordinate) const;
  // Views, made anew at each call: all of it; part of it; one whole tensor; the part of a tensor that lies here.
  [[nodiscard]] at::Tensor flat() const { return slice(range_); }
  [[nodiscard]] at::Tensor slice(ElementRange packed) const;
  [[nodiscard]] at::Tensor tensor(int index, at::IntArrayRef sizes, at::IntArrayRef strides) const;
  [[nodiscard]] ElementRange piece(int index) const {
    return intersect(range_, layout_->tensors()[index]);
  }  // packed coordinates

 private:
  std::shared_ptr<const SubMesh> mesh_;
  std::shared_ptr<const GlobalLayout> layout_;
  PlacementList placements_;
  c10::ScalarType dtype_;
  ElementRange range_;
  std::shared_ptr<FlatStorage> storage_;
  std::int64_t origin_ = 0;  // packed coordinate of the storage's first element
};

}  // namespace fsdp
