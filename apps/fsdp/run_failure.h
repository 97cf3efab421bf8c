// The run itself failed, after it had started: exit code 1, whatever the type of the error behind it.
#pragma once

#include "fsdp/base/error.h"

namespace fsdp::app {

class RunFailure : public Error {
 public:
  using Error::Error;
};

}  // namespace fsdp::app
