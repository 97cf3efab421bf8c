#include "models/moe_transformer.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <numeric>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/mesh/rank_generator.h"
#include "fsdp/module/grouped_linear.h"
#include "fsdp/moe/permutation.h"
#include "models/swiglu.h"

namespace fsdp::models {

using pipeline::Carry;
using pipeline::NodeKind;
using pipeline::Tensors;

namespace {

MoeConfig on_meta(MoeConfig config) {
  config.base.device = c10::kMeta;  // values come from initializer(), into the shards
  return config;
}

std::shared_ptr<moe::ExpertExchange> make_exchange(const MoeConfig& config, const DeviceMesh& mesh) {
  FSDP_CHECK(config.experts > 0, UsageError,
             "MoeTransformer: the configuration has no experts; for a dense transformer use models::Transformer");
  return moe::ExpertExchange::create(mesh, "ep", config.experts);
}

}  // namespace

// --- Modules ---

ExpertsImpl::ExpertsImpl(std::int64_t experts, std::int64_t width, std::int64_t expert_width, c10::Device device) {
  const auto options = at::TensorOptions().dtype(at::kFloat).device(device);
  gate_ = register_parameter("gate", at::empty({experts, expert_width, width}, options));
  up_ = register_parameter("up", at::empty({experts, expert_width, width}, options));
  down_ = register_parameter("down", at::empty({experts, width, expert_width}, options));
}

at::Tensor ExpertsImpl::forward(const at::Tensor& x, std::vector<std::int64_t> rows) const {
  const RowGroups groups = row_groups(std::move(rows), x.device());
  return grouped_linear(swiglu(grouped_linear(x, gate_, groups), grouped_linear(x, up_, groups)), down_, groups);
}

MoeBlockImpl::MoeBlockImpl(const MoeConfig& config, bool dense, std::int64_t own_experts,
                           const std::shared_ptr<RotaryTable>& rotary) {
  const auto& base = config.base;
  attention_norm = register_module("attention_norm", RmsNorm(base.width, base.norm_epsilon, base.device));
  attention = register_module("attention", Attention(base, rotary));
  feed_forward_norm = register_module("feed_forward_norm", RmsNorm(base.width, base.norm_epsilon, base.device));
  TransformerConfig inside = base;
  inside.ffn_width = dense ? base.ffn_width : config.shared_width;
  if (inside.ffn_width > 0) feed_forward = register_module("feed_forward", FeedForward(inside));
  if (dense) return;
  router = register_module("router", Projection(base.width, config.experts, base.device));
  experts = register_module("experts", Experts(own_experts, base.width, config.expert_width, base.device));
}

class MoeTransformer::Root : public torch::nn::Module {
 public:
  Root(const MoeConfig& config, bool has_first, bool has_last) {
    const auto& base = config.base;
    if (has_first) embedding = register_module("embedding", Embedding(base.vocabulary, base.width, base.device));
    register_module("blocks", blocks);
    if (!has_last) return;
    norm = register_module("norm", RmsNorm(base.width, base.norm_epsilon, base.device));
    head = register_module("head", Projection(base.width, base.vocabulary, base.device));
  }
  struct Blocks : torch::nn::Module {};
  Embedding embedding{nullptr};
  std::shared_ptr<Blocks> blocks = std::make_shared<Blocks>();  // by their number in the whole model
  RmsNorm norm{nullptr};
  Projection head{nullptr};
  int unsharded_parts = 0;  // of this rank
  FsdpModule* unit = nullptr;
};

MoeTransformer::MoeTransformer(const MoeConfig& config, const DeviceMesh& mesh)
    : MoeTransformer(config, mesh, make_exchange(config, mesh), std::make_shared<Root>(on_meta(config), true, true), 0,
                     config.base.layers) {}

std::vector<std::shared_ptr<MoeTransformer>> MoeTransformer::parts(const MoeConfig& config, const DeviceMesh& mesh,
                                                                   int chunks) {
  const int axis = mesh.axis_index("pp");
  const std::int64_t stages = mesh.axis(axis).size, all = stages * chunks;
  FSDP_CHECK(chunks >= 1 && config.base.layers >= all, UsageError,
             "{} layers cannot be spread over {} pipeline stages of {} parts each", config.base.layers, stages, chunks);
  FSDP_CHECK(chunks == 1 || stages > 1, UsageError, "one pipeline stage holds the model in one part, not in {}",
             chunks);
  const auto exchange = make_exchange(config, mesh);
  const auto root =
      std::make_shared<Root>(on_meta(config), mesh.coordinate(axis) == 0, mesh.coordinate(axis) + 1 == stages);
  std::vector<std::shared_ptr<MoeTransformer>> parts;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const std::int64_t part = chunk * stages + mesh.coordinate(axis);
    parts.push_back(std::shared_ptr<MoeTransformer>(new MoeTransformer(
        config, mesh, exchange, root, part * config.base.layers / all, (part + 1) * config.base.layers / all)));
  }
  return parts;
}

MoeTransformer::MoeTransformer(const MoeConfig& config, const DeviceMesh& mesh,
                               std::shared_ptr<moe::ExpertExchange> exchange, std::shared_ptr<Root> root,
                               std::int64_t first_layer, std::int64_t end_layer)
    : config_(on_meta(config)),
      mesh_(mesh),
      first_layer_(first_layer),
      exchange_(std::move(exchange)),
      root_(std::move(root)) {
  config_.validate();
  const bool whole = first_layer == 0 && end_layer == config_.base.layers;
  for (int axis = 0; axis < mesh.axis_count(); ++axis) {
    FSDP_CHECK(!whole || mesh.axis(axis).name != "pp" || mesh.axis(axis).size == 1, UsageError,
               "the mesh {} has pipeline stages: use MoeTransformer::parts for each stage's part of the model",
               mesh.describe());
  }
  const auto rotary = std::make_shared<RotaryTable>(config_.base.head_width(), config_.base.rope_theta);
  const auto here = at::TensorOptions().device(mesh.runtime()->device());
  for (std::int64_t layer = first_layer; layer < end_layer; ++layer) {
    blocks_.emplace_back(config_, layer < config_.dense_layers, exchange_->own_experts(), rotary);
    root_->blocks->register_module(std::to_string(layer), blocks_.back());
    if (blocks_.back()->dense()) continue;
    blocks_.back()->load = at::zeros({config_.experts}, here.dtype(at::kLong));
    if (config_.bias_rate > 0) blocks_.back()->expert_bias = at::zeros({config_.experts}, here.dtype(at::kFloat));
  }
  ++root_->unsharded_parts;
}

MoeTransformer::~MoeTransformer() = default;

void MoeTransformer::shard(FsdpContext& context, const UnitOptions& options) {
  UnitOptions dense = options;
  dense.register_hooks = false;
  dense.gradient_divisor.reset();
  compute_dtype_ = options.mixed_precision.param_dtype.value_or(c10::kFloat);
  std::vector<std::string> axes, expert_axes;
  int stages = 1;
  for (int axis = 0; axis < mesh_.axis_count(); ++axis) {
    if (mesh_.axis(axis).name == "pp") {  // each stage has weights of its own
      stages = mesh_.axis(axis).size;
      dense.partitioned_axes = {"pp"};
      continue;
    }
    axes.push_back(mesh_.axis(axis).name);
    if (mesh_.axis(axis).name != "ep") expert_axes.push_back(mesh_.axis(axis).name);
  }
  FSDP_CHECK(
      !expert_axes.empty(), UsageError,
      "a mesh for a mixture of experts needs an axis beside \"ep\", of the ranks that hold the same experts; its "
      "size may be 1");
  const auto strategy = [&](const std::vector<std::string>& over) {
    const auto& name = options.placements.name;
    if (name == "zero1") return zero1(over);
    if (name == "zero2") return zero2(over);
    FSDP_CHECK(name == "zero3" || name == "hsdp", UsageError,
               "a mixture of experts is sharded by zero1, zero2, zero3 or hsdp, not {}", name);
    Strategy s = zero3(over);
    if (name == "hsdp") {  // copies over the first axis
      FSDP_CHECK(expert_axes.size() > 1, UsageError,
                 "hsdp of a mixture of experts needs a mesh with an axis of copies before the others");
      s.name = name;
      s.parameter[0] = s.optimizer[0] = Placement::replicate;
      s.gradient[0] = Placement::partial;
    }
    return s;
  };
  dense.placements = strategy(axes);
  UnitOptions expert = dense;
  expert.placements = strategy(expert_axes);
  expert.gradient_divisor = mesh_.world().size() / stages;  // tokens of all ranks of the stage come here
  expert.partitioned_axes.push_back("ep");
  for (auto& block : blocks_) {
    expert_units_.push_back(block->dense() ? nullptr : &context.fully_shard(block->experts, expert));
    block_units_.push_back(&context.fully_shard(block, dense));
  }
  if (--root_->unsharded_parts == 0) root_->unit = &context.fully_shard(ModuleRef(root_), dense);
}

InitFunction MoeTransformer::initializer() const {
  return [layers = config_.base.layers, exchange = exchange_](const std::string& name, at::Tensor& whole,
                                                              at::Generator& generator) {
    at::NoGradGuard no_grad;
    if (whole.dim() == 1) {
      whole.fill_(1.0);
      return;
    }
    const bool residual =
        name.ends_with("attention.output.weight") || name.ends_with("down.weight") || name.ends_with("experts.down");
    const double deviation = 0.02 / (residual ? std::sqrt(2.0 * static_cast<double>(layers)) : 1.0);
    if (whole.dim() == 2) {
      whole.normal_(0.0, deviation, generator);
      return;
    }
    for (std::int64_t e = 0; e < whole.size(0); ++e) {  // by the number of the expert in the layer
      at::Generator own = new_generator(
          whole.device(), generator.current_seed() +
                              0x9E3779B97F4A7C15ULL * static_cast<std::uint64_t>(exchange->first_own_expert() + e + 1));
      whole.select(0, e).normal_(0.0, deviation, own);
    }
  };
}

void MoeTransformer::update_expert_biases() {
  if (config_.bias_rate <= 0) return;
  const Stream stream = mesh_.runtime()->compute_stream();
  for (auto& block : blocks_) {
    if (block->dense()) continue;
    for (int axis = 0; axis < mesh_.axis_count(); ++axis) {
      if (mesh_.axis(axis).name == "pp") continue;
      void* data = block->load.is_meta() ? nullptr : block->load.mutable_data_ptr();
      mesh_.communicator(axis, Use::reduce)
          .all_reduce(data, data, Elements(config_.experts), at::kLong, ReduceOp::sum, stream, "FSDP:experts:load");
    }
    moe::update_expert_bias(block->expert_bias, block->load, config_.bias_rate);
    block->load.zero_();
  }
}

// --- Stages ---

pipeline::Boundary MoeTransformer::boundary(const pipeline::Microbatch& microbatch) const {
  FSDP_CHECK(microbatch.inputs.size() == 1, UsageError,
             "a microbatch's inputs are one tensor of tokens, on every pipeline stage, got {} tensors",
             microbatch.inputs.size());
  std::vector<std::int64_t> sizes = microbatch.inputs[0].sizes().vec();
  sizes.push_back(config_.base.width);
  return {std::move(sizes), compute_dtype_};
}

bool MoeTransformer::dense(int layer) const { return blocks_[static_cast<std::size_t>(layer)]->dense(); }

pipeline::StagedModel::LayerFunctions MoeTransformer::layer_functions(int layer, double loss_scale) {
  auto* block = blocks_[static_cast<std::size_t>(layer)].get();
  LayerFunctions f;
  if (block->dense()) {
    f.attend = [block](const Tensors& in, Carry&) {
      return Tensors{in[0] + block->attention->forward(block->attention_norm->forward(in[0]))};
    };
    f.dispatch = f.combine = [](const Tensors& in, Carry&) { return in; };
    f.experts = [block](const Tensors& in, Carry&) {
      return Tensors{in[0] + block->feed_forward->forward(block->feed_forward_norm->forward(in[0]))};
    };
    return f;
  }
  // What the nodes of this microbatch in this layer know of its tokens.
  struct Tokens {
    moe::Permutation permutation;
    moe::ExpertExchange::PendingCounts pending;
    moe::ExchangeCounts counts;
  };
  const auto tokens = std::make_shared<Tokens>();
  const moe::RouterOptions router{
      .experts = config_.experts, .top_k = config_.top_k, .auxiliary_loss = config_.auxiliary_loss};
  f.attend = [block, tokens, router, loss_scale, exchange = exchange_](const Tensors& in, Carry& carry) {
    const at::Tensor hidden = in[0] + block->attention->forward(block->attention_norm->forward(in[0]));
    const at::Tensor normed = block->feed_forward_norm->forward(hidden);
    carry.put("residual", block->feed_forward.is_empty() ? hidden : hidden + block->feed_forward->forward(normed));
    at::Tensor flat = normed.reshape({-1, normed.size(-1)});
    const moe::Routing routing = moe::route(block->router->forward(flat), router, block->expert_bias);
    if (routing.auxiliary_loss.defined()) flat = moe::attach_loss(flat, routing.auxiliary_loss, loss_scale);
    if (at::GradMode::is_enabled()) {  // not in evaluations
      at::NoGradGuard no_grad;
      block->load.add_(routing.load);
    }
    tokens->permutation = moe::sort_by_expert(routing.experts);
    tokens->pending = exchange->start_counts(routing.load, flat.size(0) * router.top_k);
    return Tensors{moe::permute(flat, tokens->permutation), moe::permute_weights(routing.weights, tokens->permutation)};
  };
  f.dispatch = [tokens, exchange = exchange_](const Tensors& in, Carry&) {
    tokens->counts = exchange->finish_counts(tokens->pending);
    return Tensors{exchange->dispatch(in[0], tokens->counts), exchange->dispatch(in[1], tokens->counts)};
  };
  f.experts = [block, tokens](const Tensors& in, Carry&) {
    const at::Tensor rows = moe::group_by_expert(in[0], tokens->counts);
    const at::Tensor weights = moe::group_by_expert(in[1], tokens->counts);
    const at::Tensor out = block->experts->forward(rows, tokens->counts.rows_by_expert());
    return Tensors{moe::ungroup_by_rank(out * weights.to(out.scalar_type()).unsqueeze(1), tokens->counts)};
  };
  f.combine = [tokens, exchange = exchange_](const Tensors& in, Carry& carry) {
    const at::Tensor home = exchange->combine(in[0], tokens->counts);
    exchange->join();
    const at::Tensor residual = carry.get("residual");
    return Tensors{residual + moe::unpermute(home, tokens->permutation).view(residual.sizes())};
  };
  f.dispatch_frees_input = f.combine_frees_input = true;
  f.experts_frees_input = exchange_->size() > 1 && exchange_->own_experts() > 1;  // grouping has made a copy
  return f;
}

pipeline::NodeFunction MoeTransformer::pre_function() {
  return [root = root_](const Tensors& in, Carry&) {
    FSDP_CHECK(in.size() == 1, UsageError, "a microbatch's inputs are one tensor of tokens, got {} tensors", in.size());
    return Tensors{root->embedding->forward(in[0])};
  };
}

pipeline::NodeFunction MoeTransformer::post_function() {
  return [root = root_](const Tensors& in, Carry&) { return Tensors{root->head->forward(root->norm->forward(in[0]))}; };
}

pipeline::NodeFunction MoeTransformer::loss_function() {
  return [](const Tensors& in, Carry&) {
    FSDP_CHECK(in.size() == 2, UsageError, "a microbatch's targets are one tensor of tokens, got {} tensors",
               in.size() - 1);
    const at::Tensor& logits = in[0];
    return Tensors{at::cross_entropy_loss(logits.reshape({-1, logits.size(-1)}).to(at::kFloat), in[1].reshape({-1}))};
  };
}

std::vector<FsdpModule*> MoeTransformer::units(NodeKind node, int layer) const {
  const auto index = static_cast<std::size_t>(layer);
  FSDP_CHECK(root_->unit != nullptr && block_units_.size() == blocks_.size(), UsageError,
             "MoeTransformer: call shard() on every part of the model before it is run");
  switch (node) {
    case NodeKind::pre:
    case NodeKind::post:
      return {root_->unit};
    case NodeKind::attend:
      return {block_units_[index]};
    case NodeKind::experts:
      return {expert_units_[index] != nullptr ? expert_units_[index] : block_units_[index]};
    default:
      return {};
  }
}

}  // namespace fsdp::models
