// Where this rank's memory goes, in bytes, from the library's own books.
#pragma once

#include <string>

#include "fsdp/base/types.h"

namespace fsdp {

struct MemoryReport {
  // Resting.
  Bytes main_weights;    // what the optimizer updates
  Bytes model_weights;   // compute-dtype or replicated copies that rest beside them; 0 when they share memory
  Bytes main_gradients;  // reduced gradients that exist right now
  Bytes accumulated;     // gradients waiting for their reduction on the last microbatch
  // Transient.
  Bytes
      arena;  // registered memory beyond the resting weights in it; gathered weights and reduce slots take parts of it
  Bytes gathered, gathered_peak, gathered_reserved;  // whole weights: now, most at once, kept for reuse
  Bytes reduce_slots, reduce_slots_peak, reduce_slots_reserved;

  [[nodiscard]] Bytes total() const {
    return main_weights + model_weights + main_gradients + accumulated + arena + gathered_reserved +
           reduce_slots_reserved;
  }
};

[[nodiscard]] std::string to_string(const MemoryReport& report);

}  // namespace fsdp
