#include "fsdp/data/batch_prefetcher.h"

#include <gmock/gmock.h>

#include <atomic>
#include <future>
#include <stdexcept>

#include "tests/data/temporary_folder.h"

namespace fsdp::testing {
namespace {

using data::BatchPrefetcher;
using ::testing::HasSubstr;
using namespace std::chrono_literals;

BatchPrefetcher::Batches batches_of(std::int64_t step) { return {{1, 2, {step, step + 1}, {step + 1, step + 2}}}; }

// A place where the producer stands until it is let through, one step at a time.
class Gate {
 public:
  void pass() {
    std::unique_lock lock(mutex_);
    ++arrived_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return open_ > 0; });
    --open_;
  }
  void open(int count = 1) {
    std::lock_guard lock(mutex_);
    open_ += count;
    changed_.notify_all();
  }
  void wait_for(int arrived) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return arrived_ >= arrived; });
  }
  [[nodiscard]] int arrived() {
    std::lock_guard lock(mutex_);
    return arrived_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int open_ = 0, arrived_ = 0;
};

TEST(BatchPrefetcher, GivesEveryStepInOrder) {
  for (const int depth : {1, 2, 7}) {
    BatchPrefetcher prefetcher(batches_of, 5, 200, depth);
    for (std::int64_t step = 5; step < 200; ++step) {
      const auto batches = prefetcher.next(step);
      ASSERT_EQ(batches.size(), 1u);
      ASSERT_EQ(batches[0].tokens, (std::vector{step, step + 1}));
    }
  }
}

TEST(BatchPrefetcher, WorksAheadToItsDepthAndNoFurther) {
  Gate gate;
  BatchPrefetcher prefetcher(
      [&](std::int64_t step) {
        gate.pass();
        return batches_of(step);
      },
      0, 100, 3);
  gate.open(100);
  gate.wait_for(3);  // without any call of next()
  std::this_thread::sleep_for(30ms);
  EXPECT_EQ(gate.arrived(), 3);
  (void)prefetcher.next(0);
  gate.wait_for(4);
  std::this_thread::sleep_for(30ms);
  EXPECT_EQ(gate.arrived(), 4);
}

TEST(BatchPrefetcher, WaitingIsMeasured) {
  Gate gate;
  BatchPrefetcher prefetcher(
      [&](std::int64_t step) {
        gate.pass();
        return batches_of(step);
      },
      0, 2);
  EXPECT_EQ(prefetcher.waited(), 0ns);
  auto later = std::async(std::launch::async, [&] {
    std::this_thread::sleep_for(50ms);
    gate.open();
  });
  (void)prefetcher.next(0);
  const auto waited = prefetcher.waited();
  EXPECT_GE(waited, 40ms);
  EXPECT_LT(waited, 10s);
  gate.open();
  gate.wait_for(2);
  std::this_thread::sleep_for(50ms);  // it is ready by now
  (void)prefetcher.next(1);
  EXPECT_LT(prefetcher.waited() - waited, 40ms);
}

TEST(BatchPrefetcher, AnErrorComesAtItsStep) {
  std::atomic<int> calls = 0;
  BatchPrefetcher prefetcher(
      [&](std::int64_t step) {
        ++calls;
        if (step == 2) throw UsageError("step 2 cannot be made");
        return batches_of(step);
      },
      0, 10, 5);
  EXPECT_EQ(prefetcher.next(0)[0].tokens[0], 0);
  EXPECT_EQ(prefetcher.next(1)[0].tokens[0], 1);
  for (int again = 0; again < 3; ++again)
    EXPECT_THAT(refusal([&] { (void)prefetcher.next(2); }), HasSubstr("step 2 cannot be made"));
  EXPECT_EQ(calls, 3);
}

TEST(BatchPrefetcher, EndsWhateverItIsDoing) {
  { BatchPrefetcher unused(batches_of, 0, 0); }
  { BatchPrefetcher waiting(batches_of, 0, 1'000'000'000, 1); }  // for a batch to be taken
  {
    BatchPrefetcher failed([](std::int64_t) -> BatchPrefetcher::Batches { throw std::runtime_error("no"); }, 0, 5);
  }
  Gate gate;
  std::atomic<int> made = 0;
  {
    BatchPrefetcher producing(
        [&](std::int64_t step) {
          gate.pass();
          ++made;
          return batches_of(step);
        },
        0, 1'000'000'000, 1'000'000);
    gate.wait_for(1);
    gate.open(1);
    gate.wait_for(2);
    gate.open(1'000'000);  // enough for all that follow
  }
  EXPECT_LT(made, 1'000'000);
}

TEST(BatchPrefetcher, StepsOutOfOrderAreRefused) {
  BatchPrefetcher prefetcher(batches_of, 3, 5);
  EXPECT_THAT(refusal([&] { (void)prefetcher.next(4); }),
              HasSubstr("step 4 was asked for, expected 3 of steps up to 4"));
  (void)prefetcher.next(3);
  EXPECT_THAT(refusal([&] { (void)prefetcher.next(3); }), HasSubstr("step 3 was asked for, expected 4"));
  (void)prefetcher.next(4);
  EXPECT_THAT(refusal([&] { (void)prefetcher.next(5); }), HasSubstr("step 5 was asked for"));
  EXPECT_THAT(refusal([] { BatchPrefetcher none(batches_of, 0, 1, 0); }), HasSubstr("a prefetch depth of 0"));
  EXPECT_THAT(refusal([] { BatchPrefetcher none(batches_of, 2, 1); }), HasSubstr("the end is before the start"));
}

}  // namespace
}  // namespace fsdp::testing
