#include "fsdp/optim/schedule.h"

#include <gtest/gtest.h>

namespace fsdp::testing {
namespace {

constexpr double kPeak = 0.8;

LearningRateSchedule schedule(Decay decay) {
  return {.peak = kPeak, .final_fraction = 0.25, .warmup_steps = 10, .total_steps = 110, .decay = decay};
}

TEST(LearningRateSchedule, WarmsUpLinearlyToThePeak) {
  for (Decay decay : {Decay::constant, Decay::linear, Decay::cosine}) {
    const auto rate = schedule(decay);
    for (int step = 0; step < 10; ++step) EXPECT_DOUBLE_EQ(rate.at(step), kPeak * (step + 1) / 10) << step;
    EXPECT_DOUBLE_EQ(rate.at(10), kPeak);
  }
}

TEST(LearningRateSchedule, ConstantStaysAtThePeak) {
  const auto rate = schedule(Decay::constant);
  for (int step : {10, 60, 110, 100'000}) EXPECT_DOUBLE_EQ(rate.at(step), kPeak);
}

TEST(LearningRateSchedule, LinearFallsEvenlyToItsFinalValue) {
  const auto rate = schedule(Decay::linear);
  EXPECT_DOUBLE_EQ(rate.at(35), kPeak * (0.25 + 0.75 * 0.75));
  EXPECT_DOUBLE_EQ(rate.at(60), kPeak * (0.25 + 0.75 * 0.5));
  EXPECT_DOUBLE_EQ(rate.at(110), kPeak * 0.25);
}

TEST(LearningRateSchedule, CosineIsSlowAtBothEndsAndHalfWayInTheMiddle) {
  const auto rate = schedule(Decay::cosine);
  EXPECT_NEAR(rate.at(60), kPeak * (0.25 + 0.75 * 0.5), 1e-15);
  EXPECT_NEAR(rate.at(35), kPeak * (0.25 + 0.75 * 0.8535533905932737), 1e-15);  // (1 + cos 45 degrees) / 2
  EXPECT_NEAR(rate.at(110), kPeak * 0.25, 1e-15);
  EXPECT_LT(rate.at(10) - rate.at(11), rate.at(59) - rate.at(60));
  EXPECT_LT(rate.at(109) - rate.at(110), rate.at(59) - rate.at(60));
}

TEST(LearningRateSchedule, KeepsTheFinalValueBeyondTheLastStep) {
  for (Decay decay : {Decay::linear, Decay::cosine}) {
    for (int step : {111, 200, 1'000'000}) EXPECT_NEAR(schedule(decay).at(step), kPeak * 0.25, 1e-15);
  }
}

TEST(LearningRateSchedule, NeverRisesAfterItsWarmUp) {
  for (Decay decay : {Decay::linear, Decay::cosine}) {
    const auto rate = schedule(decay);
    for (int step = 10; step < 120; ++step) ASSERT_LE(rate.at(step + 1), rate.at(step));
  }
}

TEST(LearningRateSchedule, WithoutWarmUpStartsAtThePeak) {
  const LearningRateSchedule rate{
      .peak = kPeak, .final_fraction = 0, .warmup_steps = 0, .total_steps = 4, .decay = Decay::linear};
  EXPECT_DOUBLE_EQ(rate.at(0), kPeak);
  EXPECT_DOUBLE_EQ(rate.at(2), kPeak / 2);
  EXPECT_DOUBLE_EQ(rate.at(4), 0);
}

TEST(LearningRateSchedule, AWarmUpAsLongAsTheRunIsAtTheFinalValueFromItsEndOn) {
  for (Decay decay : {Decay::linear, Decay::cosine}) {
    const LearningRateSchedule rate{
        .peak = kPeak, .final_fraction = 0.25, .warmup_steps = 10, .total_steps = 10, .decay = decay};
    EXPECT_DOUBLE_EQ(rate.at(9), kPeak);
    EXPECT_DOUBLE_EQ(rate.at(10), kPeak * 0.25);
  }
}

}  // namespace
}  // namespace fsdp::testing
