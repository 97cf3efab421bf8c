#include "fsdp/runtime/simulated/meta_kernels.h"

#include <ATen/ExpandUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <tuple>

namespace fsdp {
namespace {

using at::Tensor;

Tensor where(const Tensor& condition, const Tensor& a, const Tensor& b) {
  return at::empty(at::infer_size(at::infer_size(condition.sizes(), a.sizes()), b.sizes()), a.options());
}

Tensor index_select(const Tensor& self, int64_t dim, const Tensor& index) {
  auto sizes = self.sizes().vec();
  sizes[dim < 0 ? dim + self.dim() : dim] = index.numel();
  return at::empty(sizes, self.options());
}

Tensor embedding_dense_backward(const Tensor& grad, const Tensor&, c10::SymInt rows, c10::SymInt, bool) {
  return at::empty({rows.expect_int(), grad.size(-1)}, grad.options());
}

std::tuple<Tensor, Tensor> fused_rms_norm(const Tensor& x, at::IntArrayRef normalized_shape,
                                          const std::optional<Tensor>&, std::optional<double>) {
  auto sizes = x.sizes().vec();
  for (std::size_t i = 0; i < normalized_shape.size(); ++i) sizes[sizes.size() - 1 - i] = 1;
  return {at::empty_like(x), at::empty(sizes, x.options().dtype(at::kFloat))};
}

std::tuple<Tensor, Tensor> fused_rms_norm_backward(const Tensor&, const Tensor& x, at::IntArrayRef, const Tensor&,
                                                   const std::optional<Tensor>& weight, std::array<bool, 2>) {
  return {at::empty_like(x), weight && weight->defined() ? at::empty_like(*weight) : Tensor()};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm(const Tensor& x, c10::SymIntArrayRef normalized_shape,
                                              const std::optional<Tensor>&, const std::optional<Tensor>&, double) {
  auto sizes = x.sizes().vec();
  for (std::size_t i = 0; i < normalized_shape.size(); ++i) sizes[sizes.size() - 1 - i] = 1;
  return {at::empty_like(x), at::empty(sizes, x.options().dtype(at::kFloat)),
          at::empty(sizes, x.options().dtype(at::kFloat))};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor&, const Tensor& x, c10::SymIntArrayRef,
                                                       const Tensor&, const Tensor&,
                                                       const std::optional<Tensor>& weight,
                                                       const std::optional<Tensor>& bias, std::array<bool, 3> wanted) {
  const auto like = [](const std::optional<Tensor>& t, bool want) {
    return want && t && t->defined() ? at::empty_like(*t) : Tensor();
  };
  return {wanted[0] ? at::empty_like(x) : Tensor(), like(weight, wanted[1]), like(bias, wanted[2])};
}

Tensor relu(const Tensor& x) { return at::empty_like(x); }

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>&, double dropout,
                 bool causal, std::optional<double> scale, bool) {
  return std::get<0>(at::_scaled_dot_product_flash_attention(q, k, v, dropout, causal, false, scale));
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> flash_attention(
    const Tensor& q, const Tensor& k, const Tensor& v, double, bool, bool, std::optional<double>) {
  auto output = at::empty({q.size(0), q.size(2), q.size(1), v.size(3)}, q.options()).transpose(1, 2);
  auto log_sum = at::empty({q.size(0), q.size(1), q.size(2)}, q.options().dtype(at::kFloat));
  auto seed = at::empty({2}, q.options().dtype(at::kUInt64));
  auto offset = at::empty({}, q.options().dtype(at::kUInt64));
  return {output, log_sum, Tensor(), Tensor(), q.size(2), k.size(2), seed, offset, at::empty({0}, q.options())};
}

std::tuple<Tensor, Tensor, Tensor> flash_attention_backward(const Tensor&, const Tensor& q, const Tensor& k,
                                                            const Tensor& v, const Tensor&, const Tensor&,
                                                            const Tensor&, const Tensor&, c10::SymInt, c10::SymInt,
                                                            double, bool, const Tensor&, const Tensor&,
                                                            std::optional<double>) {
  return {at::empty_like(q), at::empty_like(k), at::empty_like(v)};
}

void fused_adamw(at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList, double,
                 double, double, double, double, bool, bool, const std::optional<Tensor>&,
                 const std::optional<Tensor>&) {}

}  // namespace

void register_meta_kernels() {
  static const torch::Library meta = [] {
    torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::Meta, __FILE__, __LINE__);
    library.impl("where.self", TORCH_FN(where));
    library.impl("index_select", TORCH_FN(index_select));
    library.impl("embedding_dense_backward", TORCH_FN(embedding_dense_backward));
    library.impl("native_layer_norm", TORCH_FN(layer_norm));
    library.impl("native_layer_norm_backward", TORCH_FN(layer_norm_backward));
    library.impl("relu", TORCH_FN(relu));
    library.impl("_fused_rms_norm", TORCH_FN(fused_rms_norm));
    library.impl("_fused_rms_norm_backward", TORCH_FN(fused_rms_norm_backward));
    library.impl("_scaled_dot_product_flash_attention", TORCH_FN(flash_attention));
    library.impl("_scaled_dot_product_flash_attention_backward", TORCH_FN(flash_attention_backward));
    library.impl("_fused_adamw_", TORCH_FN(fused_adamw));
    return library;
  }();
  static const torch::Library autograd = [] {
    torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::AutogradMeta, __FILE__, __LINE__);
    library.impl("scaled_dot_product_attention", TORCH_FN(attention));  // one operator instead of its decomposition
    return library;
  }();
  (void)meta;
  (void)autograd;
}

}  // namespace fsdp
