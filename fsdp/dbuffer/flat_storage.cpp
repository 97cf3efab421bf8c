#include "fsdp/dbuffer/flat_storage.h"

#include <c10/core/CPUAllocator.h>

namespace fsdp {
namespace {

// The storage's own throw flag is private; an explicit instantiation may name it. The flag is what makes reads of a
// released weight throw in every operator, at no cost while it is gathered.
template <auto Member>
struct Access {
  friend bool& throw_flag(c10::StorageImpl& storage) { return storage.*Member; }
};
bool& throw_flag(c10::StorageImpl& storage);
template struct Access<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

}  // namespace

FlatStorage::FlatStorage(c10::Device device, Bytes size, const std::string& released_message) : size_(size) {
  storage_ = c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), size.value(),
                                                                c10::DataPtr(nullptr, device), c10::GetCPUAllocator(),
                                                                /*resizable=*/false));
  if (device.is_meta()) return;  // nothing to read
  storage_.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(released_message);
}

void FlatStorage::set_released_message(const std::string& message) {
  storage_.unsafeGetStorageImpl()->get_extra_meta().custom_data_ptr_error_msg_ = message;
}

void FlatStorage::attach(c10::DataPtr data) {
  auto* impl = storage_.unsafeGetStorageImpl();
  throw_flag(*impl) = false;  // before the pointer is set, which refreshes what depends on the flag
  impl->set_data_ptr_noswap(std::move(data));
  attached_ = true;
}

c10::DataPtr FlatStorage::detach() {
  auto* impl = storage_.unsafeGetStorageImpl();
  c10::DataPtr data = std::move(impl->_mutable_data_ptr_no_checks());
  const c10::Device device = data.device();
  throw_flag(*impl) = !device.is_meta();
  impl->set_data_ptr_noswap(c10::DataPtr(nullptr, device));
  attached_ = false;
  return data;
}

c10::DataPtr FlatStorage::borrow() const {
  auto* impl = storage_.unsafeGetStorageImpl();
  c10::raw::intrusive_ptr::incref(impl);
  return {data(), impl, [](void* owner) { c10::raw::intrusive_ptr::decref(static_cast<c10::StorageImpl*>(owner)); },
          storage_.device()};
}

void* FlatStorage::data() const { return storage_.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get(); }

at::Tensor FlatStorage::view(c10::ScalarType dtype, std::int64_t offset, at::IntArrayRef sizes,
                             at::IntArrayRef strides) const {
  const c10::Device device = storage_.device();
  const auto key = device.is_meta()   ? c10::DispatchKey::Meta
                   : device.is_cuda() ? c10::DispatchKey::CUDA
                                      : c10::DispatchKey::CPU;
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage_), c10::DispatchKeySet(key),
                                                         c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return tensor;
}

at::Tensor FlatStorage::view(c10::ScalarType dtype, std::int64_t offset, std::int64_t count) const {
  return view(dtype, offset, {count}, {1});
}

}  // namespace fsdp
