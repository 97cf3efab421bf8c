#include <fsdp/fsdp.h>
#include <torch/torch.h>
#include <iostream>

struct BlockImpl : torch::nn::Module {
  torch::Tensor forward(torch::Tensor x) { return x + down(torch::gelu(up(x))); }
  fsdp::nn::Linear up = register_module("up", fsdp::nn::Linear(64, 256));
  fsdp::nn::Linear down = register_module("down", fsdp::nn::Linear(256, 64));
};
FSDP_MODULE(Block);  // instead of TORCH_MODULE: forward gathers the weights, backward reduces the gradients

struct ModelImpl : torch::nn::Module {
  torch::Tensor forward(torch::Tensor x) {
    for (auto& block : blocks) x = block(x);
    return head(x);
  }
  std::vector<Block> blocks{register_module("first", Block()), register_module("second", Block()), register_module("third", Block())};
  fsdp::nn::Linear head = register_module("head", fsdp::nn::Linear(64, 64));
};
FSDP_MODULE(Model);

void train(fsdp::World world) {  // what every rank runs
  Model model;
  auto context = fsdp::FsdpContext::create(fsdp::DeviceMesh(world, {{"dp", world.size()}}));
  fsdp::UnitOptions unit{.placements = fsdp::zero3("dp")};  // weights, gradients and optimizer state are sharded
  for (auto& block : model->blocks) context->fully_shard(block, unit);
  context->fully_shard(model, unit);

  fsdp::AdamW optimizer(*context, {.learning_rate = 1e-3});
  auto generator = torch::make_generator<torch::CPUGeneratorImpl>(world.rank().value());  // each rank has its own data
  for (int step = 0; step <= 200; ++step) {
    auto x = torch::randn({64, 64}, generator);
    auto loss = torch::mse_loss(model(x), x.roll(1, 1));
    loss.backward();
    fsdp::clip_grad_norm_(*context, 1.0);
    optimizer.step();
    optimizer.zero_grad();
    if (world.rank().value() == 0 && step % 50 == 0) std::cout << "step " << step << "  loss " << loss.item<float>() << std::endl;
  }
}

int main() { fsdp::launch(train, {.ranks = 2}); }  // two threads, or the processes of mpirun, srun or torchrun
