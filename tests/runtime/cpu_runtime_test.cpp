#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "fsdp/base/error.h"
#include "fsdp/runtime/cuda_module.h"
#include "fsdp/runtime/runtime.h"

namespace {

std::atomic<std::int64_t> allocations = 0;  // of the whole process

}  // namespace

// Not inlined: the compiler would take malloc and delete for a mismatched pair.
[[gnu::noinline]] void* operator new(std::size_t size) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* memory = std::malloc(size == 0 ? 1 : size)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace fsdp::testing {
namespace {

using ::testing::ElementsAre;

// Holds a task until somebody opens it. Opens by itself at the end of a failed test, so that nothing hangs.
class Gate {
 public:
  ~Gate() { open(); }
  void open() {
    open_ = true;
    open_.notify_all();
  }
  void pass() const { open_.wait(false); }

 private:
  std::atomic<bool> open_ = false;
};

class CpuRuntime : public ::testing::Test {
 protected:
  std::shared_ptr<Runtime> runtime_ = make_cpu_runtime();
  Gate gate_;  // destroyed before the streams: they can always finish
  Stream a_ = runtime_->make_stream("a"), b_ = runtime_->make_stream("b");
  void TearDown() override { gate_.open(); }
};

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

TEST_F(CpuRuntime, StreamsAreDistinctAndNamed) {
  EXPECT_EQ(runtime_->device(), c10::Device(c10::kCPU));
  EXPECT_EQ(runtime_->compute_stream().id(), 0);
  EXPECT_NE(a_.id(), 0);
  EXPECT_NE(a_.id(), b_.id());
  EXPECT_EQ(a_.name(), "a");
  EXPECT_FALSE(a_ == b_);
  EXPECT_TRUE(runtime_->compute_stream() == runtime_->compute_stream());
  EXPECT_FALSE(Stream());
}

TEST_F(CpuRuntime, AStreamRunsItsTasksInOrderOnAnotherThread) {
  std::vector<int> seen;
  std::thread::id worker;
  for (int i = 0; i < 1000; ++i) {
    a_.enqueue([i, &seen, &worker] {
      seen.push_back(i);
      worker = std::this_thread::get_id();
    });
  }
  a_.synchronize();
  std::vector<int> expected(1000);
  std::iota(expected.begin(), expected.end(), 0);
  EXPECT_EQ(seen, expected);
  EXPECT_NE(worker, std::this_thread::get_id());
}

TEST_F(CpuRuntime, EnqueuedMeansDoneOnCompute) {
  bool done = false;
  runtime_->compute_stream().enqueue([&] { done = true; });
  EXPECT_TRUE(done);
}

TEST_F(CpuRuntime, StreamsRunBesideEachOther) {
  Gate other;
  a_.enqueue([&] {  // neither ends unless both run at once
    gate_.open();
    other.pass();
  });
  b_.enqueue([&] {
    gate_.pass();
    other.open();
  });
  a_.synchronize();
  b_.synchronize();
  SUCCEED();
}

TEST_F(CpuRuntime, AnEventHoldsBackWhatIsEnqueuedAfterTheWaitOnly) {
  for (int round = 0; round < 300; ++round) {
    Gate gate;
    std::atomic<int> step = 0;
    int before = -1, after = -1;
    a_.enqueue([&] {
      gate.pass();
      step = 1;
    });
    Event event;
    a_.record(event);
    EXPECT_FALSE(event.query());
    b_.enqueue([&] { before = step; });
    Event early;
    b_.record(early);
    b_.wait(event);
    b_.enqueue([&] { after = step; });
    early.synchronize();  // not held back
    EXPECT_EQ(before, 0);
    gate.open();
    b_.synchronize();
    ASSERT_EQ(after, 1) << round;
    a_.synchronize();
  }
}

TEST_F(CpuRuntime, AnEventMarksWhatWasEnqueuedBeforeItOnly) {
  Event event;
  bool first = false;
  a_.enqueue([&] { first = true; });
  a_.record(event);
  a_.enqueue([&] { gate_.pass(); });
  event.synchronize();  // does not wait for the gate
  EXPECT_TRUE(first);
  Event copy = event;
  a_.record(event);  // moves this handle, not its copy
  EXPECT_TRUE(copy.query());
  EXPECT_FALSE(event.query());
  gate_.open();
  event.synchronize();
  EXPECT_TRUE(event.query());
}

TEST_F(CpuRuntime, AnEventThatWasNeverRecordedIsComplete) {
  const Event event;
  EXPECT_FALSE(event.recorded());
  EXPECT_TRUE(event.query());
  event.synchronize();
  a_.wait(event);
  runtime_->compute_stream().wait(event);
  a_.synchronize();
}

TEST_F(CpuRuntime, AWaitForItsOwnEventIsAlreadyInOrder) {
  Event event;
  a_.enqueue([&] { gate_.pass(); });
  a_.record(event);
  a_.wait(event);  // must not queue a wait for itself
  gate_.open();
  a_.synchronize();
  EXPECT_TRUE(event.query());
}

TEST_F(CpuRuntime, AWaitOfComputeBlocksUntilTheEventAndIsCounted) {
  const Stream compute = runtime_->compute_stream();
  Event event;
  a_.record(event);
  compute.wait(event);
  EXPECT_EQ(runtime_->blocked_time(), 0) << "nothing to wait for";
  auto recorder = std::make_shared<trace::Recorder>();
  runtime_->set_recorder(recorder);
  bool done = false;
  a_.enqueue([&] {
    gate_.pass();
    done = true;
  });
  a_.record(event);
  std::thread opener([&] { gate_.open(); });
  compute.wait(event);
  EXPECT_TRUE(done);
  opener.join();
  if (recorder->size() == 1) {  // the event was not complete yet when compute came
    EXPECT_GT(runtime_->blocked_time(), 0);
    EXPECT_EQ(recorder->spans()[0].kind, trace::Kind::wait);
    EXPECT_EQ(recorder->spans()[0].stream, 0);
    EXPECT_EQ(recorder->spans()[0].end - recorder->spans()[0].begin, runtime_->blocked_time());
  }
}

TEST_F(CpuRuntime, BlockedTimeGrowsWithEveryWaitThatReallyBlocks) {
  const Stream compute = runtime_->compute_stream();
  trace::Nanoseconds before = 0;
  int blocked = 0;
  for (int round = 0; round < 2000 && blocked < 3; ++round) {
    std::atomic<bool> go = false;
    a_.enqueue([&] { go.wait(false); });
    Event event;
    a_.record(event);
    b_.enqueue([&] {  // opens from another thread, most often after compute has begun to wait
      go = true;
      go.notify_all();
    });
    compute.wait(event);
    EXPECT_TRUE(event.query());
    b_.synchronize();
    EXPECT_GE(runtime_->blocked_time(), before);
    blocked += runtime_->blocked_time() > before;
    before = runtime_->blocked_time();
  }
  EXPECT_EQ(blocked, 3);
}

TEST_F(CpuRuntime, AnErrorSurfacesAtTheWaitAndSkipsWhatFollows) {
  bool later = false;
  Event event;
  a_.enqueue([] { throw UsageError("bad unit"); });
  a_.enqueue([&] { later = true; });
  a_.record(event);
  EXPECT_THROW(event.synchronize(), UsageError) << "the type is kept";
  EXPECT_EQ(error_of([&] { a_.synchronize(); }), "bad unit") << "and it stays";
  EXPECT_EQ(error_of([&] { (void)event.query(); }), "bad unit");
  EXPECT_EQ(error_of([&] { runtime_->compute_stream().wait(event); }), "bad unit");
  EXPECT_FALSE(later);
}

TEST_F(CpuRuntime, TheFirstErrorIsTheOneReported) {
  a_.enqueue([] { throw std::runtime_error("first"); });
  a_.enqueue([] { throw std::runtime_error("second"); });
  EXPECT_EQ(error_of([&] { a_.synchronize(); }), "first");
}

TEST_F(CpuRuntime, AnErrorTravelsToTheStreamsThatWaitForIt) {
  const Stream c = runtime_->make_stream("c");
  bool later = false;
  a_.enqueue([&] {
    gate_.pass();
    throw CommunicationError("rank 3 left");
  });
  Event event;
  a_.record(event);
  b_.wait(event);
  b_.enqueue([&] { later = true; });
  Event second;
  b_.record(second);
  c.wait(second);
  c.enqueue([&] { later = true; });
  gate_.open();
  EXPECT_THROW(c.synchronize(), CommunicationError);
  EXPECT_EQ(error_of([&] { b_.synchronize(); }), "rank 3 left");
  EXPECT_FALSE(later);
}

TEST_F(CpuRuntime, AnErrorOfASmallTaskWaitsForTheWaitAsWell) {
  EXPECT_NO_THROW(a_.enqueue([] { throw std::runtime_error("inline"); }, {.small = true}));
  EXPECT_EQ(error_of([&] { a_.synchronize(); }), "inline");
}

TEST_F(CpuRuntime, ResetMakesAPoisonedStreamUsable) {
  std::vector<int> seen;
  for (int round = 0; round < 3; ++round) {
    a_.enqueue([] { throw std::runtime_error("round"); });
    for (int i = 0; i < 10; ++i) a_.enqueue([&] { seen.push_back(-1); });
    a_.reset();
    a_.enqueue([&, round] { seen.push_back(round); });
    EXPECT_EQ(error_of([&] { a_.synchronize(); }), "no error");
  }
  EXPECT_THAT(seen, ElementsAre(0, 1, 2));
}

TEST_F(CpuRuntime, SmallTasksRunAtOnceOnTheCallerWhenTheStreamIsIdle) {
  std::thread::id small, large;
  a_.enqueue([&] { small = std::this_thread::get_id(); }, {.small = true});
  EXPECT_EQ(small, std::this_thread::get_id());
  Event event;
  a_.record(event);
  EXPECT_TRUE(event.query());
  a_.enqueue([&] { large = std::this_thread::get_id(); });
  a_.synchronize();
  EXPECT_NE(large, std::this_thread::get_id());
}

TEST_F(CpuRuntime, SmallTasksStayInOrderWithQueuedOnes) {
  std::vector<int> seen;
  a_.enqueue([&] {
    gate_.pass();
    seen.push_back(0);
  });
  a_.enqueue([&] { seen.push_back(1); }, {.small = true});  // the stream is busy: queued
  a_.enqueue([&] { seen.push_back(2); });
  gate_.open();
  a_.synchronize();
  EXPECT_THAT(seen, ElementsAre(0, 1, 2));
  std::vector<int> mixed, expected(2000);
  std::iota(expected.begin(), expected.end(), 0);
  for (int i = 0; i < 2000; ++i) a_.enqueue([i, &mixed] { mixed.push_back(i); }, {.small = i % 3 != 0});
  a_.synchronize();
  EXPECT_EQ(mixed, expected);
}

TEST_F(CpuRuntime, SmallTasksCountAsBlockedTime) {
  const auto before = runtime_->blocked_time();
  a_.enqueue(
      [] {
        volatile int spin = 0;
        for (int i = 0; i < 100'000; ++i) spin = spin + 1;
      },
      {.small = true});
  EXPECT_GT(runtime_->blocked_time(), before) << "compute stood still meanwhile";
}

TEST_F(CpuRuntime, EnqueueingAllocatesNothingOnceSteady) {
  Event event, other;
  std::int64_t sum = 0;
  const auto rounds = [&](int count) {
    for (int i = 0; i < count; ++i) {
      for (int k = 0; k < 8; ++k) a_.enqueue([&sum, k] { sum += k; });
      a_.record(event);
      b_.wait(event);
      b_.enqueue([&sum] { sum += 1; });
      b_.record(other);
      a_.wait(other);
      a_.synchronize();
      a_.enqueue([&sum] { sum += 1; }, {.small = true});
    }
  };
  rounds(50);
  const auto before = allocations.load();
  rounds(200);
  EXPECT_EQ(allocations.load(), before);
  EXPECT_EQ(sum, 250 * (28 + 2));
  ::operator delete(::operator new(8));
  EXPECT_GT(allocations.load(), before) << "the counter works";
}

TEST_F(CpuRuntime, SpansGetTheTimesAtWhichTheirTasksRan) {
  trace::Recorder recorder;
  trace::Span* first = recorder.issue("first", trace::Kind::all_gather, a_.id());
  trace::Span* second = recorder.issue("second", trace::Kind::all_gather, a_.id());
  trace::Span* small = recorder.issue("small", trace::Kind::all_gather, a_.id());
  trace::Span* compute = recorder.issue("compute", trace::Kind::compute, 0);
  a_.enqueue([&] { gate_.pass(); }, {.span = first});
  a_.enqueue([] {}, {.span = second});
  const auto opened = a_.now();
  gate_.open();
  a_.synchronize();
  a_.enqueue([] {}, {.small = true, .span = small});
  runtime_->compute_stream().enqueue([] {}, {.span = compute});
  EXPECT_GE(first->end, opened);
  EXPECT_LE(first->begin, first->end);
  EXPECT_LE(first->end, second->begin);
  EXPECT_LE(second->end, small->begin);
  EXPECT_LE(small->end, compute->begin);
  EXPECT_LE(compute->end, a_.now());
}

TEST_F(CpuRuntime, ASkippedTaskLeavesItsSpanUnfinished) {
  trace::Recorder recorder;
  trace::Span* failed = recorder.issue("failed", trace::Kind::all_gather, a_.id());
  trace::Span* skipped = recorder.issue("skipped", trace::Kind::all_gather, a_.id());
  a_.enqueue([] { throw std::runtime_error("x"); }, {.span = failed});
  a_.enqueue([] {}, {.span = skipped});
  a_.reset();
  EXPECT_EQ(failed->end, trace::kUnset);
  EXPECT_EQ(skipped->begin, trace::kUnset);
}

TEST_F(CpuRuntime, TasksAreDestroyedBeforeTheirEndIsSeen) {
  auto token = std::make_shared<int>(0);
  a_.enqueue([token] {});
  a_.enqueue([] { throw std::runtime_error("x"); });
  a_.enqueue([token] {});  // skipped ones too
  a_.reset();
  EXPECT_EQ(token.use_count(), 1);
}

TEST(CpuStream, RunsWhatIsQueuedBeforeItIsDestroyed) {
  int ran = 0;
  {
    const auto runtime = make_cpu_runtime();
    const Stream stream = runtime->make_stream("short-lived");
    for (int i = 0; i < 100; ++i) stream.enqueue([&] { ++ran; });
  }
  EXPECT_EQ(ran, 100);
}

TEST(CpuMemory, IsExactAndWritable) {
  const auto runtime = make_cpu_runtime();
  auto data = runtime->allocate(Bytes(1000), runtime->compute_stream());
  ASSERT_NE(data.get(), nullptr);
  static_cast<char*>(data.get())[999] = 1;
  EXPECT_EQ(data.device(), c10::Device(c10::kCPU));
}

TEST(NoCuda, RefusesWithTheReason) {
  const std::string reason = why_no_cuda();
  if (reason.empty()) {  // a GPU machine: one device too far
    EXPECT_EQ(error_of([] { (void)make_cuda_runtime(1000); }),
              "cannot use CUDA device 1000: this process sees " + std::to_string(cuda_device_count()));
    return;
  }
  EXPECT_EQ(cuda_device_count(), 0);
  EXPECT_EQ(error_of([] { (void)make_cuda_runtime(3); }), "cannot use CUDA device 3: " + reason);
}

TEST(CudaEnvironment, OneQueueForAllStreamsIsReported) {
  for (const char* value : {"1", "8", ""}) {
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", value, 1);
    const std::string warning = warning_of_connections();
    unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
    EXPECT_EQ(warning.find("CUDA_DEVICE_MAX_CONNECTIONS is 1") != std::string::npos, std::string(value) == "1");
    EXPECT_EQ(warning.empty(), std::string(value) != "1");
  }
}

}  // namespace
}  // namespace fsdp::testing
