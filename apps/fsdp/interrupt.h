// Ctrl-C, and the SIGTERM of mpirun, srun and batch systems, as a flag that training reads between steps, evaluation
// between batches and sampling between tokens. A second one ends the process at once.
#pragma once

namespace fsdp::app {

void install_interrupt_handler();
[[nodiscard]] bool interrupted();

}  // namespace fsdp::app
