// The part of FsdpParameterGroup that handles gradients: windows, their reduction, and the leaves' `.grad`.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/slice.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/dbuffer/accumulate.h"
#include "fsdp/dbuffer/redistribute.h"
#include "fsdp/module/fsdp_module.h"
#include "fsdp/module/gradient_packing.h"
#include "fsdp/module/parameter_group.h"

namespace fsdp {
namespace {

constexpr const char* kNoGradients = "the gradient buffer is not in use";

}  // namespace

// --- Gradients of a window ---

bool FsdpParameterGroup::open_window(bool is_last, ReducePolicy policy, BufferPool& accumulations) {
  is_last_ = is_last;
  if (!has_accumulated_)
    accumulated_placements_ = policy == ReducePolicy::last_microbatch ? partial_ : gradient_placements_;
  direct_ = deferred() && accumulated_placements_ == partial_ && (!is_last || has_accumulated_);
  std::fill(arrived_.begin(), arrived_.end(), 0);
  std::fill(written_.begin(), written_.end(), 0);
  if (packing_) packing_->begin_window();
  if (direct_) ensure_accumulated(accumulations);
  return is_last || !direct_;
}

void FsdpParameterGroup::attach_slot(BufferPool& slots, BufferPool::Source source) {
  if (direct_) return;  // its memory comes when the accumulated gradients are reduced
  slot_.storage().attach(slots.acquire(slot_.size(), source));
  clear_padding(slot_);
}

void FsdpParameterGroup::ensure_accumulated(BufferPool& accumulations) {
  if (!accumulated_ || accumulated_->placements() != accumulated_placements_) {
    FSDP_INVARIANT(!has_accumulated_);
    accumulated_ = std::make_unique<DBuffer>(mesh_, layout_, accumulated_placements_, dtypes_.gradient, kNoGradients);
    accumulated_views_.clear();
    for (std::size_t i = 0; accumulated_placements_ == partial_ && i < parameters_.size(); ++i) {
      accumulated_views_.push_back(
          accumulated_->tensor(static_cast<int>(i), parameters_[i].sizes, parameters_[i].strides));
    }
  }
  if (accumulated_->storage().attached()) return;
  accumulated_->storage().attach(accumulations.acquire(accumulated_->size()));
  if (accumulated_placements_ == partial_) clear_padding(*accumulated_);
}

// The reduce stream may still read it: it is kept until the end of backward has joined the streams.
void FsdpParameterGroup::free_accumulated(BufferPool& accumulations) {
  accumulations.release_later(accumulated_->storage().detach(), accumulated_->size());
  has_accumulated_ = false;
}

void FsdpParameterGroup::clear_padding(const DBuffer& buffer) {
  if (buffer.storage().data() == nullptr) return;
  const auto width = static_cast<std::int64_t>(c10::elementSize(buffer.dtype()));
  for (const ElementRange& gap : padding_) {
    if (packing_)
      packing_->clear(buffer.address(gap.begin), gap.length());
    else
      runtime().clear(buffer.address(gap.begin), bytes_of(Elements(gap.length()), width), runtime().compute_stream());
  }
}

bool FsdpParameterGroup::receive(int index, const at::Tensor& gradient) {
  const bool expected = arrived_[index] <= parameters_[index].aliases.size();
  FSDP_CHECK(expected || unit_.options().register_hooks, UsageError,
             "the gradient of parameter \"{}\" arrived twice before unit \"{}\" was complete: a parameter must be used "
             "in one graph per backward window (tied weights in a caller-driven schedule must be untied)",
             parameters_[index].name, unit_.name());
  if (expected) ++arrived_[index];
  if (!gradient.defined()) return expected;
  FSDP_CHECK(gradient.layout() == c10::kStrided, UsageError,
             "the gradient of parameter \"{}\" is sparse; only dense gradients can be sharded",
             parameters_[index].name);
  if (gradient.numel() == 0) {  // nothing to store
    written_[index] = 1;
    return expected;
  }
  at::Tensor& destination = destination_view(index);
  const bool overwrite = !written_[index] && !(direct_ && has_accumulated_);
  written_[index] = 1;
  if (destination.is_cpu() && gradient.strides() == destination.strides() && gradient.is_non_overlapping_and_dense()) {
    if (overwrite && gradient.scalar_type() == destination.scalar_type()) {
      std::memcpy(destination.mutable_data_ptr(), gradient.const_data_ptr(), gradient.nbytes());
    } else {
      accumulate_on_cpu({destination.mutable_data_ptr(),
                         destination.scalar_type(),
                         gradient.const_data_ptr(),
                         gradient.scalar_type(),
                         gradient.numel(),
                         1,
                         overwrite,
                         {},
                         0});
    }
    return expected;
  }
  if (packing_) {
    packing_->store(index, destination, gradient, overwrite);
    return expected;
  }
  at::NoGradGuard no_grad;
  if (overwrite)
    destination.copy_(gradient);
  else
    destination.add_(gradient);
  return expected;
}

FsdpParameterGroup::GradientPlace FsdpParameterGroup::claim_gradient(int index, bool wide_products) {
  const bool adds = written_[index] || (direct_ && has_accumulated_);
  const c10::ScalarType dtype = destination().dtype();
  const bool wide = wide_products && dtype == c10::kFloat && dtypes_.compute != c10::kDouble;
  if (adds ? !wide : (dtype != dtypes_.compute && !wide)) return {};
  if (packing_) packing_->hand_over(index, dtype);
  written_[index] = 1;
  return {destination_view(index), adds};
}

void FsdpParameterGroup::close_window() {
  const DBuffer& buffer = destination();
  for (std::size_t i = 0; i < parameters_.size(); ++i) used_[i] |= written_[i];
  if (packing_) {
    close_window_on_device(buffer);
  } else if (buffer.storage().data() != nullptr) {
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      if (written_[i]) {
        const auto begin = marks_begin_[i], end = marks_begin_[i + 1];
        mark_used_on_cpu(buffer.storage().data(), buffer.dtype(), std::span(marks_).subspan(begin, end - begin), 0);
      } else if (!(direct_ && has_accumulated_)) {
        const ElementRange tensor = layout_->tensors()[i];
        fill_unused_on_cpu(buffer.address(tensor.begin), buffer.dtype(), tensor.length());
      }
    }
  }
  if (direct_) has_accumulated_ = true;
}

void FsdpParameterGroup::close_window_on_device(const DBuffer& buffer) {
  const std::int64_t shard = layout_->padded_size().value() / layout_->shard_count();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const ElementRange tensor = layout_->tensors()[i];
    if (tensor.empty() || packing_->packed(static_cast<int>(i))) continue;
    if (written_[i])
      packing_->mark_used(buffer.address(tensor.begin), tensor.length(),
                          (tensor.begin / shard + 1) * shard - tensor.begin, shard);
    else if (!(direct_ && has_accumulated_))
      packing_->fill_unused(buffer.address(tensor.begin), tensor.length());
  }
  packing_->run(buffer.dtype());
}

void FsdpParameterGroup::drop_accumulated(BufferPool& accumulations) {
  std::fill(used_.begin(), used_.end(), 0);
  if (has_accumulated_) free_accumulated(accumulations);
}

void FsdpParameterGroup::abandon_window(BufferPool& slots, BufferPool& accumulations) {
  if (packing_) packing_->abandon();
  std::fill(used_.begin(), used_.end(), 0);
  if (slot_.storage().attached()) slots.release(slot_.storage().detach(), slot_.size());
  if (accumulated_ && accumulated_->storage().attached()) free_accumulated(accumulations);
  has_accumulated_ = false;
  zero_gradients(/*set_to_none=*/true);
}

// --- Reduction ---

void FsdpParameterGroup::enqueue_accumulate(const DBuffer& to, const DBuffer& from, ElementRange range, double divisor,
                                            bool overwrite, const Stream& stream) const {
  if (to.storage().data() == nullptr) return;
  AccumulateArguments arguments{to.address(range.begin),
                                to.dtype(),
                                from.address(range.begin),
                                from.dtype(),
                                range.length(),
                                divisor,
                                overwrite,
                                {},
                                range.begin};
  if (Kernels* device = kernels()) {
    const ScaledSum sum{arguments.destination,
                        arguments.destination_dtype,
                        arguments.source,
                        arguments.source_dtype,
                        arguments.count,
                        divisor,
                        overwrite};
    stream.enqueue([device, sum] { device->scaled_sum(sum); });
    return;
  }
  if (range == main_weight_.range()) arguments.marks = local_marks_;
  const bool small = bytes_of(Elements(range.length()), static_cast<std::int64_t>(c10::elementSize(to.dtype()))) <=
                     unit_.inline_limit();
  stream.enqueue([arguments] { accumulate_on_cpu(arguments); }, {.small = small});
}

void FsdpParameterGroup::prepare_reduction() {
  if (kernels() != nullptr && is_last_ && !any_gradient_defined())
    ensure_main_gradient(/*fresh=*/true, /*set_to_zero=*/false);
}

void FsdpParameterGroup::reduce(const Stream& stream, BufferPool& slots, BufferPool& accumulations, const char* label) {
  if (direct_ && !is_last_) return;  // all there is to do was adding
  if (direct_) {
    if (dtypes_.gradient == dtypes_.reduce) {
      slot_.storage().attach(accumulated_->storage().detach());
      slots.adopt_from(accumulations, slot_.size());
      has_accumulated_ = false;
    } else {
      slot_.storage().attach(slots.acquire(slot_.size()));
      order_after_compute(stream);
      enqueue_accumulate(slot_, *accumulated_, slot_.range(), 1, /*overwrite=*/true, stream);
      free_accumulated(accumulations);
    }
    reduce_to_main_gradient(slot_, stream, label);
  } else if (!deferred()) {
    reduce_to_main_gradient(slot_, stream, label);
  } else {
    const ElementRange range = reduce_in_place(slot_, accumulated_placements_, stream, label, {inboxes_}).range;
    if (!is_last_ || has_accumulated_) {
      ensure_accumulated(accumulations);
      if (!has_accumulated_) order_after_compute(stream);
      enqueue_accumulate(*accumulated_, slot_, range, 1, /*overwrite=*/!has_accumulated_, stream);
      has_accumulated_ = true;
      if (!is_last_) return;
      enqueue_accumulate(slot_, *accumulated_, range, 1, /*overwrite=*/true, stream);
      free_accumulated(accumulations);  // its next user writes it on the same stream
    }
    reduce_to_main_gradient(DBuffer::part_of(slot_, accumulated_placements_), stream, label);
  }
}

void FsdpParameterGroup::reduce_to_main_gradient(const DBuffer& sums, const Stream& stream, const char* label) {
  if (inboxes_.empty()) {  // the reduction need not wait for the memory that its result is added to
    const ElementRange range = reduce_in_place(sums, reduced_placements_, stream, label).range;
    FSDP_INVARIANT(range == main_weight_.range());
    const bool overwrite = prepare_main_gradient(stream);
    enqueue_accumulate(*main_gradient_.buffer, slot_, range, divisor_, overwrite, stream);
    return;
  }
  const bool overwrite = prepare_main_gradient(stream);
  const DBuffer& main = *main_gradient_.buffer;
  const SumDestination destination{main.address(main_weight_.range().begin), static_cast<float>(divisor_), main.dtype(),
                                   overwrite};
  const bool in_one_pass = main.dtype() != c10::kDouble;  // which adds in fp32
  const Reduced reduced = reduce_in_place(sums, reduced_placements_, stream, label,
                                          {.inboxes = inboxes_, .destination = in_one_pass ? &destination : nullptr});
  FSDP_INVARIANT(reduced.range == main_weight_.range());
  if (!reduced.delivered) enqueue_accumulate(main, slot_, reduced.range, divisor_, overwrite, stream);
}

// --- The main gradient and the leaves' .grad ---

bool FsdpParameterGroup::any_gradient_defined() const {
  return std::any_of(parameters_.begin(), parameters_.end(), [](const auto& p) { return p.leaf.grad().defined(); });
}

// True when only this group refers to the gradient's views and memory, so that both can be used again.
bool FsdpParameterGroup::gradient_views_unshared() const {
  for (const auto& view : main_gradient_.views) {
    if (view.use_count() != 1) return false;
  }
  return main_gradient_.buffer->storage().storage().use_count() == main_gradient_.views.size() + 1;
}

// Memory and views for the main gradient.
bool FsdpParameterGroup::ensure_main_gradient(bool fresh, bool set_to_zero) {
  auto& [buffer, views] = main_gradient_;
  if (!buffer || (fresh && !gradient_views_unshared())) {  // first use, or somebody kept an old gradient
    buffer = std::make_unique<DBuffer>(mesh_, layout_, strategy_.optimizer, dtypes_.gradient,
                                       "this gradient was freed by zero_grad");
    views.clear();
    for (std::size_t i = 0; i < parameters_.size(); ++i)
      views.push_back(buffer->slice(buffer->piece(static_cast<int>(i))));
  }
  if (buffer->storage().attached()) return false;
  if (set_to_zero)
    buffer->allocate();
  else
    buffer->allocate_unset();
  return true;
}

// Tensors that the user put in place of a leaf's gradient move into the main gradient; undefined ones stay undefined.
bool FsdpParameterGroup::adopt_gradients() {
  bool computes = ensure_main_gradient(/*fresh=*/false, /*set_to_zero=*/true);
  at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    at::Tensor& gradient = parameters_[i].leaf.mutable_grad();
    if (!gradient.defined() || gradient.is_same(main_gradient_.views[i])) continue;
    main_gradient_.views[i].copy_(gradient);
    gradient = main_gradient_.views[i];
    computes = true;
  }
  return computes;
}

// Before a reduction ends in the main gradient.
bool FsdpParameterGroup::prepare_main_gradient(const Stream& stream) {
  const bool accumulate = any_gradient_defined();
  // On a device what is overwritten, padding included, needs no zeros.
  const bool zeros = accumulate || kernels() == nullptr;
  bool computes = ensure_main_gradient(/*fresh=*/!accumulate, zeros);
  if (accumulate) computes |= adopt_gradients();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    at::Tensor& gradient = parameters_[i].leaf.mutable_grad();
    if (gradient.defined()) continue;
    if (accumulate) {
      main_gradient_.views[i].zero_();
      computes = true;
    }
    gradient = main_gradient_.views[i];
  }
  if (computes) order_after_compute(stream);
  return !accumulate;
}

bool FsdpParameterGroup::used_all() const {
  return std::all_of(used_.begin(), used_.end(), [](auto used) { return used != 0; });
}

bool FsdpParameterGroup::drop_unused_gradients() {
  const bool on_device = kernels() != nullptr;
  if (!main_gradient_.buffer || main_gradient_.buffer->storage().data() == nullptr ||
      (on_device && runtime().capturing())) {
    std::fill(used_.begin(), used_.end(), 0);
    return false;
  }
  const DBuffer& buffer = *main_gradient_.buffer;
  bool waited = false;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const bool used_here = std::exchange(used_[i], 0) != 0;  // then it was used
    const ElementRange piece = buffer.piece(static_cast<int>(i));
    at::Tensor& gradient = parameters_[i].leaf.mutable_grad();
    if (used_here || piece.empty() || !gradient.is_same(main_gradient_.views[i])) continue;
    if (on_device) {
      const at::Tensor first = gradient.slice(0, 0, 1).to(c10::kCPU);
      waited = true;
      if (is_marked_unused(first.const_data_ptr(), buffer.dtype())) gradient.reset();
    } else if (is_marked_unused(buffer.address(piece.begin), buffer.dtype())) {
      gradient.reset();
    }
  }
  return waited;
}

at::Tensor FsdpParameterGroup::gradient_slice(ElementRange packed) {
  if (!any_gradient_defined()) return {};
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& gradient = parameters_[i].leaf.grad();
    const bool ours = i < main_gradient_.views.size() && gradient.is_same(main_gradient_.views[i]);
    if (gradient.defined() && !ours) {
      adopt_gradients();
      break;
    }
  }
  return main_gradient_.buffer->slice(packed);
}

std::vector<at::Tensor> FsdpParameterGroup::defined_gradients() {
  const at::Tensor whole = gradient_slice(main_weight_.range());
  if (!whole.defined()) return {};
  std::vector<at::Tensor> some;
  for (const auto& p : parameters_) {
    if (p.leaf.grad().defined()) some.push_back(p.leaf.grad().detach());
  }
  if (some.size() == parameters_.size()) return {whole};  // padding is zero
  return some;
}

void FsdpParameterGroup::drop_gradient_memory() {
  auto& buffer = main_gradient_.buffer;
  if (!buffer || !buffer->storage().attached() || any_gradient_defined()) return;
  if (gradient_views_unshared()) {
    buffer->storage().detach().clear();
  } else {
    buffer.reset();
    main_gradient_.views.clear();
  }
}

void FsdpParameterGroup::zero_gradients(bool set_to_none) {
  for (auto& p : parameters_) {
    at::Tensor& gradient = p.leaf.mutable_grad();
    if (!gradient.defined()) continue;
    if (set_to_none)
      gradient.reset();
    else
      gradient.zero_();
  }
  if (set_to_none) drop_gradient_memory();
}

}  // namespace fsdp
