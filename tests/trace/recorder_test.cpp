#include "fsdp/trace/recorder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "fsdp/base/error.h"
#include "fsdp/trace/chrome_writer.h"

namespace fsdp::testing {
namespace {

using trace::Kind;
using trace::Recorder;
using trace::Span;

TEST(Recorder, KeepsIssueOrderWhileAnotherThreadFinishesSpans) {
  Recorder recorder;
  constexpr int kCount = 2000;  // many more than fit in one block of the container
  std::vector<Span*> issued;
  for (int i = 0; i < kCount / 2; ++i)
    issued.push_back(recorder.issue(recorder.intern(std::to_string(i)), Kind::all_gather, 1));
  const std::vector<Span*> first(issued);
  std::thread worker([&first] {  // the last first
    for (int i = kCount / 2; i-- > 0;) {
      first[i]->begin = i * 10;
      first[i]->end = i * 10 + 5;
    }
  });
  for (int i = kCount / 2; i < kCount; ++i)
    issued.push_back(recorder.issue(recorder.intern(std::to_string(i)), Kind::compute, 0));
  worker.join();
  const auto spans = recorder.spans();
  ASSERT_EQ(spans.size(), static_cast<std::size_t>(kCount));
  EXPECT_EQ(recorder.size(), spans.size());
  for (int i = 0; i < kCount; ++i) {
    ASSERT_EQ(spans[i].name, std::to_string(i));
    ASSERT_EQ(spans[i].kind, i < kCount / 2 ? Kind::all_gather : Kind::compute);
    ASSERT_EQ(spans[i].begin, i < kCount / 2 ? i * 10 : trace::kUnset);
    ASSERT_EQ(spans[i].end, i < kCount / 2 ? i * 10 + 5 : trace::kUnset);
  }
}

TEST(Recorder, InternsEqualTextToEqualPointersForItsWholeLife) {
  Recorder recorder;
  const char* first = recorder.intern("unshard");
  for (int i = 0; i < 5000; ++i) (void)recorder.intern("filler that makes the table grow " + std::to_string(i));
  recorder.clear();
  std::string other_address = "unsh";
  other_address += "ard";
  EXPECT_EQ(recorder.intern(other_address), first);
  EXPECT_STREQ(first, "unshard");
  EXPECT_NE(recorder.intern("reshard"), first);
}

TEST(Recorder, ClearForgetsTheSpans) {
  Recorder recorder;
  (void)recorder.issue(recorder.intern("a"), Kind::wait, 3);
  recorder.clear();
  EXPECT_EQ(recorder.size(), 0u);
  EXPECT_EQ(recorder.issue(recorder.intern("b"), Kind::unit, 0)->end, trace::kUnset);
}

TEST(Kinds, HaveTheirOwnNamesAndKnowWhatIsCommunication) {
  std::vector<std::string> names, communication;
  for (int k = 0; k <= static_cast<int>(Kind::unit); ++k) {
    names.emplace_back(trace::to_string(static_cast<Kind>(k)));
    if (trace::is_communication(static_cast<Kind>(k))) communication.push_back(names.back());
  }
  EXPECT_THAT(names, ::testing::ElementsAre("compute", "all_gather", "reduce_scatter", "all_reduce", "broadcast",
                                            "all_to_all", "send_recv", "barrier", "wait", "unit"));
  EXPECT_THAT(communication, ::testing::ElementsAre("all_gather", "reduce_scatter", "all_reduce", "broadcast",
                                                    "all_to_all", "send_recv", "barrier"));
}

class ChromeTrace : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (std::filesystem::temp_directory_path() / "fsdp_trace_XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  [[nodiscard]] int files() const {
    return static_cast<int>(
        std::distance(std::filesystem::directory_iterator(folder_), std::filesystem::directory_iterator()));
  }

  std::filesystem::path folder_;
};

TEST_F(ChromeTrace, IsWholeAndHasTheSpansInMicroseconds) {
  const std::vector<Span> spans = {
      {.name = "mm", .kind = Kind::compute, .stream = 0, .begin = 1500, .end = 4000},
      {.name = "unit \"a\"\\b",
       .kind = Kind::all_gather,
       .stream = 2,
       .sequence = 7,
       .bytes = 4096,
       .begin = 2000,
       .end = 2250},
      {.name = "running", .kind = Kind::all_gather, .stream = 2, .begin = 9000, .end = trace::kUnset},
  };
  const auto path = folder_ / "trace.json";
  trace::write_chrome_trace(path, spans, 3, {{0, "compute"}, {2, "gather"}});
  EXPECT_EQ(files(), 1);
  std::ifstream file(path);
  const auto events = nlohmann::json::parse(file);
  ASSERT_TRUE(events.is_array());
  std::vector<nlohmann::json> complete;
  std::map<int, std::string> threads;
  std::string process;
  for (const auto& event : events) {
    EXPECT_EQ(event["pid"], 3);
    if (event["ph"] == "X")
      complete.push_back(event);
    else if (event["name"] == "thread_name")
      threads[event["tid"]] = event["args"]["name"];
    else if (event["name"] == "process_name")
      process = event["args"]["name"];
  }
  EXPECT_EQ(process, "rank 3");
  EXPECT_EQ(threads, (std::map<int, std::string>{{0, "compute"}, {2, "gather"}}));
  ASSERT_EQ(complete.size(), 2u);
  EXPECT_EQ(complete[0]["name"], "mm");
  EXPECT_EQ(complete[0]["cat"], "compute");
  EXPECT_EQ(complete[0]["tid"], 0);
  EXPECT_DOUBLE_EQ(complete[0]["ts"], 1.5);
  EXPECT_DOUBLE_EQ(complete[0]["dur"], 2.5);
  EXPECT_FALSE(complete[0].contains("args"));
  EXPECT_EQ(complete[1]["name"], "unit \"a\"\\b");
  EXPECT_EQ(complete[1]["cat"], "all_gather");
  EXPECT_EQ(complete[1]["tid"], 2);
  EXPECT_DOUBLE_EQ(complete[1]["ts"], 2.0);
  EXPECT_DOUBLE_EQ(complete[1]["dur"], 0.25);
  EXPECT_EQ(complete[1]["args"]["sequence"], 7);
  EXPECT_EQ(complete[1]["args"]["bytes"], 4096);
}

TEST_F(ChromeTrace, ReplacesAnOlderFileAndAcceptsNoSpans) {
  const auto path = folder_ / "trace.json";
  std::ofstream(path) << "an older and much longer text that is not JSON at all, and must not shine through";
  trace::write_chrome_trace(path, {}, 0, {});
  std::ifstream file(path);
  EXPECT_EQ(nlohmann::json::parse(file).size(), 1u);
  EXPECT_EQ(files(), 1);
}

TEST_F(ChromeTrace, NamesThePathOfAFolderThatIsNotThere) {
  const auto path = folder_ / "missing" / "trace.json";
  try {
    trace::write_chrome_trace(path, {}, 0, {});
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr(path.string()));
  }
  EXPECT_EQ(files(), 0);
}

TEST_F(ChromeTrace, LeavesNothingBehindWhenItsNameIsTaken) {
  const auto path = folder_ / "trace.json";
  std::filesystem::create_directory(path);
  try {
    trace::write_chrome_trace(path, {}, 0, {});
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr(path.string()));
  }
  EXPECT_EQ(files(), 1) << "only the folder that took the name";
}

}  // namespace
}  // namespace fsdp::testing
