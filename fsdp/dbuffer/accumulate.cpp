#include "fsdp/dbuffer/accumulate.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "fsdp/base/check.h"

namespace fsdp {
namespace {

template <typename F>
void with_type(c10::ScalarType dtype, F&& function) {
  switch (dtype) {
    case c10::kFloat:
      return function(float{});
    case c10::kDouble:
      return function(double{});
    case c10::kBFloat16:
      return function(c10::BFloat16{});
    case c10::kHalf:
      return function(c10::Half{});
    default:
      detail::fail<UsageError>("gradients cannot be {}: expected Float, Double, BFloat16 or Half",
                               c10::toString(dtype));
  }
}

template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T>
bool is_negative_zero(T value) {
  const auto wide = static_cast<Wide<T>>(value);
  return wide == 0 && std::signbit(wide);
}

template <typename D, typename S>
void accumulate_typed(D* destination, const S* source, const AccumulateArguments& arguments) {
  using W = std::conditional_t<std::is_same_v<D, double> || std::is_same_v<S, double>, double, float>;
  const auto divisor = static_cast<W>(arguments.divisor);
  const std::int64_t n = arguments.count;
  if (arguments.overwrite) {
    if (arguments.divisor == 1) {
      for (std::int64_t i = 0; i < n; ++i) destination[i] = static_cast<D>(static_cast<W>(source[i]));
    } else {
      for (std::int64_t i = 0; i < n; ++i) destination[i] = static_cast<D>(static_cast<W>(source[i]) / divisor);
    }
  } else if (arguments.divisor == 1) {
    for (std::int64_t i = 0; i < n; ++i)
      destination[i] = static_cast<D>(static_cast<W>(destination[i]) + static_cast<W>(source[i]));
  } else {
    for (std::int64_t i = 0; i < n; ++i)
      destination[i] = static_cast<D>(static_cast<W>(destination[i]) + static_cast<W>(source[i]) / divisor);
  }
  for (std::int64_t mark : arguments.marks) {  // a tiny negative value may have underflowed to -0
    const std::int64_t i = mark - arguments.marks_origin;
    if (is_negative_zero(destination[i]) && !is_negative_zero(source[i])) destination[i] = static_cast<D>(0.0f);
  }
}

}  // namespace

void accumulate_on_cpu(const AccumulateArguments& arguments) {
  with_type(arguments.destination_dtype, [&](auto d) {
    with_type(arguments.source_dtype, [&](auto s) {
      accumulate_typed(static_cast<decltype(d)*>(arguments.destination),
                       static_cast<const decltype(s)*>(arguments.source), arguments);
    });
  });
}

void mark_used_on_cpu(void* data, c10::ScalarType dtype, std::span<const std::int64_t> indices, std::int64_t origin) {
  with_type(dtype, [&](auto t) {
    auto* values = static_cast<decltype(t)*>(data);
    for (std::int64_t index : indices) {
      if (is_negative_zero(values[index - origin])) values[index - origin] = static_cast<decltype(t)>(0.0f);
    }
  });
}

bool is_marked_unused(const void* element, c10::ScalarType dtype) {
  bool unused = false;
  with_type(dtype, [&](auto t) { unused = is_negative_zero(*static_cast<const decltype(t)*>(element)); });
  return unused;
}

void fill_unused_on_cpu(void* data, c10::ScalarType dtype, std::int64_t count) {
  with_type(dtype, [&](auto t) {
    auto* values = static_cast<decltype(t)*>(data);
    std::fill(values, values + count, static_cast<decltype(t)>(-0.0f));
  });
}

}  // namespace fsdp
