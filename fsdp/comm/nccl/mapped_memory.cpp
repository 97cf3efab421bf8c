#include "fsdp/comm/nccl/mapped_memory.h"

#include <unistd.h>

#include "fsdp/base/check.h"
#include "fsdp/runtime/cuda/driver_function.h"

namespace fsdp {
namespace {

// Found once; leaked, for pieces may outlive statics.
struct Driver {
  decltype(&cuMemCreate) create;
  decltype(&cuMemRelease) release;
  decltype(&cuMemExportToShareableHandle) export_handle;
  decltype(&cuMemImportFromShareableHandle) import_handle;
  decltype(&cuMemAddressReserve) reserve;
  decltype(&cuMemAddressFree) free;
  decltype(&cuMemMap) map;
  decltype(&cuMemUnmap) unmap;
  decltype(&cuMemSetAccess) set_access;
  decltype(&cuMemGetAllocationGranularity) granularity;
  decltype(&cuGetErrorName) error_name;

  Driver() {
    find_driver_function("cuMemCreate", create);
    find_driver_function("cuMemRelease", release);
    find_driver_function("cuMemExportToShareableHandle", export_handle);
    find_driver_function("cuMemImportFromShareableHandle", import_handle);
    find_driver_function("cuMemAddressReserve", reserve);
    find_driver_function("cuMemAddressFree", free);
    find_driver_function("cuMemMap", map);
    find_driver_function("cuMemUnmap", unmap);
    find_driver_function("cuMemSetAccess", set_access);
    find_driver_function("cuMemGetAllocationGranularity", granularity);
    find_driver_function("cuGetErrorName", error_name);
  }
};

const Driver& driver() {
  static const Driver* const found = new Driver;
  return *found;
}

void check(CUresult code, const char* what) {
  if (code == CUDA_SUCCESS) [[likely]]
    return;
  const char* name = "?";
  driver().error_name(code, &name);
  detail::fail<Error>("CUDA: {} failed: {}", what, name);
}

std::size_t bytes(Bytes size) { return static_cast<std::size_t>(size.value()); }

CUmemLocation here() {
  int device = 0;
  FSDP_CUDA_CHECK(cudaGetDevice(&device));
  return {CU_MEM_LOCATION_TYPE_DEVICE, device};
}

CUmemAllocationProp properties(bool shareable) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = here();
  properties.requestedHandleTypes = shareable ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : CU_MEM_HANDLE_TYPE_NONE;
  return properties;
}

}  // namespace

Bytes piece_granularity() {
  const CUmemAllocationProp wanted = properties(true);
  std::size_t size = 0;
  if (driver().granularity(&size, &wanted, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED) != CUDA_SUCCESS) return Bytes(0);
  return Bytes(static_cast<std::int64_t>(size));
}

std::shared_ptr<MemoryPiece> MemoryPiece::create(Bytes size, bool shareable) {
  const CUmemAllocationProp wanted = properties(shareable);
  CUmemGenericAllocationHandle handle = 0;
  check(driver().create(&handle, bytes(size), &wanted, 0), "cuMemCreate");
  return std::shared_ptr<MemoryPiece>(new MemoryPiece(handle, size));
}

std::shared_ptr<MemoryPiece> MemoryPiece::create_rounded(Bytes size, bool shareable) {
  const std::int64_t granularity = piece_granularity().value();
  FSDP_CHECK(granularity > 0, Error, "the device cannot share memory with other processes");
  return create(Bytes((size.value() + granularity - 1) / granularity * granularity), shareable);
}

std::shared_ptr<MemoryPiece> MemoryPiece::import(int descriptor, Bytes size) {
  CUmemGenericAllocationHandle handle = 0;
  const CUresult code = driver().import_handle(&handle, reinterpret_cast<void*>(static_cast<std::intptr_t>(descriptor)),
                                               CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  close(descriptor);
  check(code, "cuMemImportFromShareableHandle");
  return std::shared_ptr<MemoryPiece>(new MemoryPiece(handle, size));
}

MemoryPiece::~MemoryPiece() { driver().release(handle_); }

int MemoryPiece::export_descriptor() const {
  int descriptor = -1;
  check(driver().export_handle(&descriptor, handle_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
        "cuMemExportToShareableHandle");
  return descriptor;
}

MappedRange::MappedRange(std::vector<std::shared_ptr<MemoryPiece>> pieces) : pieces_(std::move(pieces)) {
  for (const auto& piece : pieces_) size_ += piece->size();
  check(driver().reserve(&base_, bytes(size_), 0, 0, 0), "cuMemAddressReserve");
  std::size_t mapped = 0;
  CUdeviceptr at = base_;
  CUresult code = CUDA_SUCCESS;
  for (const auto& piece : pieces_) {
    code = driver().map(at, bytes(piece->size()), 0, piece->handle(), 0);
    if (code != CUDA_SUCCESS) break;
    at += bytes(piece->size());
    ++mapped;
  }
  if (code == CUDA_SUCCESS) {
    const CUmemAccessDesc access{here(), CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    code = driver().set_access(base_, bytes(size_), &access, 1);
  }
  if (code == CUDA_SUCCESS) return;
  unmap(mapped);
  check(code, "cuMemMap");
}

MappedRange::~MappedRange() { unmap(pieces_.size()); }

void MappedRange::unmap(std::size_t count) {
  CUdeviceptr at = base_;
  for (std::size_t i = 0; i < count; ++i) {
    driver().unmap(at, bytes(pieces_[i]->size()));
    at += bytes(pieces_[i]->size());
  }
  driver().free(base_, bytes(size_));
}

}  // namespace fsdp
