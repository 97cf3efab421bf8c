// Sharded training equals one-process training: reduced gradients, norm and parameters after every step, bit for bit
// where the sums are made in the same order (SGD and element-wise optimizers), for every strategy and policy.
#include <ATen/Parallel.h>
#include <ATen/core/Formatting.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <map>
#include <mutex>
#include <set>
#include <tuple>

#include "fsdp/fsdp.h"
#include "tests/support/ranks.h"
#include "tests/support/reference.h"
#include "tests/support/toy_model.h"

namespace fsdp::testing {
namespace {

constexpr int kSteps = 3;
constexpr std::int64_t kInputs = 5, kWidth = 7, kHidden = 19;
constexpr int kDepth = 3;

enum class OptimizerKind { torch_sgd, torch_adamw, fsdp_sgd, fsdp_adamw };

struct Case {
  int outer = 1, inner = 1;  // mesh; one-axis strategies use the product
  std::function<Strategy()> strategy;
  OptimizerKind optimizer = OptimizerKind::torch_sgd;
  int microbatches = 1;
  ReducePolicy reduce = ReducePolicy::every_microbatch;
  bool set_to_none = true;
  bool bf16 = false;
  at::ScalarType reduce_dtype = at::kFloat;
  ContextOptions context;
  Reshard reshard = Reshard::automatic;

  [[nodiscard]] int ranks() const { return outer * inner; }
  [[nodiscard]] std::string describe() const {
    return fmt::format(
        "{} mesh {}x{} optimizer {} microbatches {} reduce {} set_to_none {} bf16 {} reduce_dtype {} prefetch {}:{} "
        "delay {} unified {} keep_last {} reshard {} inline {}",
        strategy().name, outer, inner, static_cast<int>(optimizer), microbatches, static_cast<int>(reduce), set_to_none,
        bf16, c10::toString(reduce_dtype), static_cast<int>(context.prefetch.kind), context.prefetch.amount,
        context.reduction.delay, context.unify_communication_stream, context.keep_last, static_cast<int>(reshard),
        context.inline_limit.value());
  }
};

struct Batch {
  at::Tensor x, target;
};

Batch batch(int step, int microbatch, int rank) {
  auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(step * 1000 + microbatch * 100 + rank));
  return {at::randn({4, kInputs}, generator), at::randn({4, 3}, generator)};
}

ToyModel make_model() {
  static std::mutex mutex;  // the default generator is the process's
  std::lock_guard lock(mutex);
  torch::manual_seed(1);
  return ToyModel(kInputs, kWidth, kHidden, kDepth);
}

std::unique_ptr<torch::optim::Optimizer> make_torch_optimizer(OptimizerKind kind,
                                                              const std::vector<at::Tensor>& parameters) {
  if (kind == OptimizerKind::torch_adamw || kind == OptimizerKind::fsdp_adamw) {
    return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(0.01).weight_decay(0.1));
  }
  return std::make_unique<torch::optim::SGD>(
      parameters, torch::optim::SGDOptions(0.1).momentum(kind == OptimizerKind::fsdp_sgd ? 0.9 : 0.0));
}

struct State {
  std::map<std::string, at::Tensor> gradients, parameters;
  double norm = 0;
};

// [step]
std::vector<State> reference_run(const Case& c) {
  ToyModel model = make_model();  // computes in the compute dtype
  std::map<std::string, at::Tensor> main;
  std::vector<at::Tensor> list;
  for (auto& item : model->named_parameters()) {
    main[item.key()] = item.value().detach().clone().set_requires_grad(true);
    list.push_back(main[item.key()]);
  }
  auto optimizer = make_torch_optimizer(c.optimizer, list);
  const auto compute = c.bf16 ? at::kBFloat16 : at::kFloat;
  const ReduceRule rule = reduce_rule(c.strategy(), c.outer, c.inner, c.reduce, c.reduce_dtype);
  std::vector<State> states;
  for (int step = 0; step < kSteps; ++step) {
    std::map<std::string, std::vector<std::vector<at::Tensor>>> local;
    for (int m = 0; m < c.microbatches; ++m) {
      for (auto& [name, gradients] : local) gradients.emplace_back();
      for (int r = 0; r < c.ranks(); ++r) {
        for (auto& item : model->named_parameters()) item.value().set_data(main[item.key()].detach().to(compute));
        const Batch b = batch(step, m, r);
        (model->loss(b.x.to(compute), b.target.to(compute)) / c.microbatches).backward();
        for (auto& item : model->named_parameters()) {
          auto& gradients = local[item.key()];
          if (static_cast<int>(gradients.size()) <= m) gradients.emplace_back();
          gradients[m].push_back(item.value().grad().clone());
          item.value().mutable_grad().reset();
        }
      }
    }
    State state;
    double squares = 0;
    for (auto& [name, parameter] : main) {
      parameter.mutable_grad() = reduce_reference(local[name], rule);
      state.gradients[name] = parameter.grad().clone();
      squares += parameter.grad().to(at::kDouble).square().sum().item<double>();
    }
    state.norm = std::sqrt(squares);
    optimizer->step();
    for (auto& [name, parameter] : main) state.parameters[name] = parameter.detach().clone();
    states.push_back(std::move(state));
  }
  return states;
}

void expect_equal(const at::Tensor& got, const at::Tensor& expected, bool bits, const std::string& what) {
  ASSERT_EQ(got.sizes(), expected.sizes()) << what;
  const bool equal = bits ? at::equal(got, expected) : at::allclose(got, expected, 2e-6, 2e-7);
  EXPECT_TRUE(equal) << what << ": largest difference " << (got - expected).abs().max().item<double>();
}

void sharded_run(const Case& c, const World& world, const std::vector<State>& expected) {
  const bool two_axes = c.strategy().axes.size() == 2;
  DeviceMesh mesh(world, two_axes ? std::vector<MeshAxis>{{"outer", c.outer}, {"inner", c.inner}}
                                  : std::vector<MeshAxis>{{"dp", c.ranks()}});
  auto context = FsdpContext::create(mesh, c.context);
  ToyModel model = make_model();
  UnitOptions unit;
  unit.placements = c.strategy();
  unit.reshard = c.reshard;
  if (c.bf16) unit.mixed_precision.param_dtype = at::kBFloat16;
  unit.mixed_precision.reduce_dtype = c.reduce_dtype;
  shard_toy_model(*context, model, unit);
  std::unique_ptr<torch::optim::Optimizer> torch_optimizer;
  std::unique_ptr<ShardedOptimizer> own_optimizer;
  if (c.optimizer == OptimizerKind::fsdp_sgd)
    own_optimizer = std::make_unique<Sgd>(*context, SgdOptions{.learning_rate = 0.1, .momentum = 0.9});
  else if (c.optimizer == OptimizerKind::fsdp_adamw)
    own_optimizer = std::make_unique<AdamW>(*context, AdamWOptions{.learning_rate = 0.01, .weight_decay = 0.1});
  else
    torch_optimizer = make_torch_optimizer(c.optimizer, context->parameters());
  const bool bits = c.optimizer != OptimizerKind::fsdp_adamw && c.optimizer != OptimizerKind::fsdp_sgd;
  const int rank = static_cast<int>(world.rank().value());
  for (int step = 0; step < kSteps; ++step) {
    for (int m = 0; m < c.microbatches; ++m) {
      auto scope = context->microbatch({.is_last = m + 1 == c.microbatches, .reduce = c.reduce});
      const Batch b = batch(step, m, rank);
      (fsdp::call(model, &ToyModelImpl::loss, b.x, b.target) / c.microbatches).backward();
    }
    for (const auto& [name, gradient] : expected[step].gradients) {
      expect_equal(context->full_gradient(name), gradient, bits || step == 0,
                   fmt::format("step {} gradient of {} on rank {}", step, name, rank));
    }
    const double norm = grad_norm(*context).item<double>();
    EXPECT_NEAR(norm, expected[step].norm, 1e-5 * expected[step].norm) << "step " << step;
    if (torch_optimizer) {
      torch_optimizer->step();
      torch_optimizer->zero_grad(c.set_to_none);
    } else {
      own_optimizer->step();
      own_optimizer->zero_grad(c.set_to_none);
    }
    for (const auto& [name, parameter] : expected[step].parameters) {
      expect_equal(context->full_parameter(name), parameter, bits,
                   fmt::format("step {} parameter {} on rank {}", step, name, rank));
    }
  }
}

// Failures inside rank threads carry the case through this trace.
void run_case(const Case& c) {
  if (own_process_rank() >= c.ranks()) return run_on_ranks(c.ranks(), {});
  const auto expected = reference_run(c);
  run_on_ranks(c.ranks(),
               [&](World world, SideChannel&) {
                 SCOPED_TRACE(c.describe());
                 sharded_run(c, world, expected);
               },
               {.deadline = std::chrono::seconds(60)});
}

std::vector<std::function<Strategy()>> one_axis() {
  return {[] { return ddp("dp"); }, [] { return zero1("dp"); }, [] { return zero2("dp"); }, [] { return zero3("dp"); }};
}
std::vector<std::function<Strategy()>> two_axes() {
  return {[] { return hsdp("outer", "inner"); }, [] { return hfsdp("outer", "inner"); },
          [] {
            return zero3({"outer", "inner"});
          }};
}

// Context policies, cycled through so that every pair with a strategy occurs.
std::vector<ContextOptions> policies() {
  std::vector<ContextOptions> all(9);
  all[1].prefetch = Prefetch::none();
  all[1].keep_last = false;
  all[2].prefetch = Prefetch::depth(2);
  all[2].inline_limit = Bytes(0);
  all[3].reduction = Reduction::delayed(1);
  all[3].inline_limit = Bytes(0);
  all[4].unify_communication_stream = true;
  all[4].inline_limit = Bytes(0);
  all[5].prefetch = Prefetch::recorded(1);
  all[5].keep_first = true;
  all[6].prefetch = Prefetch::delayed_release(1);
  all[6].reduction = Reduction::delayed(2);
  all[7].prefetch = Prefetch::lists();
  all[7].inline_limit = Bytes(0);
  all[8].keep_budget = Bytes(3000);
  return all;
}

// Every pair of levels of two factors at least once: for backends where the whole product would take too long.
class PairwiseSample {
 public:
  // `levels` are a case's level of each factor. True when some pair of them is new.
  bool wants(const std::vector<int>& levels) {
    bool found = false;
    for (std::size_t a = 0; a < levels.size(); ++a) {
      for (std::size_t b = a + 1; b < levels.size(); ++b) found |= seen_.insert({a, levels[a], b, levels[b]}).second;
    }
    return found;
  }

 private:
  std::set<std::tuple<std::size_t, int, std::size_t, int>> seen_;
};

class Parity : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override { at::set_num_threads(1); }  // sums change bits with the thread count
};

// Strategy x optimizer x microbatches x reduce policy x zero_grad mode x dtype, with the context's policies, unit
// policies and meshes cycled along.
TEST_P(Parity, EqualsOneProcess) {
  const int world = GetParam();
  const auto contexts = policies();
  const std::vector<Reshard> reshards{Reshard::automatic, Reshard::after_forward, Reshard::never, Reshard::by_budget};
  std::vector<std::pair<int, int>> meshes;
  for (int outer = 1; outer <= world; ++outer) {
    if (world % outer == 0) meshes.emplace_back(outer, world / outer);
  }
  int index = 0;
  PairwiseSample sample;
  int strategy_index = 0;
  for (bool two : {false, true}) {
    for (const auto& strategy : two ? two_axes() : one_axis()) {
      ++strategy_index;
      for (auto optimizer :
           {OptimizerKind::torch_sgd, OptimizerKind::torch_adamw, OptimizerKind::fsdp_sgd, OptimizerKind::fsdp_adamw}) {
        for (int microbatches : {1, 3}) {
          for (auto reduce : {ReducePolicy::every_microbatch, ReducePolicy::last_microbatch}) {
            for (bool set_to_none : {true, false}) {
              for (int dtype : {0, 1, 2}) {
                Case c;
                std::tie(c.outer, c.inner) = meshes[index % meshes.size()];
                c.strategy = strategy;
                c.optimizer = optimizer;
                c.microbatches = microbatches;
                c.reduce = reduce;
                c.set_to_none = set_to_none;
                c.bf16 = dtype > 0;
                c.reduce_dtype = dtype == 2 ? at::kBFloat16 : at::kFloat;
                c.context = contexts[index % contexts.size()];
                c.reshard = reshards[index / 3 % reshards.size()];
                const std::vector<int> levels{strategy_index,
                                              static_cast<int>(optimizer),
                                              microbatches,
                                              static_cast<int>(reduce),
                                              set_to_none,
                                              dtype,
                                              static_cast<int>(index % contexts.size()),
                                              static_cast<int>(index / 3 % reshards.size()),
                                              c.outer};
                if (!ranks_are_processes() || sample.wants(levels)) run_case(c);
                if (HasFailure()) return;  // one full description is enough
                index += 1 + (index % 7 == 6);
              }
            }
          }
        }
      }
    }
  }
}

std::vector<int> worlds() {
  std::vector<int> sizes = world_sizes_under_test();
  std::erase_if(sizes, [](int size) { return size > 4; });
  return sizes;
}

INSTANTIATE_TEST_SUITE_P(Worlds, Parity, ::testing::ValuesIn(worlds()), ::testing::PrintToStringParamName());

}  // namespace
}  // namespace fsdp::testing
