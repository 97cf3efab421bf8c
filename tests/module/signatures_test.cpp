// Forwards of every signature and result run the hooks; tensors inside structures are found, and cast on the way in.
#include <ATen/TensorOperators.h>
#include <ATen/ops/linear.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>

#include <map>
#include <optional>
#include <tuple>
#include <variant>

#include "tests/support/equals_unsharded.h"

namespace fsdp::testing {

struct UserStruct {
  at::Tensor first;
  std::vector<at::Tensor> rest;
  std::string note;
};

}  // namespace fsdp::testing

template <>
struct fsdp::TensorVisitor<fsdp::testing::UserStruct> {
  template <typename T, typename F>
  static void visit(T& value, F&& function) {
    function(value.first);
    visit_tensors(value.rest, function);
  }
};

namespace fsdp::testing {
namespace {

struct Opaque {
  at::Tensor hidden;
};
static_assert(Visitable<std::map<int, std::tuple<at::Tensor, std::optional<std::vector<UserStruct>>>>>);
static_assert(Visitable<std::variant<std::monostate, at::Tensor>> && Visitable<std::vector<bool>>);
static_assert(!Visitable<Opaque> && !Visitable<std::vector<Opaque>> && !Visitable<std::pair<at::Tensor, Opaque>>);
static_assert(!Visitable<at::Tensor*> && !Visitable<void*>);

// --- Signatures and results ---

template <typename Result>
struct ResultImpl : torch::nn::Module {
  ResultImpl() { weight = register_parameter("weight", at::ones({4, 4})); }
  Result forward(at::Tensor x);
  at::Tensor weight;
};

using Map = std::map<std::string, at::Tensor>;
using Tuple = std::tuple<at::Tensor, int, std::optional<at::Tensor>>;
using Variant = std::variant<at::Tensor, std::string>;
using Shared = std::shared_ptr<UserStruct>;

template <>
at::Tensor ResultImpl<at::Tensor>::forward(at::Tensor x) {
  return at::linear(x, weight);
}
template <>
std::vector<at::Tensor> ResultImpl<std::vector<at::Tensor>>::forward(at::Tensor x) {
  return {x, at::linear(x, weight)};
}
template <>
Map ResultImpl<Map>::forward(at::Tensor x) {
  return {{"y", at::linear(x, weight)}, {"x", x}};
}
template <>
Tuple ResultImpl<Tuple>::forward(at::Tensor x) {
  return {x, 3, at::linear(x, weight)};
}
template <>
UserStruct ResultImpl<UserStruct>::forward(at::Tensor x) {
  return {x, {at::linear(x, weight)}, "note"};
}
template <>
Variant ResultImpl<Variant>::forward(at::Tensor x) {
  return at::linear(x, weight);
}
template <>
Shared ResultImpl<Shared>::forward(at::Tensor x) {
  return std::make_shared<UserStruct>(UserStruct{x, {at::linear(x, weight)}, ""});
}

at::Tensor pick(const at::Tensor& y) { return y; }
at::Tensor pick(const std::vector<at::Tensor>& y) { return y[1]; }
at::Tensor pick(const Map& y) { return y.at("y"); }
at::Tensor pick(const Tuple& y) { return *std::get<2>(y); }
at::Tensor pick(const UserStruct& y) { return y.rest[0]; }
at::Tensor pick(const Variant& y) { return std::get<at::Tensor>(y); }
at::Tensor pick(const Shared& y) { return y->rest[0]; }

template <typename Result>
class Results : public ::testing::Test {};
using ResultTypes = ::testing::Types<at::Tensor, std::vector<at::Tensor>, Map, Tuple, UserStruct, Variant, Shared>;
TYPED_TEST_SUITE(Results, ResultTypes);

TYPED_TEST(Results, GradientsFlowThroughNestedMembers) {
  using Holder = torch::nn::ModuleHolder<Hooked<ResultImpl<TypeParam>>>;
  UnshardedCase<Holder> c;
  c.make = [] { return filled(Holder(std::make_shared<Hooked<ResultImpl<TypeParam>>>())); };
  c.shard = [](FsdpContext& context, Holder& model) { context.fully_shard(model, {}); };
  c.run_backward = [](Holder& model, int rank) {
    pick(model->forward(random({3, 4}, rank))).square().sum().backward();
  };
  expect_equals_unsharded(c, {2});
}

struct SignatureImpl : torch::nn::Module {
  SignatureImpl() { weight = register_parameter("weight", at::ones({4, 4})); }
  at::Tensor forward(const at::Tensor& a, std::optional<at::Tensor> b, const UserStruct& c, at::Tensor& counter,
                     int n = 2, const std::vector<at::Tensor>& more = {}) {
    dtypes = {a.scalar_type(), b ? b->scalar_type() : a.scalar_type(), c.first.scalar_type(), c.rest[0].scalar_type()};
    for (const auto& tensor : more) dtypes.push_back(tensor.scalar_type());
    counter.add_(1);
    auto y = at::linear(a, weight) * n + c.first + c.rest[0];
    return b ? y + *b : y;
  }
  at::Tensor weight;
  std::vector<at::ScalarType> dtypes;
};
FSDP_MODULE(Signature);

TEST(Signatures, EverySignatureIsHookedAndItsTensorsAreCast) {
  run_ranks(2, [](World world) {
    auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 2}}));
    auto model = filled(Signature());
    context->fully_shard(model, {.mixed_precision = {.param_dtype = at::kBFloat16}});
    const UserStruct c{random({3, 4}, 3), {random({3, 4}, 4)}, "note"};
    at::Tensor counter = at::zeros({});
    auto y = model->forward(random({3, 4}, 1), random({3, 4}, 2), c, counter, 3, {random({2}, 5)});
    EXPECT_EQ(model->dtypes, std::vector<at::ScalarType>(5, at::kBFloat16));
    EXPECT_EQ(c.first.scalar_type(), at::kFloat);  // the caller's own are untouched
    EXPECT_EQ(counter.scalar_type(), at::kFloat);
    EXPECT_EQ(counter.item<float>(), 1);  // what forward writes to is the caller's tensor
    y.sum().backward();
    // Default arguments, through the holder and through call().
    model(random({3, 4}, 1), std::nullopt, c, counter).sum().backward();
    model->call(random({3, 4}, 1), std::nullopt, c, counter, 1).sum().backward();
    EXPECT_EQ(counter.item<float>(), 3);
    EXPECT_EQ(context->counters().reductions, 3);
  });
}

TEST(Signatures, AnyModuleAndSequentialRunTheHooks) {
  run_ranks(2, [](World world) {
    auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 2}}));
    using Holder = torch::nn::ModuleHolder<Hooked<ResultImpl<at::Tensor>>>;
    Holder first(std::make_shared<Hooked<ResultImpl<at::Tensor>>>()),
        second(std::make_shared<Hooked<ResultImpl<at::Tensor>>>());
    torch::nn::AnyModule any(first);
    torch::nn::Sequential sequential(second);
    context->fully_shard(first, {});
    context->fully_shard(second, {});
    sequential->forward(any.forward(random({3, 4}, 1))).sum().backward();
    EXPECT_EQ(context->counters().reductions, 2);
  });
}

}  // namespace
}  // namespace fsdp::testing
