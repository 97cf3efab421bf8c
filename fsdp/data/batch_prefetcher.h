// Makes the batches of the next steps on a thread of its own while the present step trains.
//
// Owns that thread; the destructor ends it after the batch that it is making, and waits for it. One thread calls
// next(); the producer runs on the other one.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "fsdp/data/token_batch.h"

namespace fsdp::data {

class BatchPrefetcher {
 public:
  using Batches = std::vector<TokenBatch>;  // all microbatches of one rank's step
  using Produce = std::function<Batches(std::int64_t step)>;

  // Steps [first_step, end_step), in order; at most `depth` of them are made and not yet taken. Starts at once.
  BatchPrefetcher(Produce produce, std::int64_t first_step, std::int64_t end_step, int depth = 2);
  BatchPrefetcher(const BatchPrefetcher&) = delete;
  BatchPrefetcher& operator=(const BatchPrefetcher&) = delete;
  ~BatchPrefetcher();

  // The batches of `step`, which must be the one after the last taken; waits until they are made. What the producer
  // threw at this step is thrown here, again at each call: nothing is made after it.
  [[nodiscard]] Batches next(std::int64_t step);

  // How long next() has waited, all calls together.
  [[nodiscard]] std::chrono::nanoseconds waited() const;

 private:
  struct Made {
    Batches batches;
    std::exception_ptr error;  // instead of batches
  };

  void run();

  const Produce produce_;
  const std::int64_t end_step_;
  const std::size_t depth_;

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable taken_, made_;
  std::deque<Made> ready_;  // the first one is of next_step_
  std::int64_t next_step_;
  bool stopped_ = false;
  std::chrono::nanoseconds waited_{0};

  std::thread thread_;  // last: it uses all of the above
};

}  // namespace fsdp::data
