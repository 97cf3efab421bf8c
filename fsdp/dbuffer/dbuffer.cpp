#include "fsdp/dbuffer/dbuffer.h"

#include "fsdp/base/check.h"

namespace fsdp {

DBuffer::DBuffer(std::shared_ptr<const SubMesh> mesh, std::shared_ptr<const GlobalLayout> layout,
                 PlacementList placements, c10::ScalarType dtype, const std::string& released_message)
    : mesh_(std::move(mesh)),
      layout_(std::move(layout)),
      placements_(std::move(placements)),
      dtype_(dtype),
      range_(layout_->shard(placements_, mesh_->sizes(), mesh_->coordinates())),
      storage_(std::make_shared<FlatStorage>(mesh_->mesh().runtime()->device(), size(), released_message)),
      origin_(range_.begin) {}

DBuffer DBuffer::part_of(const DBuffer& whole, PlacementList placements) {
  DBuffer part = whole;
  part.placements_ = std::move(placements);
  part.range_ = part.layout_->shard(part.placements_, part.mesh_->sizes(), part.mesh_->coordinates());
  FSDP_INVARIANT(part.range_.begin >= whole.range_.begin && part.range_.end <= whole.range_.end);
  return part;
}

void DBuffer::allocate() {
  allocate_unset();
  Runtime& runtime = *mesh_->mesh().runtime();
  runtime.clear(storage_->data(), size(), runtime.compute_stream());
}

void DBuffer::allocate_unset() {
  Runtime& runtime = *mesh_->mesh().runtime();
  storage_->attach(runtime.allocate(size(), runtime.compute_stream()));
}

void* DBuffer::address(std::int64_t coordinate) const {
  auto* base = static_cast<std::byte*>(storage_->data());
  if (base == nullptr) return nullptr;
  return base + (coordinate - origin_) * static_cast<std::int64_t>(c10::elementSize(dtype_));
}

at::Tensor DBuffer::slice(ElementRange packed) const {
  FSDP_INVARIANT(packed.begin >= range_.begin && packed.end <= range_.end);
  return storage_->view(dtype_, packed.begin - origin_, packed.length());
}

at::Tensor DBuffer::tensor(int index, at::IntArrayRef sizes, at::IntArrayRef strides) const {
  const ElementRange packed = layout_->tensors()[index];
  FSDP_INVARIANT(packed.begin >= range_.begin && packed.end <= range_.end);
  return storage_->view(dtype_, packed.begin - origin_, sizes, strides);
}

}  // namespace fsdp
