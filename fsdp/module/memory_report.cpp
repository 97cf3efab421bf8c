#include "fsdp/module/memory_report.h"

#include <fmt/format.h>

namespace fsdp {

std::string to_string(const MemoryReport& report) {
  const bool small = report.total() < Bytes(64 << 20);
  const auto scaled = [&](Bytes bytes) {
    return static_cast<double>(bytes.value()) / (small ? 1024.0 : 1024.0 * 1024.0);
  };
  return fmt::format(
      "in {}: main weights {:.1f}, model weights {:.1f}, main gradients {:.1f}, accumulated {:.1f}, arena {:.1f}, "
      "gathered {:.1f} "
      "(peak {:.1f}, reserved {:.1f}), reduce "
      "slots {:.1f} (peak {:.1f}, reserved {:.1f})",
      small ? "KiB" : "MiB", scaled(report.main_weights), scaled(report.model_weights), scaled(report.main_gradients),
      scaled(report.accumulated), scaled(report.arena), scaled(report.gathered), scaled(report.gathered_peak),
      scaled(report.gathered_reserved), scaled(report.reduce_slots), scaled(report.reduce_slots_peak),
      scaled(report.reduce_slots_reserved));
}

}  // namespace fsdp
