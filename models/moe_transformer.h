// A decoder transformer whose feed-forwards are mixtures of experts spread over ranks (DeepSeek-V3, arXiv:2412.19437,
// with plain attention): softmax router, top-k experts, a shared expert, some dense layers first.
//
// A mesh has an axis of expert-parallel ranks: each holds experts / ranks of the experts of every layer, and tokens are
// exchanged between them. The other parameters are sharded over all ranks, those of the experts over the ranks that
// hold the same ones. It is run by pipeline::StepDriver:
//
//   fsdp::DeviceMesh mesh(world, {{"edp", world.size() / 2}, {"ep", 2}});
//   auto model = std::make_shared<MoeTransformer>(config, mesh);
//   auto context = fsdp::FsdpContext::create(mesh);
//   model->shard(*context, unit_options);  context->materialize(model->initializer());
//   fsdp::pipeline::StepDriver driver(context, model, {});
//
// A mesh with an axis "pp" before the others spreads the layers over pipeline stages: MoeTransformer::parts gives a
// rank its parts, which share a context and a driver with StageChannels over "pp".
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "fsdp/module/context.h"
#include "fsdp/moe/expert_exchange.h"
#include "fsdp/moe/router.h"
#include "fsdp/pipeline/staged_model.h"
#include "models/attention.h"
#include "models/feed_forward.h"
#include "models/layers.h"
#include "models/moe_config.h"

namespace fsdp::models {

// The experts that a rank holds, over rows sorted by expert.
class ExpertsImpl : public torch::nn::Module {
 public:
  ExpertsImpl(std::int64_t experts, std::int64_t width, std::int64_t expert_width, c10::Device device);
  // x (rows, width), rows of each expert in order -> (rows, width).
  at::Tensor forward(const at::Tensor& x, std::vector<std::int64_t> rows) const;

 private:
  at::Tensor gate_, up_, down_;  // (experts, out, in)
};
TORCH_MODULE(Experts);

class MoeBlockImpl : public torch::nn::Module {
 public:
  MoeBlockImpl(const MoeConfig& config, bool dense, std::int64_t own_experts,
               const std::shared_ptr<RotaryTable>& rotary);
  [[nodiscard]] bool dense() const { return experts.is_empty(); }

  RmsNorm attention_norm{nullptr}, feed_forward_norm{nullptr};
  Attention attention{nullptr};
  FeedForward feed_forward{nullptr};  // of a dense layer, or the shared expert; may be empty
  Projection router{nullptr};
  Experts experts{nullptr};
  at::Tensor expert_bias;  // fp32 (experts), for the choice of experts only; no parameter
  at::Tensor load;         // int64 (experts): tokens of this rank since the last update of the biases
};
TORCH_MODULE(MoeBlock);

class MoeTransformer final : public pipeline::StagedModel {
 public:
  // `mesh` has an axis "ep" of the expert-parallel ranks. Weights are built on the meta device: after `shard`,
  // context.materialize(initializer()) gives them values.
  MoeTransformer(const MoeConfig& config, const DeviceMesh& mesh);
  // This rank's parts in a pipeline over the mesh's axis "pp": `chunks` of them, each of as many layers as can be.
  // Parameters have the names and values they have in the whole model.
  static std::vector<std::shared_ptr<MoeTransformer>> parts(const MoeConfig& config, const DeviceMesh& mesh,
                                                            int chunks);
  ~MoeTransformer() override;

  // Every layer's experts a unit, every layer a unit, then embedding, last norm and head. Of several parts of a rank
  // each in turn; the last one shards what lies outside of layers, for all of them. `options`: strategy names
  // ("zero1", "zero2", "zero3"; "hsdp": zero3 with copies over the mesh's first axis) and dtypes; axes, divisors and
  // hooks are set here.
  void shard(FsdpContext& context, const UnitOptions& options);
  // Values that depend on seed, layer and expert alone, not on how experts are spread.
  [[nodiscard]] InitFunction initializer() const;
  // Adds up the loads of all ranks since the last call and moves the biases; without a bias_rate nothing happens.
  void update_expert_biases();
  [[nodiscard]] const MoeConfig& config() const { return config_; }
  [[nodiscard]] std::vector<MoeBlock>& blocks() { return blocks_; }

  // pipeline::StagedModel: inputs are token ids (batch, position), post gives logits, targets as tokens, -100 ignored.
  [[nodiscard]] int layers() const override { return static_cast<int>(blocks_.size()); }
  [[nodiscard]] bool first() const override { return first_layer_ == 0; }
  [[nodiscard]] bool last() const override { return first_layer_ + layers() == config_.base.layers; }
  [[nodiscard]] pipeline::Boundary boundary(const pipeline::Microbatch& microbatch) const override;
  [[nodiscard]] bool dense(int layer) const override;
  [[nodiscard]] LayerFunctions layer_functions(int layer, double loss_scale) override;
  [[nodiscard]] pipeline::NodeFunction pre_function() override;
  [[nodiscard]] pipeline::NodeFunction post_function() override;
  [[nodiscard]] pipeline::NodeFunction loss_function() override;
  [[nodiscard]] std::vector<FsdpModule*> units(pipeline::NodeKind node, int layer) const override;
  [[nodiscard]] std::shared_ptr<moe::ExpertExchange> exchange() const override { return exchange_; }

 private:
  class Root;
  MoeTransformer(const MoeConfig& config, const DeviceMesh& mesh, std::shared_ptr<moe::ExpertExchange> exchange,
                 std::shared_ptr<Root> root, std::int64_t first_layer, std::int64_t end_layer);
  const MoeConfig config_;
  const DeviceMesh mesh_;
  const std::int64_t first_layer_;  // of the whole model
  std::shared_ptr<moe::ExpertExchange> exchange_;
  c10::ScalarType compute_dtype_ = c10::kFloat;
  std::shared_ptr<Root> root_;  // embedding, blocks, norm, head: what this rank has of them, in all its parts
  std::vector<MoeBlock> blocks_;
  std::vector<FsdpModule*> block_units_, expert_units_;  // [layer]; no expert unit: null
};

}  // namespace fsdp::models
