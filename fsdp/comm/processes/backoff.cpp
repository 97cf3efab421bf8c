#include "fsdp/comm/processes/backoff.h"

#include <sys/prctl.h>

#include <algorithm>
#include <thread>

namespace fsdp::processes {
namespace {

using std::chrono::microseconds;

constexpr microseconds kShortest{3}, kLongest{1000};
constexpr int kShare = 8;  // of the time waited

// Linux rounds sleeps of a thread up to its timer slack, 50 us unless it asks for less.
void ask_for_short_sleeps() {
  thread_local const bool asked = prctl(PR_SET_TIMERSLACK, 1UL) == 0;
  static_cast<void>(asked);
}

}  // namespace

Backoff::Backoff(std::chrono::milliseconds deadline)
    : start_(std::chrono::steady_clock::now()), end_(start_ + deadline) {}

bool Backoff::pause() {
  const auto now = std::chrono::steady_clock::now();
  if (now >= end_) return false;
  ask_for_short_sleeps();
  const auto waited = std::chrono::duration_cast<microseconds>(now - start_);
  std::this_thread::sleep_for(std::clamp(waited / kShare, kShortest, kLongest));
  return true;
}

}  // namespace fsdp::processes
