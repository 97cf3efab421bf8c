// Ctrl-C as a flag that the training loop reads between steps. A second Ctrl-C ends the process at once.
#pragma once

namespace fsdp::app {

void install_interrupt_handler();
[[nodiscard]] bool interrupted();

}  // namespace fsdp::app
