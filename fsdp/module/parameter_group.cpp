#include "fsdp/module/parameter_group.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstring>
#include <iterator>

#include "fsdp/base/check.h"
#include "fsdp/dbuffer/accumulate.h"
#include "fsdp/dbuffer/redistribute.h"
#include "fsdp/module/fsdp_module.h"
#include "fsdp/module/grad_accumulator.h"

namespace fsdp {
namespace {

std::shared_ptr<const GlobalLayout> make_layout(const std::vector<ParameterInfo>& parameters, const SubMesh& mesh, const Strategy& strategy) {
  std::vector<std::int64_t> sizes;
  for (const auto& parameter : parameters) sizes.push_back(parameter.parameter.numel());
  std::int64_t shards = 1;  // what is flat for parameters or gradients is flat for the optimizer too
  for (std::size_t axis = 0; axis < strategy.axes.size(); ++axis) {
    if (strategy.optimizer[axis] == Placement::flat) shards *= mesh.sizes()[axis];
  }
  return std::make_shared<GlobalLayout>(sizes, shards);
}

DBuffer make_main_weight(const DBuffer& model, const std::shared_ptr<const SubMesh>& mesh, const std::shared_ptr<const GlobalLayout>& layout,
                         const Strategy& strategy, c10::ScalarType dtype) {
  if (dtype == model.dtype()) return DBuffer::part_of(model, strategy.optimizer);
  return DBuffer(mesh, layout, strategy.optimizer, dtype, "the main weight has no memory");
}

// `placements` on axes of several ranks, replicate on axes of one.
PlacementList where_ranks_differ(PlacementList placements, const SubMesh& mesh) {
  for (std::size_t axis = 0; axis < placements.size(); ++axis) {
    if (mesh.sizes()[axis] == 1) placements[axis] = Placement::replicate;
  }
  return placements;
}

constexpr const char* kNoGradients = "the gradient buffer is not in use";

}  // namespace

FsdpParameterGroup::FsdpParameterGroup(FsdpModule& unit, std::shared_ptr<const SubMesh> mesh, std::vector<ParameterInfo> parameters, const Dtypes& dtypes,
                                       bool trainable, bool synchronize)
    : unit_(unit), mesh_(std::move(mesh)), parameters_(std::move(parameters)), dtypes_(dtypes), trainable_(trainable),
      replicated_(strategy().axes.size(), Placement::replicate),
      partial_(where_ranks_differ(PlacementList(strategy().axes.size(), Placement::partial), *mesh_)),
      gradient_placements_(where_ranks_differ(strategy().gradient, *mesh_)), reduced_placements_(where_ranks_differ(strategy().optimizer, *mesh_)),
      layout_(make_layout(parameters_, *mesh_, strategy())),
      model_weight_(mesh_, layout_, strategy().parameter, dtypes.compute, "the model weight has no memory"),
      main_weight_(make_main_weight(model_weight_, mesh_, layout_, strategy(), dtypes.main)),
      whole_(strategy().parameter == replicated_ ? model_weight_ : DBuffer(mesh_, layout_, replicated_, dtypes.compute, "the weights are sharded")),
      slot_(mesh_, layout_, partial_, dtypes.reduce, kNoGradients) {
  releasable_ = strategy().parameter != replicated_;
  refresh_needed_ = dtypes.compute != dtypes.main || strategy().parameter != strategy().optimizer;
  divisor_ = unit.options().gradient_divisor.value_or(mesh_->rank_count());
  on_meta_ = std::any_of(parameters_.begin(), parameters_.end(), [](const auto& p) { return p.parameter.is_meta(); }) &&
             mesh_->mesh().runtime()->device() != c10::kMeta;
  model_weight_.allocate();
  if (!main_weight_.storage().attached()) main_weight_.allocate();
  if (mesh_->mesh().runtime()->device() != c10::kMeta && !on_meta_) pack_values(synchronize);
  install_views();
  make_leaves();
  find_marks();
  if (trainable_) install_accumulators();
  accumulated_placements_ = gradient_placements_;
}

FsdpParameterGroup::~FsdpParameterGroup() {
  for (auto& accumulator : accumulators_) accumulator->detach_from_group();
}

const Strategy& FsdpParameterGroup::strategy() const { return unit_.options().placements; }
const PlacementList& FsdpParameterGroup::optimizer_placements() const { return strategy().optimizer; }

// --- Construction ---

void FsdpParameterGroup::pack_values(bool synchronize) {
  at::NoGradGuard no_grad;
  DBuffer whole_main(mesh_, layout_, replicated_, dtypes_.main, "");
  whole_main.allocate();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const auto& p = parameters_[i];
    whole_main.tensor(static_cast<int>(i), p.sizes, p.strides).copy_(p.parameter);
  }
  if (synchronize) {
    const Stream stream = mesh_->mesh().runtime()->compute_stream();
    for (std::size_t axis = 0; axis < strategy().axes.size(); ++axis) {
      mesh_->communicator(static_cast<int>(axis), Use::gather)
          .broadcast(whole_main.address(0), layout_->padded_size(), dtypes_.main, Rank(0), stream, "FSDP:broadcast of initial weights");
    }
    stream.synchronize();
  }
  store_shards(whole_main);
}

void FsdpParameterGroup::store_shards(const DBuffer& whole_main) {
  main_weight_.flat().copy_(whole_main.slice(main_weight_.range()));
  epoch_ = -1;
}

void FsdpParameterGroup::install_views() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    auto& p = parameters_[i];
    // The module's own tensor stays the same object: only what it looks at changes.
    const at::Tensor view = whole_.tensor(static_cast<int>(i), p.sizes, p.strides);
    p.parameter.unsafeGetTensorImpl()->shallow_copy_from(view.getIntrusivePtr());
    slot_views_.push_back(slot_.tensor(static_cast<int>(i), p.sizes, p.strides));
  }
}

void FsdpParameterGroup::make_leaves() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    auto& p = parameters_[i];
    p.leaf = main_weight_.slice(main_weight_.piece(static_cast<int>(i)));
    p.leaf.set_requires_grad(trainable_);
  }
}

void FsdpParameterGroup::find_marks() {
  const std::int64_t shard = layout_->padded_size().value() / layout_->shard_count();
  std::int64_t end_of_previous = 0;
  for (const ElementRange& tensor : layout_->tensors()) {
    marks_begin_.push_back(static_cast<int>(marks_.size()));
    if (!tensor.empty()) {
      marks_.push_back(tensor.begin);
      for (std::int64_t edge = (tensor.begin / shard + 1) * shard; edge < tensor.end; edge += shard) marks_.push_back(edge);
    }
    if (tensor.begin > end_of_previous) padding_.push_back({end_of_previous, tensor.begin});
    end_of_previous = tensor.end;
  }
  marks_begin_.push_back(static_cast<int>(marks_.size()));
  if (layout_->padded_size().value() > end_of_previous) padding_.push_back({end_of_previous, layout_->padded_size().value()});
  const ElementRange mine = main_weight_.range();
  std::copy_if(marks_.begin(), marks_.end(), std::back_inserter(local_marks_), [&](std::int64_t mark) { return mark >= mine.begin && mark < mine.end; });
}

void FsdpParameterGroup::install_accumulators() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    auto& p = parameters_[i];
    accumulators_.push_back(std::make_shared<GradAccumulator>(*this, static_cast<int>(i), p.parameter));
    torch::autograd::impl::set_grad_accumulator(p.parameter, std::weak_ptr<torch::autograd::Node>(accumulators_.back()));
  }
  arrived_.resize(parameters_.size());
  written_.resize(parameters_.size());
}

void FsdpParameterGroup::set_names(const std::vector<std::string>& module_paths) {
  std::string names;
  for (auto& p : parameters_) {
    const auto& path = module_paths[p.module_index];
    if (!path.empty()) p.name = path + "." + p.name;
    if (names.size() < 200) names += (names.empty() ? "" : ", ") + p.name;
    else if (!names.ends_with(" ...")) names += " ...";
  }
  if (!releasable_) return;
  whole_.storage().set_released_message(fmt::format(
      "a weight of unit \"{}\" was read while it is sharded (its parameters: {}). Run the unit through its wrapped type, not through a pointer to the base "
      "type; run other methods with fsdp::call; read weights inside context->unshard_scope(unit)",
      unit_.name(), names));
}

void FsdpParameterGroup::materialize(const std::function<void(const std::string&, at::Tensor&)>& fill) {
  if (!on_meta_) return;
  at::NoGradGuard no_grad;
  DBuffer whole_main(mesh_, layout_, replicated_, dtypes_.main, "");
  whole_main.allocate();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    auto& p = parameters_[i];
    at::Tensor value = whole_main.tensor(static_cast<int>(i), p.sizes, p.strides);
    fill(p.name, value);
  }
  store_shards(whole_main);
  on_meta_ = false;
}

// --- Weights ---

void FsdpParameterGroup::refresh(std::int64_t epoch, const Stream& stream, const char* label) {
  if (epoch_ == epoch) return;
  epoch_ = epoch;
  if (!refresh_needed_) return;
  const DBuffer own = DBuffer::part_of(model_weight_, strategy().optimizer);
  if (dtypes_.compute != dtypes_.main) enqueue_accumulate(own, main_weight_, own.range(), 1, /*overwrite=*/true, stream);
  if (strategy().parameter != strategy().optimizer) gather(own, model_weight_, stream, label);
}

void FsdpParameterGroup::gather_whole(BufferPool& pool, const Stream& stream, const char* label) {
  if (!releasable_) return;
  whole_.storage().attach(pool.acquire(whole_.size()));
  gather(model_weight_, whole_, stream, label);
}

void FsdpParameterGroup::release_whole(BufferPool& pool) {
  if (releasable_) pool.release(whole_.storage().detach(), whole_.size());
}

at::Tensor FsdpParameterGroup::full_tensor(int index, bool gradient, const Stream& stream) {
  at::NoGradGuard no_grad;
  const auto& p = parameters_[index];
  DBuffer whole_main(mesh_, layout_, replicated_, dtypes_.main, "");
  whole_main.allocate();
  DBuffer source = main_weight_;
  if (gradient) {
    source = DBuffer(mesh_, layout_, strategy().optimizer, dtypes_.main, "");
    source.allocate();
    if (p.leaf.grad().defined()) source.slice(source.piece(index)).copy_(p.leaf.grad());
  }
  gather(source, whole_main, stream, "FSDP:full_tensor");
  stream.synchronize();
  return whole_main.tensor(index, p.sizes, p.strides).clone();
}

// --- Gradients of a window ---

bool FsdpParameterGroup::open_window(bool is_last, ReducePolicy policy, BufferPool& accumulations) {
  is_last_ = is_last;
  if (!has_accumulated_) accumulated_placements_ = policy == ReducePolicy::last_microbatch ? partial_ : gradient_placements_;
  direct_ = deferred() && accumulated_placements_ == partial_ && (!is_last || has_accumulated_);
  std::fill(arrived_.begin(), arrived_.end(), 0);
  std::fill(written_.begin(), written_.end(), 0);
  if (direct_) ensure_accumulated(accumulations);
  return is_last || !direct_;
}

void FsdpParameterGroup::attach_slot(BufferPool& slots) {
  if (direct_) return;  // its memory comes when the accumulated gradients are reduced
  slot_.storage().attach(slots.acquire(slot_.size()));
  clear_padding(slot_);
}

void FsdpParameterGroup::ensure_accumulated(BufferPool& accumulations) {
  if (!accumulated_ || accumulated_->placements() != accumulated_placements_) {
    FSDP_INVARIANT(!has_accumulated_);
    accumulated_ = std::make_unique<DBuffer>(mesh_, layout_, accumulated_placements_, dtypes_.main, kNoGradients);
    accumulated_views_.clear();
    for (std::size_t i = 0; accumulated_placements_ == partial_ && i < parameters_.size(); ++i) {
      accumulated_views_.push_back(accumulated_->tensor(static_cast<int>(i), parameters_[i].sizes, parameters_[i].strides));
    }
  }
  if (accumulated_->storage().attached()) return;
  accumulated_->storage().attach(accumulations.acquire(accumulated_->size()));
  if (accumulated_placements_ == partial_) clear_padding(*accumulated_);
}

void FsdpParameterGroup::free_accumulated(BufferPool& accumulations) {
  accumulations.release(accumulated_->storage().detach(), accumulated_->size());
  has_accumulated_ = false;
}

void FsdpParameterGroup::clear_padding(const DBuffer& buffer) const {
  if (buffer.storage().data() == nullptr) return;
  for (const ElementRange& gap : padding_) {
    std::memset(buffer.address(gap.begin), 0, static_cast<std::size_t>(gap.length()) * c10::elementSize(buffer.dtype()));
  }
}

void FsdpParameterGroup::receive(int index, const at::Tensor& gradient) {
  FSDP_CHECK(!arrived_[index], UsageError,
             "the gradient of parameter \"{}\" arrived twice before unit \"{}\" was complete: a parameter must be used in one graph per backward window "
             "(tied weights in a caller-driven schedule must be untied)",
             parameters_[index].name, unit_.name());
  arrived_[index] = 1;
  if (!gradient.defined()) return;
  FSDP_CHECK(gradient.layout() == c10::kStrided, UsageError, "the gradient of parameter \"{}\" is sparse; only dense gradients can be sharded",
             parameters_[index].name);
  at::Tensor& destination = destination_view(index);
  const bool overwrite = !written_[index] && !(direct_ && has_accumulated_);
  written_[index] = 1;
  if (destination.is_cpu() && gradient.strides() == destination.strides() && gradient.is_non_overlapping_and_dense()) {
    if (overwrite && gradient.scalar_type() == destination.scalar_type()) {
      std::memcpy(destination.mutable_data_ptr(), gradient.const_data_ptr(), gradient.nbytes());
    } else {
      accumulate_on_cpu({destination.mutable_data_ptr(), destination.scalar_type(), gradient.const_data_ptr(), gradient.scalar_type(), gradient.numel(), 1,
                         overwrite, {}, 0});
    }
    return;
  }
  at::NoGradGuard no_grad;
  if (overwrite) destination.copy_(gradient);
  else destination.add_(gradient);
}

at::Tensor FsdpParameterGroup::claim_gradient(int index) {
  if (direct_ && has_accumulated_) return {};
  if (written_[index] || destination().dtype() != dtypes_.compute) return {};
  written_[index] = 1;
  return destination_view(index);
}

void FsdpParameterGroup::close_window() {
  const DBuffer& buffer = destination();
  if (buffer.storage().data() != nullptr) {
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

void FsdpParameterGroup::abandon_window(BufferPool& slots, BufferPool& accumulations) {
  if (slot_.storage().attached()) slots.release(slot_.storage().detach(), slot_.size());
  if (accumulated_ && accumulated_->storage().attached()) free_accumulated(accumulations);
  has_accumulated_ = false;
  zero_gradients(/*set_to_none=*/true);
}

// --- Reduction ---

void FsdpParameterGroup::enqueue_accumulate(const DBuffer& to, const DBuffer& from, ElementRange range, double divisor, bool overwrite,
                                            const Stream& stream) const {
  if (to.storage().data() == nullptr) return;
  AccumulateArguments arguments{to.address(range.begin), to.dtype(), from.address(range.begin), from.dtype(), range.length(), divisor, overwrite, {}, range.begin};
  if (range == main_weight_.range()) arguments.marks = local_marks_;
  const bool small = bytes_of(Elements(range.length()), static_cast<std::int64_t>(c10::elementSize(to.dtype()))) <= unit_.inline_limit();
  stream.enqueue([arguments] { accumulate_on_cpu(arguments); }, {.small = small});
}

void FsdpParameterGroup::reduce(const Stream& stream, BufferPool& slots, BufferPool& accumulations, const char* label) {
  if (direct_ && !is_last_) return;  // all there is to do was adding
  ElementRange range;
  if (direct_) {
    if (dtypes_.main == dtypes_.reduce) {
      slot_.storage().attach(accumulated_->storage().detach());
      slots.adopt_from(accumulations, slot_.size());
      has_accumulated_ = false;
    } else {
      slot_.storage().attach(slots.acquire(slot_.size()));
      enqueue_accumulate(slot_, *accumulated_, slot_.range(), 1, /*overwrite=*/true, unit_.compute_stream());
      free_accumulated(accumulations);
    }
    range = reduce_in_place(slot_, reduced_placements_, stream, label);
  } else {
    range = reduce_in_place(slot_, accumulated_placements_, stream, label);
    if (deferred() && (!is_last_ || has_accumulated_)) {
      ensure_accumulated(accumulations);
      enqueue_accumulate(*accumulated_, slot_, range, 1, /*overwrite=*/!has_accumulated_, stream);
      has_accumulated_ = true;
      if (!is_last_) return;
      enqueue_accumulate(slot_, *accumulated_, range, 1, /*overwrite=*/true, stream);
      free_accumulated(accumulations);  // its next user writes it on the same stream
    }
    range = reduce_in_place(DBuffer::part_of(slot_, accumulated_placements_), reduced_placements_, stream, label);
  }
  FSDP_INVARIANT(range == main_weight_.range());
  const bool overwrite = prepare_main_gradient();
  enqueue_accumulate(*main_gradient_.buffer, slot_, range, divisor_, overwrite, stream);
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
void FsdpParameterGroup::ensure_main_gradient(bool fresh) {
  auto& [buffer, views] = main_gradient_;
  if (!buffer || (fresh && !gradient_views_unshared())) {  // first use, or somebody kept an old gradient
    buffer = std::make_unique<DBuffer>(mesh_, layout_, strategy().optimizer, dtypes_.main, "this gradient was freed by zero_grad");
    views.clear();
    for (std::size_t i = 0; i < parameters_.size(); ++i) views.push_back(buffer->slice(buffer->piece(static_cast<int>(i))));
  }
  if (!buffer->storage().attached()) buffer->allocate();
}

// Tensors that the user put in place of a leaf's gradient move into the main gradient; undefined ones stay undefined.
void FsdpParameterGroup::adopt_gradients() {
  ensure_main_gradient(/*fresh=*/false);
  at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    at::Tensor& gradient = parameters_[i].leaf.mutable_grad();
    if (!gradient.defined() || gradient.is_same(main_gradient_.views[i])) continue;
    main_gradient_.views[i].copy_(gradient);
    gradient = main_gradient_.views[i];
  }
}

// Before a reduction ends in the main gradient; returns whether it overwrites what is there.
bool FsdpParameterGroup::prepare_main_gradient() {
  const bool accumulate = any_gradient_defined();
  ensure_main_gradient(/*fresh=*/!accumulate);
  if (accumulate) adopt_gradients();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    at::Tensor& gradient = parameters_[i].leaf.mutable_grad();
    if (gradient.defined()) continue;
    if (accumulate) main_gradient_.views[i].zero_();
    gradient = main_gradient_.views[i];
  }
  return !accumulate;
}

void FsdpParameterGroup::drop_unused_gradients() {
  if (!main_gradient_.buffer || main_gradient_.buffer->storage().data() == nullptr) return;
  const DBuffer& buffer = *main_gradient_.buffer;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const ElementRange piece = buffer.piece(static_cast<int>(i));
    at::Tensor& gradient = parameters_[i].leaf.mutable_grad();
    if (piece.empty() || !gradient.is_same(main_gradient_.views[i])) continue;
    if (is_marked_unused(buffer.address(piece.begin), buffer.dtype())) gradient.reset();
  }
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
    if (set_to_none) gradient.reset();
    else gradient.zero_();
  }
  if (set_to_none) drop_gradient_memory();
}

// --- Bytes ---

Bytes FsdpParameterGroup::model_bytes() const {
  // With equal dtypes the main weight is a part of the model weight.
  return dtypes_.compute == dtypes_.main ? model_weight_.size() - main_weight_.size() : model_weight_.size();
}

Bytes FsdpParameterGroup::gradient_bytes() const {
  return main_gradient_.buffer && main_gradient_.buffer->storage().attached() ? main_gradient_.buffer->size() : Bytes(0);
}

Bytes FsdpParameterGroup::accumulated_bytes() const {
  return accumulated_ && accumulated_->storage().attached() ? accumulated_->size() : Bytes(0);
}

}  // namespace fsdp
