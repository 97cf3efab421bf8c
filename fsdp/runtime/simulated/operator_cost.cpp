#include "fsdp/runtime/simulated/operator_cost.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <vector>

namespace fsdp {
namespace {

constexpr std::array<std::string_view, 33> kFree = {"aten::alias",
                                                    "aten::as_strided",
                                                    "aten::chunk",
                                                    "aten::detach",
                                                    "aten::detach_",
                                                    "aten::diagonal",
                                                    "aten::empty",
                                                    "aten::empty_like",
                                                    "aten::empty_strided",
                                                    "aten::expand",
                                                    "aten::flatten",
                                                    "aten::movedim",
                                                    "aten::narrow",
                                                    "aten::new_empty",
                                                    "aten::new_empty_strided",
                                                    "aten::permute",
                                                    "aten::requires_grad_",
                                                    "aten::resize_",
                                                    "aten::select",
                                                    "aten::set_",
                                                    "aten::slice",
                                                    "aten::split",
                                                    "aten::split_with_sizes",
                                                    "aten::squeeze",
                                                    "aten::swapaxes",
                                                    "aten::t",
                                                    "aten::transpose",
                                                    "aten::unbind",
                                                    "aten::unflatten",
                                                    "aten::unsafe_split",
                                                    "aten::unsqueeze",
                                                    "aten::view",
                                                    "aten::view_as"};
static_assert(std::is_sorted(kFree.begin(), kFree.end()));

const at::Tensor* tensor_at(c10::ArrayRef<const c10::IValue> inputs, std::size_t index) {
  if (index >= inputs.size() || !inputs[index].isTensor() || !inputs[index].toTensor().defined()) return nullptr;
  return &inputs[index].toTensor();
}

double product_flops(const at::Tensor& a, const at::Tensor& b) {
  // (..., m, k) x (..., k, n)
  return 2.0 * static_cast<double>(a.numel()) * static_cast<double>(b.size(-1));
}

double attention_flops(const at::Tensor& query, const at::Tensor& key) {
  // Two products of (queries x keys x head size) a head.
  return 4.0 * static_cast<double>(query.numel()) * static_cast<double>(key.size(-2));
}

double bytes_of_inputs(c10::ArrayRef<const c10::IValue> inputs) {
  double total = 0, largest = 0;
  for (const auto& input : inputs) {
    if (input.isTensor() && input.toTensor().defined()) {
      const auto bytes = static_cast<double>(input.toTensor().nbytes());
      total += bytes;
      largest = std::max(largest, bytes);
    } else if (input.isTensorList()) {
      for (const at::Tensor& tensor : input.toTensorVector()) total += static_cast<double>(tensor.nbytes());
    }
  }
  return total + largest;  // the output is taken to be as large as the largest input
}

}  // namespace

OperatorWork operator_work(const at::RecordFunction& function) {
  const std::string_view name = function.name();
  const auto inputs = function.inputs();
  OperatorWork work;
  if (std::binary_search(kFree.begin(), kFree.end(), name)) {
    work.free = true;
    return work;
  }
  work.bytes = bytes_of_inputs(inputs);
  std::size_t first = std::string_view::npos;
  if (name == "aten::mm" || name == "aten::bmm") first = 0;
  if (name == "aten::addmm" || name == "aten::baddbmm") first = 1;
  if (first != std::string_view::npos) {
    const auto *a = tensor_at(inputs, first), *b = tensor_at(inputs, first + 1);
    if (a != nullptr && b != nullptr) work.flops = product_flops(*a, *b);
  } else if (name == "aten::_scaled_dot_product_flash_attention") {
    work.flops = attention_flops(*tensor_at(inputs, 0), *tensor_at(inputs, 1));
  } else if (name == "aten::_scaled_dot_product_flash_attention_backward") {
    work.flops = 2.5 * attention_flops(*tensor_at(inputs, 1), *tensor_at(inputs, 2));
  }
  return work;
}

}  // namespace fsdp
