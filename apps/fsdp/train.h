// `fsdp train`: checks everything, runs the ranks, reports.
#pragma once

#include "apps/fsdp/run_failure.h"
#include "apps/fsdp/train_job.h"

namespace fsdp::app {

// Returns the exit code: 0, or 130 after Ctrl-C. Throws UsageError for settings that cannot work, before any rank
// trains; a failure of the run itself is thrown as RunFailure. Of several processes one throws these, the others
// SilentExit.
int train(const TrainCommand& command);

}  // namespace fsdp::app
