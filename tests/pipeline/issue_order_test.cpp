// The issue order of fine-grained 1F1B, against orders written out by hand.
#include "fsdp/pipeline/issue_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <sstream>

#include "fsdp/base/error.h"

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

PipelineShape stage_of(int stages, int stage, int chunks) {
  PipelineShape shape{stages, stage, {}};
  for (int c = 0; c < chunks; ++c)
    shape.chunks.push_back(
        {.layers = 1, .chunk = c, .first = stage == 0 && c == 0, .last = stage + 1 == stages && c + 1 == chunks});
  return shape;
}

TEST(PipelineOrder, FirstAndLastOfTwoStagesWithTwoChunks) {
  const auto first = pipeline_steps(2, stage_of(2, 0, 2)), last = pipeline_steps(2, stage_of(2, 1, 2));
  ASSERT_EQ(first.size(), 8u);  // all four forwards, then all backwards
  EXPECT_EQ(text(first[0]), "pre.0f A0.0f D0.0f E0.0f C0.0f next.0f");
  EXPECT_EQ(text(first[2]), "previous@1.0f A0@1.0f D0@1.0f E0@1.0f C0@1.0f next@1.0f");
  EXPECT_EQ(text(first[4]), "next@1.0b C0@1.0b E0@1.0b E0@1.0w D0@1.0b A0@1.0b previous@1.0b A0@1.0w");
  ASSERT_EQ(last.size(), 7u);
  EXPECT_EQ(text(last[3]),
            "loss@1.0b previous@1.1f post@1.0b C0@1.0b A0@1.1f E0@1.0b D0@1.1f E0@1.0w D0@1.0b E0@1.1f C0@1.1f "
            "A0@1.0b previous@1.0b A0@1.0w post@1.1f loss@1.1f");
}

TEST(PipelineOrder, SeveralChunksNeedAMultipleOfTheStages) {
  EXPECT_THROW(static_cast<void>(pipeline_steps(3, stage_of(2, 0, 2))), UsageError);
  EXPECT_EQ(pipeline_steps(3, stage_of(2, 0, 1)).size(), 6u);
}

// All stages together, a step each a turn: whoever waits for what nobody has sent yet stands still. No standstill is
// for ever, no message is taken out of order, and once the first gradients are there nobody waits at all until work
// ends.
TEST(PipelineOrder, StagesFitTogether) {
  for (int stages = 1; stages <= 4; ++stages) {
    for (int chunks = 1; chunks <= 3; ++chunks) {
      for (int microbatches = stages; microbatches <= 4 * stages; microbatches += stages) {
        for (const bool merged : {true, false}) {
          const std::string name = std::to_string(stages) + " stages, " + std::to_string(chunks) + " chunks, " +
                                   std::to_string(microbatches) + " microbatches";
          std::vector<std::vector<std::vector<NodeCall>>> steps;
          for (int s = 0; s < stages; ++s)
            steps.push_back(pipeline_steps(microbatches, stage_of(stages, s, chunks), merged));
          // Messages under way, by their receiver: (microbatch, chunk there).
          std::vector<std::vector<std::pair<int, int>>> activations(stages), gradients(stages);
          std::vector<std::size_t> next(stages, 0);
          std::vector<int> waited(stages, 0);
          std::set<std::string> done;
          int turns = 0;
          for (bool over = false; !over; ++turns) {
            ASSERT_LT(turns, 1000) << name << ": a standstill";
            const auto activations_before = activations, gradients_before = gradients;
            over = true;
            for (int s = 0; s < stages; ++s) {
              if (next[s] == steps[s].size()) continue;
              over = false;
              const auto& step = steps[s][next[s]];
              bool ready = true;
              for (const auto& call : step) {
                const bool takes_activation = call.node == NodeKind::previous && call.pass == Pass::forward;
                const bool takes_gradient = call.node == NodeKind::next && call.pass == Pass::backward;
                if (!takes_activation && !takes_gradient) continue;
                const auto& box = takes_activation ? activations_before[s] : gradients_before[s];
                ready &= !box.empty();
                if (!box.empty()) {
                  EXPECT_EQ(box.front(), std::pair(call.microbatch, call.chunk)) << name << ", stage " << s;
                }
              }
              if (!ready) {
                ++waited[s];
                continue;
              }
              for (const auto& call : step) {  // the two of a merged step do not depend on each other
                if (!merged || call.pass != Pass::backward || call.layer < 0) continue;
                NodeCall forward = call;
                forward.pass = Pass::forward;
                EXPECT_TRUE(done.contains(std::to_string(s) + " " + to_string(forward)))
                    << name << ", stage " << s << ": " << to_string(call) << " beside its own forward";
              }
              for (const auto& call : step) {
                const bool is_new = done.insert(std::to_string(s) + " " + to_string(call)).second;
                EXPECT_TRUE(is_new) << name << ": " << to_string(call);
                if (call.node == NodeKind::previous && call.pass == Pass::forward)
                  activations[s].erase(activations[s].begin());
                if (call.node == NodeKind::next && call.pass == Pass::backward)
                  gradients[s].erase(gradients[s].begin());
                if (call.node == NodeKind::next && call.pass == Pass::forward)
                  activations[(s + 1) % stages].emplace_back(call.microbatch, call.chunk + (s + 1 == stages ? 1 : 0));
                if (call.node == NodeKind::previous && call.pass == Pass::backward)
                  gradients[(s + stages - 1) % stages].emplace_back(call.microbatch, call.chunk - (s == 0 ? 1 : 0));
              }
              ++next[s];
            }
          }
          for (int s = 0; s < stages; ++s) {
            EXPECT_TRUE(activations[s].empty() && gradients[s].empty()) << name;
            EXPECT_EQ(std::count_if(done.begin(), done.end(),
                                    [&](const std::string& d) { return d.starts_with(std::to_string(s) + " A0"); }),
                      3 * microbatches * chunks)
                << name;
            // The pipeline fills before a stage's first step; it waits again only for the first gradients' way back,
            // and only where so few microbatches come that nothing is left to do meanwhile.
            const bool enough = microbatches * chunks >= 2 * (stages - 1 - s) + (chunks - 1) * stages + 1;
            if (enough && microbatches >= 2 * stages) {
              EXPECT_LE(waited[s], s) << name << ", stage " << s;
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace fsdp::pipeline
