// The errors the library throws. The type says what the caller should do; the message says what was expected, what
// came, and where (rank, unit, parameter). The library never prints, exits or aborts.
#pragma once

#include <stdexcept>
#include <string>

namespace fsdp {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The call or its arguments are wrong: fix the call. Nothing was changed.
class UsageError : public Error {
 public:
  using Error::Error;
};

// A peer failed, left or came too late: the communicators involved are unusable until they are rebuilt or reset.
class CommunicationError : public Error {
 public:
  using Error::Error;
};

// An operation ended because another rank failed: that rank's own error is the cause, this one only repeats it.
class AbortedError : public CommunicationError {
 public:
  using CommunicationError::CommunicationError;
};

// The library broke its own invariant: please report it.
class InternalError : public Error {
 public:
  using Error::Error;
};

}  // namespace fsdp
