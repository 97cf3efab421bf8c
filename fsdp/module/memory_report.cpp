#include "fsdp/module/memory_report.h"

#include <fmt/format.h>

namespace fsdp {

std::string to_string(const MemoryReport& report) {
  const auto mib = [](Bytes bytes) { return static_cast<double>(bytes.value()) / (1024.0 * 1024.0); };
  return fmt::format(
      "main weights {:.1f} MiB, model weights {:.1f}, main gradients {:.1f}, accumulated {:.1f}, gathered {:.1f} (peak {:.1f}, reserved {:.1f}), reduce "
      "slots {:.1f} (peak {:.1f}, reserved {:.1f})",
      mib(report.main_weights), mib(report.model_weights), mib(report.main_gradients), mib(report.accumulated), mib(report.gathered),
      mib(report.gathered_peak), mib(report.gathered_reserved), mib(report.reduce_slots), mib(report.reduce_slots_peak), mib(report.reduce_slots_reserved));
}

}  // namespace fsdp
