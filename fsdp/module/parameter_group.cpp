#include "fsdp/module/parameter_group.h"

#include <ATen/core/grad_mode.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/env.h"
#include "fsdp/base/fingerprint.h"
#include "fsdp/dbuffer/accumulate.h"
#include "fsdp/dbuffer/redistribute.h"
#include "fsdp/module/fsdp_module.h"
#include "fsdp/module/grad_accumulator.h"
#include "fsdp/module/gradient_packing.h"

namespace fsdp {
namespace {

// Shares that peers read where they rest are whole pieces of memory; small ones would be padded too much.
std::int64_t shard_alignment(std::int64_t elements, const SubMesh& mesh, const Strategy& strategy,
                             c10::ScalarType compute) {
  const int axis = only_gather_axis(strategy.parameter, mesh);
  if (axis < 0) return GlobalLayout::kAlignment;
  const auto granularity = mesh.communicator(axis, Use::gather).backend()->peer_granularity();
  const Bytes share =
      bytes_of(Elements(elements / mesh.sizes()[axis]), static_cast<std::int64_t>(c10::elementSize(compute)));
  if (granularity == Bytes(0) || share < FsdpParameterGroup::least_peer_share()) return GlobalLayout::kAlignment;
  return granularity.value() / static_cast<std::int64_t>(c10::elementSize(compute));
}

std::shared_ptr<const GlobalLayout> make_layout(const std::vector<ParameterInfo>& parameters, const SubMesh& mesh,
                                                const Strategy& strategy, c10::ScalarType compute) {
  std::vector<std::int64_t> sizes;
  for (const auto& parameter : parameters) sizes.push_back(parameter.parameter.numel());
  std::int64_t shards = 1;  // what is flat for parameters or gradients is flat for the optimizer too
  for (std::size_t axis = 0; axis < strategy.axes.size(); ++axis) {
    if (strategy.optimizer[axis] == Placement::flat) shards *= mesh.sizes()[axis];
  }
  const std::int64_t elements = std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
  return std::make_shared<GlobalLayout>(sizes, shards, shard_alignment(elements, mesh, strategy, compute));
}

DBuffer make_main_weight(const DBuffer& model, const std::shared_ptr<const SubMesh>& mesh,
                         const std::shared_ptr<const GlobalLayout>& layout, const Strategy& strategy,
                         c10::ScalarType dtype) {
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

FsdpParameterGroup::FsdpParameterGroup(FsdpModule& unit, std::shared_ptr<const SubMesh> mesh, Strategy strategy,
                                       std::vector<ParameterInfo> parameters, const Dtypes& dtypes, bool synchronize)
    : unit_(unit),
      mesh_(std::move(mesh)),
      strategy_(std::move(strategy)),
      parameters_(std::move(parameters)),
      dtypes_(dtypes),
      replicated_(strategy_.axes.size(), Placement::replicate),
      partial_(where_ranks_differ(PlacementList(strategy_.axes.size(), Placement::partial), *mesh_)),
      gradient_placements_(where_ranks_differ(strategy_.gradient, *mesh_)),
      reduced_placements_(where_ranks_differ(strategy_.optimizer, *mesh_)),
      layout_(make_layout(parameters_, *mesh_, strategy_, dtypes.compute)),
      model_weight_(mesh_, layout_, strategy_.parameter, dtypes.compute, "the model weight has no memory"),
      main_weight_(make_main_weight(model_weight_, mesh_, layout_, strategy_, dtypes.main)),
      whole_(mesh_, layout_, replicated_, dtypes.compute, "the weights are not gathered"),
      slot_(mesh_, layout_, partial_, dtypes.reduce, kNoGradients) {
  releasable_ = strategy_.parameter != replicated_;
  refresh_needed_ = dtypes.compute != dtypes.main || strategy_.parameter != strategy_.optimizer;
  divisor_ = unit.options().gradient_divisor.value_or(mesh_->rank_count());
  on_meta_ = std::any_of(parameters_.begin(), parameters_.end(), [](const auto& p) { return p.parameter.is_meta(); }) &&
             mesh_->mesh().runtime()->device() != c10::kMeta;
  if (synchronize && mesh_->mesh().runtime()->device() != c10::kMeta) check_ranks_agree();
  model_weight_.allocate();
  if (!main_weight_.storage().attached()) main_weight_.allocate();
  if (mesh_->mesh().runtime()->device() != c10::kMeta && !on_meta_) pack_values(synchronize);
  if (!releasable_ && !refresh_needed_) whole_.storage().attach(model_weight_.storage().borrow());
  install_views();
  make_leaves();
  find_marks();
  install_accumulators();
  follow_requires_grad();
  accumulated_placements_ = gradient_placements_;
}

FsdpParameterGroup::~FsdpParameterGroup() {
  for (auto& accumulator : accumulators_) accumulator->detach_from_group();
  // The module's tensors may live on. Weights that rest whole and are current stay readable.
  explain_release(
      fmt::format("the FsdpContext that sharded parameter \"{}\" was destroyed, and the weights with it: keep the "
                  "context as long as "
                  "the model is used",
                  parameters_.front().name));
}

std::int64_t FsdpParameterGroup::weight_version() const {
  std::int64_t sum = noted_writes_;
  for (const auto& p : parameters_) sum += static_cast<std::int64_t>(p.leaf._version());
  return sum;
}

const PlacementList& FsdpParameterGroup::optimizer_placements() const { return strategy_.optimizer; }

void FsdpParameterGroup::follow_requires_grad() {
  expected_arrivals_ = 0;
  for (auto& p : parameters_) {
    const bool trains = p.parameter.requires_grad();
    if (p.leaf.requires_grad() != trains) p.leaf.set_requires_grad(trains);
    if (!trains) continue;
    ++expected_arrivals_;
    for (const auto& alias : p.aliases) expected_arrivals_ += alias.requires_grad() ? 1 : 0;
  }
}

void FsdpParameterGroup::check_usable() const {
  FSDP_CHECK(!on_meta_, UsageError,
             "unit \"{}\" was built on the meta device and has no values: call context->materialize(init) first",
             unit_.name());
  const auto& first = parameters_.front();
  FSDP_CHECK(first.parameter.storage().unsafeGetStorageImpl() == whole_.storage().storage().unsafeGetStorageImpl() &&
                 first.parameter.scalar_type() == dtypes_.compute,
             UsageError,
             "parameter \"{}\" of unit \"{}\" no longer is the tensor that was sharded (module->to(), set_data or a "
             "load that replaces tensors): choose dtypes by "
             "MixedPrecisionPolicy, and load values in place into context->parameters()",
             first.name, unit_.name());
}

// --- Construction ---

// Ranks whose units differ would mix their weights silently: flat buffers of equal length need not mean equal
// parameters.
void FsdpParameterGroup::check_ranks_agree() const {
  std::string description = strategy_.name + c10::toString(dtypes_.compute) + c10::toString(dtypes_.reduce) +
                            c10::toString(dtypes_.main) + c10::toString(dtypes_.gradient);
  for (const auto& p : parameters_)
    description += fmt::format("{} {} {} {} {};", p.name, fmt::join(p.sizes, "x"), fmt::join(p.strides, ","),
                               p.aliases.size(), p.parameter.requires_grad());
  const std::int64_t hash = fingerprint(description);
  const Stream stream = mesh_->mesh().world().host().runtime()->compute_stream();
  for (std::size_t axis = 0; axis < strategy_.axes.size(); ++axis) {
    std::int64_t extremes[2] = {hash, -hash};
    const Communicator& hosts = mesh_->communicator(static_cast<int>(axis), Use::host);
    if (!hosts) continue;  // the caller's own communicators, without one for hosts
    hosts.all_reduce(extremes, extremes, Elements(2), c10::kLong, ReduceOp::max, stream, "FSDP:comparison of units");
    stream.synchronize();
    FSDP_CHECK(extremes[0] == hash && extremes[1] == -hash, UsageError,
               "fully_shard: ranks along mesh axis \"{}\" shard different parameters (names, shapes, dtypes or "
               "strategy); this rank {} has {} parameters, the first "
               "is \"{}\" of {} elements",
               strategy_.axes[axis], mesh_->mesh().world().rank().value(), parameters_.size(), parameters_[0].name,
               parameters_[0].parameter.numel());
  }
}

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
    for (std::size_t axis = 0; axis < strategy_.axes.size(); ++axis) {
      mesh_->communicator(static_cast<int>(axis), Use::gather)
          .broadcast(whole_main.address(0), layout_->padded_size(), dtypes_.main, Rank(0), stream,
                     "FSDP:broadcast of initial weights");
    }
    stream.synchronize();
  }
  store_shards(whole_main);
}

void FsdpParameterGroup::store_shards(const DBuffer& whole_main) {
  main_weight_.flat().copy_(whole_main.slice(main_weight_.range()));
  epoch_ = copied_version_ = -1;
}

void FsdpParameterGroup::install_views() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    auto& p = parameters_[i];
    // The module's own tensor stays the same object: only what it looks at changes.
    const at::Tensor view = whole_.tensor(static_cast<int>(i), p.sizes, p.strides);
    p.parameter.unsafeGetTensorImpl()->shallow_copy_from(view.getIntrusivePtr());
    for (auto& alias : p.aliases) alias.unsafeGetTensorImpl()->shallow_copy_from(view.getIntrusivePtr());
    slot_views_.push_back(slot_.tensor(static_cast<int>(i), p.sizes, p.strides));
  }
}

void FsdpParameterGroup::make_leaves() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    auto& p = parameters_[i];
    p.leaf = main_weight_.slice(main_weight_.piece(static_cast<int>(i)));
  }
}

void FsdpParameterGroup::find_marks() {
  const std::int64_t shard = layout_->padded_size().value() / layout_->shard_count();
  std::int64_t end_of_previous = 0;
  for (const ElementRange& tensor : layout_->tensors()) {
    marks_begin_.push_back(static_cast<int>(marks_.size()));
    if (!tensor.empty()) {
      marks_.push_back(tensor.begin);
      for (std::int64_t edge = (tensor.begin / shard + 1) * shard; edge < tensor.end; edge += shard)
        marks_.push_back(edge);
    }
    if (tensor.begin > end_of_previous) padding_.push_back({end_of_previous, tensor.begin});
    end_of_previous = tensor.end;
  }
  marks_begin_.push_back(static_cast<int>(marks_.size()));
  if (layout_->padded_size().value() > end_of_previous)
    padding_.push_back({end_of_previous, layout_->padded_size().value()});
  const ElementRange mine = main_weight_.range();
  std::copy_if(marks_.begin(), marks_.end(), std::back_inserter(local_marks_),
               [&](std::int64_t mark) { return mark >= mine.begin && mark < mine.end; });
}

void FsdpParameterGroup::install_accumulators() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    install_accumulator(static_cast<int>(i), parameters_[i].parameter);
    for (const auto& alias : parameters_[i].aliases) install_accumulator(static_cast<int>(i), alias);
  }
  arrived_.resize(parameters_.size());
  written_.resize(parameters_.size());
  used_.resize(parameters_.size());
  if (Kernels* device = kernels()) packing_ = std::make_unique<GradientPacking>(*device, parameters_.size());
}

void FsdpParameterGroup::install_accumulator(int index, const at::Tensor& parameter) {
  accumulators_.push_back(std::make_shared<GradAccumulator>(*this, index, parameter));
  torch::autograd::impl::set_grad_accumulator(parameter, std::weak_ptr<torch::autograd::Node>(accumulators_.back()));
}

void FsdpParameterGroup::add_alias(int index, const at::Tensor& tensor) {
  auto& p = parameters_[index];
  p.aliases.push_back(tensor);
  const at::Tensor view = whole_.tensor(index, p.sizes, p.strides);
  tensor.unsafeGetTensorImpl()->shallow_copy_from(view.getIntrusivePtr());
  install_accumulator(index, tensor);
  follow_requires_grad();
}

void FsdpParameterGroup::move_model_weight(void* part) {
  Runtime& here = runtime();
  const Stream compute = here.compute_stream();
  c10::DataPtr now = part != nullptr ? c10::DataPtr(part, here.device()) : here.allocate(model_weight_.size(), compute);
  here.copy(now.get(), model_weight_.storage().data(), model_weight_.size(), compute);
  c10::DataPtr before = model_weight_.storage().detach();  // freed on compute, after the copy
  model_weight_.storage().attach(std::move(now));
}

Bytes FsdpParameterGroup::least_peer_share() {
  const std::int64_t mib = env::integer("FSDP_READ_PEERS_FROM_MIB").value_or(8);
  return std::max(Bytes(mib << 20), Bytes(1));
}

void FsdpParameterGroup::use_peers(PeerMemory* peers, int part) {
  if (peers_ != peers) move_model_weight(peers != nullptr ? peers->share(part) : nullptr);
  peers_ = peers;
  peer_part_ = part;
}

void FsdpParameterGroup::set_names(const std::vector<std::string>& prefixes) {
  std::string names;
  for (auto& p : parameters_) {
    p.name = prefixes[p.module_index] + p.name;
    if (names.size() < 200)
      names += (names.empty() ? "" : ", ") + p.name;
    else if (!names.ends_with(" ..."))
      names += " ...";
  }
  if (!releasable_ && !refresh_needed_) return;
  released_message_ = fmt::format(
      "a weight of unit \"{}\" was read while it is {} (its parameters: {}). Run the unit through its "
      "wrapped type, not through a pointer to the base type; run other methods with fsdp::call; read "
      "weights inside context->unshard_scope(unit){}",
      unit_.name(), releasable_ ? "sharded" : "not current", names,
      unit_.backward_reads_weights() ? "" : "; if its backward reads them, set UnitOptions::backward_reads_weights");
  explain_release({});
}

void FsdpParameterGroup::explain_release(const std::string& reason) {
  if (mesh_->mesh().runtime()->device().is_meta() || (!releasable_ && !refresh_needed_)) return;
  whole_.storage().set_released_message(reason.empty() ? released_message_ : reason);
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

void FsdpParameterGroup::order_after_compute(const Stream& stream) const {
  Event allocated;
  runtime().compute_stream().record(allocated);
  stream.wait(allocated);
}

void FsdpParameterGroup::refresh(std::int64_t epoch, const Stream& stream, const char* label) {
  if (epoch_ == epoch) return;
  epoch_ = epoch;
  if (!refresh_needed_) return;
  const DBuffer own = DBuffer::part_of(model_weight_, strategy_.optimizer);
  if (dtypes_.compute != dtypes_.main && std::exchange(copied_version_, -1) != weight_version())
    enqueue_accumulate(own, main_weight_, own.range(), 1, /*overwrite=*/true, stream);
  if (strategy_.parameter != strategy_.optimizer) gather(own, model_weight_, stream, label);
}

void* FsdpParameterGroup::low_precision_copy(ElementRange packed) const {
  return dtypes_.compute == dtypes_.main ? nullptr : model_weight_.address(packed.begin);
}

void FsdpParameterGroup::follow_compute_stream() {
  for (auto& accumulator : accumulators_) accumulator->follow_compute_stream();
}

void FsdpParameterGroup::gather_whole(BufferPool& pool, const Stream& stream, const char* label) {
  if (!releasable_) {
    if (!whole_.storage().attached()) whole_.storage().attach(model_weight_.storage().borrow());
    return;
  }
  void* place = peers_ != nullptr ? peers_->acquire(peer_part_) : nullptr;
  whole_.storage().attach(place != nullptr ? pool.borrow(place, whole_.size()) : pool.acquire(whole_.size()));
  gather(model_weight_, whole_, stream, label);
}

void FsdpParameterGroup::release_whole(BufferPool& pool) {
  if (peers_ != nullptr && peers_->contains(whole_.storage().data())) {
    peers_->release(whole_.storage().data());
    whole_.storage().detach().clear();
    pool.end_of_loan(whole_.size());
  } else if (releasable_)
    pool.release(whole_.storage().detach(), whole_.size());
  else if (refresh_needed_ && whole_.storage().attached())
    whole_.storage().detach().clear();
}

at::Tensor FsdpParameterGroup::full_tensor(int index, bool gradient, const Stream& stream) {
  at::NoGradGuard no_grad;
  const auto& p = parameters_[index];
  DBuffer whole_main(mesh_, layout_, replicated_, gradient ? dtypes_.gradient : dtypes_.main, "");
  whole_main.allocate();
  DBuffer source = main_weight_;
  if (gradient) {
    source = DBuffer(mesh_, layout_, strategy_.optimizer, dtypes_.gradient, "");
    source.allocate();
    if (p.leaf.grad().defined()) source.slice(source.piece(index)).copy_(p.leaf.grad());
  }
  order_after_compute(stream);
  gather(source, whole_main, stream, "FSDP:full_tensor");
  stream.synchronize();
  return whole_main.tensor(index, p.sizes, p.strides).clone();
}

// --- Bytes ---

Bytes FsdpParameterGroup::model_bytes() const {
  // With equal dtypes the main weight is a part of the model weight.
  return dtypes_.compute == dtypes_.main ? model_weight_.size() - main_weight_.size() : model_weight_.size();
}

Bytes FsdpParameterGroup::gradient_bytes() const {
  return main_gradient_.buffer && main_gradient_.buffer->storage().attached() ? main_gradient_.buffer->size()
                                                                              : Bytes(0);
}

Bytes FsdpParameterGroup::accumulated_bytes() const {
  return accumulated_ && accumulated_->storage().attached() ? accumulated_->size() : Bytes(0);
}

}  // namespace fsdp
