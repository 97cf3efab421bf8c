// Ends this process with a code and without a message: another rank has told what happened.
#pragma once

namespace fsdp::app {

struct SilentExit {
  int code = 1;
};

}  // namespace fsdp::app
