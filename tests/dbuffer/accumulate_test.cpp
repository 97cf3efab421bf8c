#include "fsdp/dbuffer/accumulate.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "fsdp/base/error.h"

namespace fsdp::testing {
namespace {

template <typename T>
constexpr c10::ScalarType dtype_of() {
  if constexpr (std::is_same_v<T, float>)
    return c10::kFloat;
  else if constexpr (std::is_same_v<T, double>)
    return c10::kDouble;
  else if constexpr (std::is_same_v<T, c10::BFloat16>)
    return c10::kBFloat16;
  else
    return c10::kHalf;
}

template <typename F>
void for_each_dtype(F&& function) {
  function(float{});
  function(double{});
  function(c10::BFloat16{});
  function(c10::Half{});
}

template <typename D, typename S>
void accumulate(std::vector<D>& destination, const std::vector<S>& source, double divisor, bool overwrite,
                const std::vector<std::int64_t>& marks = {}, std::int64_t origin = 0) {
  accumulate_on_cpu({.destination = destination.data(),
                     .destination_dtype = dtype_of<D>(),
                     .source = source.data(),
                     .source_dtype = dtype_of<S>(),
                     .count = static_cast<std::int64_t>(source.size()),
                     .divisor = divisor,
                     .overwrite = overwrite,
                     .marks = marks,
                     .marks_origin = origin});
}

template <typename T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

TEST(Accumulate, AddsAndOverwritesInEveryPairOfDtypesRoundingOnce) {
  for_each_dtype([](auto d) {
    using D = decltype(d);
    for_each_dtype([](auto s) {
      using S = decltype(s);
      using W = std::conditional_t<std::is_same_v<D, double> || std::is_same_v<S, double>, double, float>;
      for (double divisor : {1.0, 3.0, 8.0}) {
        for (bool overwrite : {false, true}) {
          std::vector<D> destination, expected;
          std::vector<S> source;
          for (int i = 0; i < 65; ++i) {
            destination.push_back(static_cast<D>(static_cast<float>(i * i % 17) / 3.0f - 1.0f));
            source.push_back(static_cast<S>(static_cast<float>(i % 13) / 7.0f - 0.7f));
            const W added = static_cast<W>(source[i]) / static_cast<W>(divisor);
            expected.push_back(static_cast<D>(overwrite ? added : static_cast<W>(destination[i]) + added));
          }
          accumulate(destination, source, divisor, overwrite);
          EXPECT_TRUE(same_bits(destination, expected))
              << dtype_of<D>() << " += " << dtype_of<S>() << " / " << divisor << ", overwrite " << overwrite;
        }
      }
    });
  });
}

TEST(Accumulate, OverwritingIgnoresWhatWasThere) {
  std::vector<float> destination = {NAN, INFINITY};
  accumulate(destination, std::vector<float>{6, 9}, 3, true);
  EXPECT_EQ(destination, (std::vector<float>{2, 3}));
}

TEST(Accumulate, OfNothingTouchesNothing) {
  std::vector<float> destination = {5};
  accumulate(destination, std::vector<float>{}, 2, true);
  EXPECT_EQ(destination[0], 5);
}

TEST(Accumulate, RefusesDtypesThatAreNoGradients) {
  std::int64_t whole = 0;
  float real = 0;
  try {
    accumulate_on_cpu({.destination = &whole,
                       .destination_dtype = c10::kLong,
                       .source = &real,
                       .source_dtype = c10::kFloat,
                       .count = 1});
    FAIL() << "no error";
  } catch (const UsageError& error) {
    EXPECT_STREQ(error.what(), "gradients cannot be Long: expected Float, Double, BFloat16 or Half");
  }
}

template <typename T>
bool unused(const T& element) {
  return is_marked_unused(&element, dtype_of<T>());
}

TEST(UnusedMark, IsNegativeZeroOnlyInEveryDtype) {
  for_each_dtype([](auto type) {
    using T = decltype(type);
    EXPECT_TRUE(unused(static_cast<T>(-0.0f)));
    for (float used : {0.0f, 1.0f, -1.0f, -6e-5f, NAN}) EXPECT_FALSE(unused(static_cast<T>(used))) << used;
    std::vector<T> data(5, static_cast<T>(1.0f));
    fill_unused_on_cpu(data.data(), dtype_of<T>(), 4);
    for (int i = 0; i < 4; ++i) EXPECT_TRUE(unused(data[i]));
    EXPECT_EQ(static_cast<float>(data[4]), 1.0f);
  });
}

TEST(UnusedMark, MarkUsedTurnsOnlyTheNamedNegativeZerosPositive) {
  for_each_dtype([](auto type) {
    using T = decltype(type);
    std::vector<T> data = {static_cast<T>(-0.0f), static_cast<T>(-0.0f), static_cast<T>(-2.0f), static_cast<T>(-0.0f)};
    const std::vector<std::int64_t> indices = {101, 102};  // of an array that begins at 100
    mark_used_on_cpu(data.data(), dtype_of<T>(), indices, 100);
    EXPECT_TRUE(unused(data[0]));
    EXPECT_FALSE(unused(data[1]));
    EXPECT_EQ(static_cast<float>(data[2]), -2.0f);
    EXPECT_TRUE(unused(data[3]));
  });
}

TEST(UnusedMark, SurvivesOnlyWhenNothingCameInAndNothingWasThere) {
  for_each_dtype([](auto d) {
    using D = decltype(d);
    for_each_dtype([](auto s) {
      using S = decltype(s);
      for (double divisor : {1.0, 4.0}) {
        for (float there : {-0.0f, 0.0f, 1.0f, -1.0f}) {
          for (float in : {-0.0f, 0.0f, 2.0f, -2.0f}) {
            for (bool overwrite : {false, true}) {
              std::vector<D> destination = {static_cast<D>(there)};
              accumulate(destination, std::vector<S>{static_cast<S>(in)}, divisor, overwrite, {7}, 7);
              const bool nothing_in = in == 0 && std::signbit(in),
                         nothing_there = overwrite || (there == 0 && std::signbit(there));
              EXPECT_EQ(unused(destination[0]), nothing_in && nothing_there)
                  << there << " and " << in << ", overwrite " << overwrite;
            }
          }
        }
      }
    });
  });
}

TEST(UnusedMark, AValueThatUnderflowsToNegativeZeroCountsAsUsed) {
  for (bool overwrite : {false, true}) {
    std::vector<c10::Half> half = {-0.0f, -0.0f};
    accumulate(half, std::vector<float>{-1e-12f, -1e-12f}, 1, overwrite, {0});
    EXPECT_FALSE(unused(half[0]));
    EXPECT_TRUE(unused(half[1])) << "not a mark: left as the arithmetic gives it";

    std::vector<float> single = {-0.0f};
    accumulate(single, std::vector<double>{-1e-300}, 1, overwrite, {0});
    EXPECT_FALSE(unused(single[0]));

    std::vector<float> divided = {-0.0f};
    accumulate(divided, std::vector<float>{-1e-45f}, 1024, overwrite, {0});
    EXPECT_FALSE(unused(divided[0]));

    std::vector<c10::BFloat16> brain = {-0.0f};
    accumulate(brain, std::vector<float>{-1e-45f}, 1, overwrite, {0});
    EXPECT_FALSE(unused(brain[0]));
  }
}

TEST(UnusedMark, TravelsThroughSumsOverRanks) {
  // -0 of every rank stays; one real value, even +0, ends it: what the reductions rely on.
  EXPECT_TRUE(unused(-0.0f + -0.0f));
  EXPECT_FALSE(unused(-0.0f + 0.0f));
  EXPECT_EQ(3.0f + -0.0f, 3.0f);
}

}  // namespace
}  // namespace fsdp::testing
