// The issue order of fine-grained 1F1B, against orders written out by hand.
#include "fsdp/pipeline/issue_order.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <sstream>

namespace fsdp::pipeline {
namespace {

std::string text(const std::vector<NodeCall>& calls) {
  std::string all;
  for (const auto& call : calls) all += (all.empty() ? "" : " ") + to_string(call);
  return all;
}

TEST(IssueOrder, TwoMicrobatchesTwoLayers) {
  const auto steps = one_f_one_b(2, {.layers = 2});
  ASSERT_EQ(steps.size(), 3u);
  EXPECT_EQ(text(steps[0]), "pre.0f A0.0f D0.0f E0.0f C0.0f A1.0f D1.0f E1.0f C1.0f post.0f loss.0f");
  EXPECT_EQ(text(steps[1]),
            "loss.0b pre.1f post.0b "
            "C1.0b A0.1f E1.0b D0.1f E1.0w D1.0b E0.1f C0.1f A1.0b A1.0w "
            "C0.0b A1.1f E0.0b D1.1f E0.0w D0.0b E1.1f C1.1f A0.0b "
            "A0.0w post.1f pre.0b loss.1f");
  EXPECT_EQ(text(steps[2]),
            "loss.1b post.1b C1.1b E1.1b E1.1w D1.1b A1.1b A1.1w C0.1b E0.1b E0.1w D0.1b A0.1b A0.1w pre.1b");
}

TEST(IssueOrder, EarlyReleaseMovesTheBackwardOfA) {
  const auto step = merged_step(1, {.layers = 1}, 0, {.layers = 1, .release_early = true});
  EXPECT_EQ(
      text(step),
      "loss.0b pre.1f post.0b C0.0b A0.1f E0.0b D0.1f E0.0w D0.0b A0.0b E0.1f C0.1f A0.0w post.1f pre.0b loss.1f");
}

TEST(IssueOrder, WithoutDelayedWeightsNothingElseChanges) {
  const auto with = merged_step(1, {.layers = 3}, 0, {.layers = 3});
  auto expected = with;
  std::erase_if(expected, [](const NodeCall& call) { return call.pass == Pass::weights; });
  const ChunkShape plain{.layers = 3, .delay_weights = false};
  EXPECT_EQ(merged_step(1, plain, 0, plain), expected);
}

TEST(IssueOrder, ChunksOfUnequalDepthFinishTheBackwardFirst) {
  const ChunkShape one{.layers = 1, .delay_weights = false}, two{.layers = 2, .delay_weights = false};
  EXPECT_EQ(text(merged_step(1, one, 0, two)),
            "loss.0b pre.1f post.0b C1.0b A0.1f E1.0b D0.1f D1.0b E0.1f C0.1f A1.0b C0.0b E0.0b D0.0b A0.0b "
            "post.1f pre.0b loss.1f");
  EXPECT_EQ(text(merged_step(1, two, 0, one)),
            "loss.0b pre.1f post.0b C0.0b A0.1f E0.0b D0.1f D0.0b E0.1f C0.1f A0.0b A1.1f D1.1f E1.1f C1.1f "
            "post.1f pre.0b loss.1f");
}

// Whatever the order: every node runs once a pass, after what it needs, and exchanges of a rank come in one order.
TEST(IssueOrder, KeepsTheChainsOfEveryMicrobatch) {
  for (int layers = 0; layers <= 4; ++layers) {
    for (int microbatches = 0; microbatches <= 4; ++microbatches) {
      for (const bool delay : {false, true}) {
        for (const bool early : {false, true}) {
          const ChunkShape shape{layers, delay, early};
          for (const auto& steps : {one_f_one_b(microbatches, shape), sequential(microbatches, shape)}) {
            std::map<std::string, int> position;
            int next = 0;
            for (const auto& step : steps) {
              for (const auto& call : step) {
                const bool is_new = position.emplace(to_string(call), next++).second;
                EXPECT_TRUE(is_new) << to_string(call);
              }
            }
            const int calls = microbatches * (6 + layers * (delay ? 10 : 8));
            EXPECT_EQ(next, calls);
            const auto before = [&](const std::string& a, const std::string& b) {
              ASSERT_TRUE(position.contains(a) && position.contains(b)) << a << " " << b;
              EXPECT_LT(position[a], position[b]) << a << " before " << b;
            };
            for (int m = 0; m < microbatches; ++m) {
              std::vector<std::string> chain{"pre"};
              for (int l = 0; l < layers; ++l) {
                for (const char* node : {"A", "D", "E", "C"}) chain.push_back(node + std::to_string(l));
              }
              chain.insert(chain.end(), {"post", "loss"});
              const std::string suffix = "." + std::to_string(m);
              for (std::size_t i = 1; i < chain.size(); ++i) {
                before(chain[i - 1] + suffix + "f", chain[i] + suffix + "f");
                before(chain[i] + suffix + "b", chain[i - 1] + suffix + "b");
              }
              before("loss" + suffix + "f", "loss" + suffix + "b");
              for (int l = 0; l < layers && delay; ++l) {
                for (const char* node : {"A", "E"}) {
                  const std::string name = node + std::to_string(l) + suffix;
                  before(name + "b", name + "w");
                  if (m + 1 < microbatches)
                    before(name + "w", node + std::to_string(l) + "." + std::to_string(m + 1) + "b");
                }
              }
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace fsdp::pipeline
