// Finetuning with adapters: a frozen base in bf16, small trainable matrices beside it (LoRA, arXiv 2106.09685), a table
// tied to the output head, blocks that are computed again in backward, and gradients of several microbatches.
#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <iostream>

struct AdapterImpl : torch::nn::Module {  // base(x) + up(down(x)), the base frozen
  AdapterImpl(int in, int out) {
    base = register_parameter("base", torch::randn({out, in}) * 0.1, /*requires_grad=*/false);
    down = register_parameter("down", torch::randn({8, in}) * 0.1);
    up = register_parameter("up", torch::zeros({out, 8}));
  }
  torch::Tensor forward(const torch::Tensor& x) { return fsdp::linear(x, base) + fsdp::linear(fsdp::linear(x, down), up); }
  torch::Tensor base, down, up;
};
TORCH_MODULE(Adapter);

struct BlockImpl : torch::nn::Module {
  torch::Tensor forward(torch::Tensor x) { return x + drop(second(torch::gelu(first(x)))); }
  Adapter first = register_module("first", Adapter(64, 256)), second = register_module("second", Adapter(256, 64));
  fsdp::nn::Dropout drop = register_module("drop", fsdp::nn::Dropout(0.05));
};
FSDP_MODULE(Block);

struct ModelImpl : torch::nn::Module {
  torch::Tensor forward(torch::Tensor ids) {
    auto x = torch::embedding(table, ids);
    for (auto& block : blocks) x = fsdp::recompute([block](torch::Tensor h) mutable { return block(h); }, x);
    return torch::linear(x, table);  // tied
  }
  torch::Tensor loss(torch::Tensor ids, torch::Tensor targets) {
    return torch::nn::functional::cross_entropy(forward(ids).flatten(0, 1).to(torch::kFloat), targets.flatten());
  }
  torch::Tensor table = register_parameter("table", torch::randn({32, 64}) * 0.3);
  std::vector<Block> blocks{register_module("block0", Block()), register_module("block1", Block())};
};
FSDP_MODULE(Model);

void train(fsdp::World world) {
  Model model;
  auto context = fsdp::FsdpContext::create(fsdp::DeviceMesh(world, {{"dp", world.size()}}));
  fsdp::UnitOptions unit{.placements = fsdp::zero3("dp"),
                         .mixed_precision = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat}};
  for (auto& block : model->blocks) context->fully_shard(block, unit);
  context->fully_shard(model, unit);

  fsdp::AdamW optimizer(*context, {.learning_rate = 1e-2});
  auto generator = torch::make_generator<torch::CPUGeneratorImpl>(world.rank().value());
  constexpr int kMicrobatches = 2;
  for (int step = 0; step <= 100; ++step) {
    double total = 0;
    for (int m = 0; m < kMicrobatches; ++m) {
      auto scope = context->microbatch({.is_last = m + 1 == kMicrobatches});
      auto ids = torch::randint(32, {4, 16}, generator, torch::kLong);
      auto loss = fsdp::call(model, &ModelImpl::loss, ids, (ids + 1) % 32) / kMicrobatches;  // learn to count
      loss.backward();
      total += loss.item<double>();
    }
    fsdp::clip_grad_norm_(*context, 1.0);
    optimizer.step();
    optimizer.zero_grad();
    if (world.rank().value() == 0 && step % 25 == 0) std::cout << "step " << step << "  loss " << total << std::endl;
  }
  if (world.rank().value() == 0) std::cout << "memory " << to_string(context->memory_report()) << std::endl;
}

int main() { fsdp::launch(train, {.ranks = 2}); }
