#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/env.h"
#include "fsdp/base/log.h"
#include "fsdp/base/task.h"
#include "fsdp/base/types.h"

namespace fsdp::testing {
namespace {

// Counts its live copies: moved-from objects count until they are destroyed.
class Tracked {
 public:
  explicit Tracked(int& alive) : alive_(&alive) { ++*alive_; }
  Tracked(Tracked&& other) noexcept : alive_(other.alive_) { ++*alive_; }
  ~Tracked() { --*alive_; }

 private:
  int* alive_;
};

TEST(Task, RunsWithAMoveOnlyCapture) {
  auto input = std::make_unique<int>(41);
  int output = 0;
  Task task([input = std::move(input), &output] { output = *input + 1; });
  task();
  EXPECT_EQ(output, 42);
}

TEST(Task, CanRunMoreThanOnceAndKeepsItsState) {
  int last = 0;
  Task task([count = 0, &last]() mutable { last = ++count; });
  task();
  task();
  EXPECT_EQ(last, 2);
}

TEST(Task, DestroysItsCaptureExactlyOnce) {
  int alive = 0;
  {
    Task task([tracked = Tracked(alive)] {});
    EXPECT_EQ(alive, 1);
    Task moved = std::move(task);
    EXPECT_EQ(alive, 1);
    moved();
    EXPECT_EQ(alive, 1);
  }
  EXPECT_EQ(alive, 0);
}

TEST(Task, MoveAssignmentDestroysTheOldCapture) {
  int first = 0, second = 0;
  Task task([tracked = Tracked(first)] {});
  task = Task([tracked = Tracked(second)] {});
  EXPECT_EQ(first, 0);
  EXPECT_EQ(second, 1);
  Task& alias = task;
  task = std::move(alias);  // onto itself: nothing is lost
  EXPECT_EQ(second, 1);
  task = Task();
  EXPECT_EQ(second, 0);
}

TEST(Task, HoldsCapturesUpToItsCapacity) {
  struct Large {
    unsigned char bytes[Task::kCapacity - sizeof(void*)];
  } large{};
  large.bytes[sizeof(large.bytes) - 1] = 7;
  int last = 0;
  Task task([large, out = &last] { *out = large.bytes[sizeof(large.bytes) - 1]; });
  Task moved = std::move(task);
  moved();
  EXPECT_EQ(last, 7);
}

TEST(Task, CannotBeCopied) {
  EXPECT_FALSE(std::is_copy_constructible_v<Task>);
  EXPECT_FALSE(std::is_copy_assignable_v<Task>);
  EXPECT_TRUE(std::is_nothrow_move_constructible_v<Task>);
}

template <typename A, typename B>
concept Addable = requires(A a, B b) {
  a + b;
};
template <typename A, typename B>
concept Comparable = requires(A a, B b) {
  a < b;
};

TEST(StrongInteger, CombinesWithItsOwnKindOnly) {
  EXPECT_TRUE((Addable<Bytes, Bytes>));
  EXPECT_FALSE((Addable<Bytes, Elements>));
  EXPECT_FALSE((Addable<Bytes, std::int64_t>));
  EXPECT_TRUE((Comparable<Rank, Rank>));
  EXPECT_FALSE((Comparable<Rank, Bytes>));
  EXPECT_FALSE((std::is_convertible_v<std::int64_t, Elements>));
  EXPECT_FALSE((std::is_convertible_v<Elements, std::int64_t>));
}

TEST(StrongInteger, CountsAndCompares) {
  Bytes total(10);
  total += Bytes(5);
  total -= Bytes(1);
  EXPECT_EQ(total, Bytes(14));
  EXPECT_EQ(total + Bytes(1) - Bytes(5), Bytes(10));
  EXPECT_EQ(total * 3, Bytes(42));
  EXPECT_LT(Bytes(-1), Bytes());
  EXPECT_EQ(bytes_of(Elements(3), 8).value(), 24);
}

TEST(Check, BuildsItsMessageOnlyOnFailure) {
  int built = 0;
  const auto value = [&] { return ++built; };
  FSDP_CHECK(true, UsageError, "value {}", value());
  EXPECT_EQ(built, 0);
  try {
    FSDP_CHECK(false, UsageError, "value {}", value());
    FAIL() << "no error";
  } catch (const UsageError& error) {
    EXPECT_STREQ(error.what(), "value 1");
  }
}

TEST(Check, AnInvariantNamesItsConditionAndAsksForAReport) {
  const int answer = 41;
  try {
    FSDP_INVARIANT(answer == 42);
    FAIL() << "no error";
  } catch (const InternalError& error) {
    EXPECT_THAT(error.what(),
                ::testing::AllOf(::testing::HasSubstr("answer == 42"), ::testing::HasSubstr("base_test.cpp"),
                                 ::testing::HasSubstr("please report it")));
  }
}

class Environment : public ::testing::Test {
 protected:
  static constexpr const char* kName = "FSDP_BASE_TEST_VARIABLE";
  void TearDown() override { unsetenv(kName); }
};

TEST_F(Environment, UnsetAndEmptyVariablesAreAbsent) {
  EXPECT_EQ(env::text(kName), std::nullopt);
  EXPECT_EQ(env::integer(kName), std::nullopt);
  setenv(kName, "", 1);
  EXPECT_EQ(env::text(kName), std::nullopt);
  EXPECT_EQ(env::integer(kName), std::nullopt);
}

TEST_F(Environment, ReadsTextAndWholeNumbers) {
  setenv(kName, "-12", 1);
  EXPECT_EQ(env::text(kName), "-12");
  EXPECT_EQ(env::integer(kName), -12);
}

TEST_F(Environment, RefusesWhatIsNoWholeNumberNamingTheVariable) {
  for (const char* text : {"four", "4x", "4.5", " 4", "99999999999999999999"}) {
    setenv(kName, text, 1);
    try {
      (void)env::integer(kName);
      FAIL() << "accepted \"" << text << "\"";
    } catch (const UsageError& error) {
      EXPECT_EQ(error.what(),
                std::string("environment variable ") + kName + " is \"" + text + "\", expected a whole number");
    }
  }
}

TEST(Log, ReachesTheInstalledSinkUntilItIsRemoved) {
  std::vector<std::pair<log::Level, std::string>> seen;
  log::write(log::Level::warning, "before: dropped");
  log::set_sink([&](log::Level level, std::string_view message) { seen.emplace_back(level, message); });
  log::write(log::Level::info, "one");
  log::write(log::Level::warning, "two");
  log::set_sink({});
  log::write(log::Level::warning, "after: dropped");
  EXPECT_THAT(seen, ::testing::ElementsAre(::testing::Pair(log::Level::info, "one"),
                                           ::testing::Pair(log::Level::warning, "two")));
}

}  // namespace
}  // namespace fsdp::testing
