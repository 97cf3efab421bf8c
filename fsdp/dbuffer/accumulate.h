// The arithmetic between a reduced gradient and where it rests, and the mark that says whether a gradient was used.
//
// A gradient that no rank produced is sent as negative zero in every element. Sums keep it (-0 + -0 = -0, x + -0 = x),
// so "unused" travels in the data itself: no extra bytes, no extra collective. Producers of real gradients never leave
// -0 in the first element of a piece (`mark_used`), and nothing here turns a real value into it.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <span>

namespace fsdp {

struct AccumulateArguments {
  void* destination = nullptr;
  c10::ScalarType destination_dtype = c10::kFloat;
  const void* source = nullptr;
  c10::ScalarType source_dtype = c10::kFloat;
  std::int64_t count = 0;  // elements
  double divisor = 1;      // destination (+)= source / divisor
  bool overwrite = false;
  // Element indices whose "unused" mark must stay right: -0 in the destination only if -0 came in and nothing was
  // there.
  std::span<const std::int64_t> marks = {};
  std::int64_t marks_origin = 0;  // subtracted from each
};

// On CPU memory; float, double, bf16 and fp16.
void accumulate_on_cpu(const AccumulateArguments& arguments);

// Elements at `indices` that are -0 become +0: their gradient was used.
void mark_used_on_cpu(void* data, c10::ScalarType dtype, std::span<const std::int64_t> indices, std::int64_t origin);

// True when the element is -0, the mark of "no rank used it".
[[nodiscard]] bool is_marked_unused(const void* element, c10::ScalarType dtype);

// Fills `count` elements with -0.
void fill_unused_on_cpu(void* data, c10::ScalarType dtype, std::int64_t count);

}  // namespace fsdp
