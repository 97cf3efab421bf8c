// A mixture of experts of your own under fine-grained 1F1B: a model cut where ranks exchange tokens, and a driver that
// issues the forward of one microbatch between the pieces of the backward before it (docs/one_f_one_b.md).
//   moe_1f1b            two threads share the experts          mpirun -n 4 moe_1f1b    four processes
#include <fsdp/fsdp.h>
#include <fsdp/moe/permutation.h>
#include <fsdp/moe/router.h>
#include <fsdp/pipeline/step_driver.h>
#include <torch/torch.h>

#include <cmath>
#include <iostream>

namespace {

namespace moe = fsdp::moe;
namespace pipeline = fsdp::pipeline;
using pipeline::Carry;
using pipeline::Tensors;

constexpr std::int64_t kWidth = 32, kExpertWidth = 48, kExperts = 4, kTopK = 2;
constexpr int kLayers = 2;

// The experts that this rank holds.
struct ExpertsImpl : torch::nn::Module {
  explicit ExpertsImpl(std::int64_t own) {
    up = register_parameter("up", torch::empty({own, kExpertWidth, kWidth}));
    down = register_parameter("down", torch::empty({own, kWidth, kExpertWidth}));
  }
  torch::Tensor forward(const torch::Tensor& x, std::vector<std::int64_t> rows) {
    const auto groups = fsdp::row_groups(std::move(rows), x.device());
    return fsdp::grouped_linear(torch::relu(fsdp::grouped_linear(x, up, groups)), down, groups);
  }
  torch::Tensor up, down;
};
TORCH_MODULE(Experts);

struct LayerImpl : torch::nn::Module {
  explicit LayerImpl(std::int64_t own_experts) : experts(register_module("experts", Experts(own_experts))) {}
  fsdp::nn::Linear mix = register_module("mix", fsdp::nn::Linear(kWidth, kWidth));
  fsdp::nn::Linear router =
      register_module("router", fsdp::nn::Linear(torch::nn::LinearOptions(kWidth, kExperts).bias(false)));
  Experts experts;
};
TORCH_MODULE(Layer);

class Model final : public pipeline::StagedModel {
 public:
  explicit Model(const fsdp::DeviceMesh& mesh) : exchange_(moe::ExpertExchange::create(mesh, "ep", kExperts)) {
    for (int i = 0; i < kLayers; ++i)
      layers_.push_back(root_->register_module("layer" + std::to_string(i), Layer(exchange_->own_experts())));
    head_ = root_->register_module("head", fsdp::nn::Linear(kWidth, 1));
    // Each expert rank has its own experts; of all else rank 0's values are taken.
    auto generator = torch::make_generator<torch::CPUGeneratorImpl>(100 + mesh.coordinate(mesh.axis_index("ep")));
    torch::NoGradGuard no_grad;
    for (auto& p : root_->parameters()) {
      if (p.dim() > 1)
        p.normal_(0, 1 / std::sqrt(static_cast<double>(p.size(-1))), generator);
      else
        p.zero_();
    }
  }

  void shard(fsdp::FsdpContext& context) {
    // Experts are sharded over the ranks that hold the same ones, but their gradients sum the tokens of all ranks.
    const fsdp::UnitOptions experts{.placements = fsdp::zero3("edp"),
                                    .gradient_divisor = context.mesh().world().size(),
                                    .partitioned_axes = {"ep"},
                                    .register_hooks = false};
    const fsdp::UnitOptions others{.placements = fsdp::zero3({"edp", "ep"}), .register_hooks = false};
    for (auto& layer : layers_) {
      expert_units_.push_back(&context.fully_shard(layer->experts, experts));
      layer_units_.push_back(&context.fully_shard(layer, others));
    }
    root_unit_ = &context.fully_shard(root_, others);
  }

  int layers() const override { return kLayers; }
  bool dense(int) const override { return false; }
  std::shared_ptr<moe::ExpertExchange> exchange() const override { return exchange_; }

  LayerFunctions layer_functions(int index, double loss_scale) override {
    // What this microbatch's nodes know of their tokens; several microbatches are under way at once.
    struct Routed {
      moe::Permutation permutation;
      moe::ExpertExchange::PendingCounts pending;
      moe::ExchangeCounts counts;
    };
    const auto routed = std::make_shared<Routed>();
    auto layer = layers_[static_cast<std::size_t>(index)];
    const auto exchange = exchange_;
    LayerFunctions f;
    f.attend = [=](const Tensors& in, Carry& carry) mutable {
      auto x = in[0] + torch::tanh(layer->mix->forward(in[0]));
      carry.put("residual", x);
      const auto routing =
          moe::route(layer->router->forward(x), {.experts = kExperts, .top_k = kTopK, .auxiliary_loss = 0.01});
      x = moe::attach_loss(x, routing.auxiliary_loss, loss_scale);
      routed->permutation = moe::sort_by_expert(routing.experts);
      routed->pending = exchange->start_counts(routing.load, x.size(0) * kTopK);
      return Tensors{moe::permute(x, routed->permutation), moe::permute_weights(routing.weights, routed->permutation)};
    };
    f.dispatch = [=](const Tensors& in, Carry&) {
      routed->counts = exchange->finish_counts(routed->pending);
      return Tensors{exchange->dispatch(in[0], routed->counts), exchange->dispatch(in[1], routed->counts)};
    };
    f.experts = [=](const Tensors& in, Carry&) mutable {
      const auto rows = moe::group_by_expert(in[0], routed->counts),
                 weights = moe::group_by_expert(in[1], routed->counts);
      const auto y = layer->experts->forward(rows, routed->counts.rows_by_expert());
      return Tensors{moe::ungroup_by_rank(y * weights.unsqueeze(1), routed->counts)};
    };
    f.combine = [=](const Tensors& in, Carry& carry) {
      const auto home = exchange->combine(in[0], routed->counts);
      exchange->join();
      return Tensors{carry.get("residual") + moe::unpermute(home, routed->permutation)};
    };
    f.dispatch_frees_input = f.combine_frees_input = true;
    return f;
  }
  pipeline::NodeFunction pre_function() override {
    return [](const Tensors& in, Carry&) { return in; };
  }
  pipeline::NodeFunction post_function() override {
    return [head = head_](const Tensors& in, Carry&) mutable { return Tensors{head->forward(in[0])}; };
  }
  pipeline::NodeFunction loss_function() override {
    return [](const Tensors& in, Carry&) { return Tensors{torch::mse_loss(in[0], in[1])}; };
  }
  std::vector<fsdp::FsdpModule*> units(pipeline::NodeKind node, int layer) const override {
    if (node == pipeline::NodeKind::attend) return {layer_units_[static_cast<std::size_t>(layer)]};
    if (node == pipeline::NodeKind::experts) return {expert_units_[static_cast<std::size_t>(layer)]};
    if (node == pipeline::NodeKind::post) return {root_unit_};
    return {};
  }

 private:
  std::shared_ptr<moe::ExpertExchange> exchange_;
  std::shared_ptr<torch::nn::Module> root_ = std::make_shared<torch::nn::Module>();
  std::vector<Layer> layers_;
  fsdp::nn::Linear head_{nullptr};
  std::vector<fsdp::FsdpModule*> layer_units_, expert_units_;
  fsdp::FsdpModule* root_unit_ = nullptr;
};

void train(fsdp::World world) {
  const int expert_ranks = world.size() % 2 == 0 ? 2 : 1;
  const fsdp::DeviceMesh mesh(world, {{"edp", world.size() / expert_ranks}, {"ep", expert_ranks}});
  auto model = std::make_shared<Model>(mesh);
  auto context = fsdp::FsdpContext::create(mesh);
  model->shard(*context);
  pipeline::StepDriver driver(context, model, {.schedule = pipeline::Schedule::one_f_one_b});
  fsdp::AdamW optimizer(*context, {.learning_rate = 3e-3});
  auto generator = torch::make_generator<torch::CPUGeneratorImpl>(world.rank().value());  // each rank has its own data
  for (int step = 0; step <= 200; ++step) {
    std::vector<pipeline::Microbatch> microbatches;
    for (int m = 0; m < 4; ++m) {
      const auto x = torch::randn({64, kWidth}, generator);
      microbatches.push_back({{x}, {torch::sin(3 * x.select(1, 0)).unsqueeze(1) * x.select(1, 1).unsqueeze(1)}});
    }
    const auto losses = driver.run(std::move(microbatches));
    optimizer.step(fsdp::clip_grad_norm_(*context, 1.0));  // the norm adds up over the experts of all ranks
    optimizer.zero_grad();
    if (world.rank().value() == 0 && step % 50 == 0)
      std::cout << "step " << step << "  loss " << torch::stack(losses).mean().item<float>() << std::endl;
  }
}

}  // namespace

int main() { fsdp::launch(train, {.ranks = 2}); }
