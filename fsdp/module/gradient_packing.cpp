#include "fsdp/module/gradient_packing.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <utility>

namespace fsdp {
namespace {

constexpr std::size_t kLarge = 1 << 20;  // bytes

}  // namespace

void GradientPacking::begin_window() { std::fill(packed_.begin(), packed_.end(), 0); }

void GradientPacking::clear(void* to, std::int64_t count) {
  entries_.push_back({.action = PackEntry::Action::clear, .to = to, .count = count});
}

void GradientPacking::store(int index, const at::Tensor& destination, const at::Tensor& gradient, bool overwrite) {
  if (!overwrite) run(destination.scalar_type());  // what it adds to may still wait
  at::Tensor dense = gradient;
  if (gradient.strides() != destination.strides() || !gradient.is_non_overlapping_and_dense()) {
    at::NoGradGuard no_grad;
    dense = at::empty_strided(destination.sizes(), destination.strides(), gradient.options()).copy_(gradient);
  }
  const bool at_once = !overwrite || dense.nbytes() >= kLarge;
  entries_.push_back({.action = overwrite ? PackEntry::Action::copy : PackEntry::Action::add,
                      .to = destination.mutable_data_ptr(),
                      .from = dense.const_data_ptr(),
                      .from_dtype = dense.scalar_type(),
                      .count = dense.numel()});
  reads_.push_back(std::move(dense));
  packed_[index] = 1;
  if (at_once) run(destination.scalar_type());
}

void GradientPacking::hand_over(int index, c10::ScalarType dtype) {
  if (std::exchange(packed_[index], 0) != 0) run(dtype);
}

void GradientPacking::mark_used(void* to, std::int64_t count, std::int64_t first_edge, std::int64_t edge_distance) {
  entries_.push_back({.action = PackEntry::Action::mark_used,
                      .to = to,
                      .count = count,
                      .first_edge = first_edge,
                      .edge_distance = edge_distance});
}

void GradientPacking::fill_unused(void* to, std::int64_t count) {
  entries_.push_back({.action = PackEntry::Action::fill_unused, .to = to, .count = count});
}

void GradientPacking::run(c10::ScalarType dtype) {
  if (!entries_.empty()) kernels_.pack(entries_, dtype);
  abandon();
}

void GradientPacking::abandon() {
  entries_.clear();
  reads_.clear();
}

}  // namespace fsdp
