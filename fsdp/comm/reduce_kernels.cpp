#include "fsdp/comm/reduce_kernels.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <type_traits>

#include "fsdp/base/check.h"

namespace fsdp {
namespace {

constexpr std::int64_t kBlock = 1024;  // elements kept in cache while the inputs are walked

template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, c10::BFloat16> || std::is_same_v<T, c10::Half>, float, T>;

template <typename T, ReduceOp op>
void reduce_typed(std::span<const void* const> inputs, T* out, std::int64_t count) {
  Wide<T> sum[kBlock];
  for (std::int64_t begin = 0; begin < count; begin += kBlock) {
    const std::int64_t n = std::min(kBlock, count - begin);
    const T* first = static_cast<const T*>(inputs[0]) + begin;
    for (std::int64_t i = 0; i < n; ++i) sum[i] = static_cast<Wide<T>>(first[i]);
    for (std::size_t r = 1; r < inputs.size(); ++r) {
      const T* input = static_cast<const T*>(inputs[r]) + begin;
      for (std::int64_t i = 0; i < n; ++i) {
        const auto value = static_cast<Wide<T>>(input[i]);
        if constexpr (op == ReduceOp::sum) {
          sum[i] += value;
        } else if constexpr (std::is_floating_point_v<Wide<T>>) {
          sum[i] = (value > sum[i] || value != value) ? value : sum[i];  // a NaN wins
        } else {
          sum[i] = std::max(sum[i], value);
        }
      }
    }
    for (std::int64_t i = 0; i < n; ++i) out[begin + i] = static_cast<T>(sum[i]);
  }
}

template <typename T>
void dispatch(std::span<const void* const> inputs, void* out, std::int64_t count, ReduceOp op) {
  if (op == ReduceOp::sum)
    reduce_typed<T, ReduceOp::sum>(inputs, static_cast<T*>(out), count);
  else
    reduce_typed<T, ReduceOp::max>(inputs, static_cast<T*>(out), count);
}

}  // namespace

bool can_reduce(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::kFloat:
    case c10::kDouble:
    case c10::kBFloat16:
    case c10::kHalf:
    case c10::kInt:
    case c10::kLong:
      return true;
    default:
      return false;
  }
}

void reduce_on_cpu(std::span<const void* const> inputs, void* out, std::int64_t count, c10::ScalarType dtype,
                   ReduceOp op) {
  switch (dtype) {
    case c10::kFloat:
      return dispatch<float>(inputs, out, count, op);
    case c10::kDouble:
      return dispatch<double>(inputs, out, count, op);
    case c10::kBFloat16:
      return dispatch<c10::BFloat16>(inputs, out, count, op);
    case c10::kHalf:
      return dispatch<c10::Half>(inputs, out, count, op);
    case c10::kInt:
      return dispatch<std::int32_t>(inputs, out, count, op);
    case c10::kLong:
      return dispatch<std::int64_t>(inputs, out, count, op);
    default:
      detail::fail<UsageError>("cannot reduce {}: expected Float, Double, BFloat16, Half, Int or Long",
                               c10::toString(dtype));
  }
}

}  // namespace fsdp
