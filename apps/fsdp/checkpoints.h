// The checkpoints of a run: when they are written, which of them stay, and where a run goes on.
//
// One per rank; every call is collective. Checkpoints are folders "step-00001000" in checkpoint.folder.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "apps/fsdp/agreement.h"
#include "apps/fsdp/run_result.h"
#include "apps/fsdp/train_config.h"
#include "apps/fsdp/trained_model.h"
#include "fsdp/checkpoint/checkpoint.h"
#include "fsdp/data/token_dataset.h"
#include "fsdp/optim/optimizer.h"

namespace fsdp::app {

// Held by a process for a folder of checkpoints: two runs would remove each other's files. Where the file system has no
// locks, nothing. Throws UsageError when another process holds it.
class FolderLock {
 public:
  explicit FolderLock(const std::filesystem::path& folder);
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;
  ~FolderLock();

 private:
  int file_ = -1;
};

class Checkpoints {
 public:
  Checkpoints(const TrainConfig& config, const data::TokenDataset& data, TrainedModel& model,
              ShardedOptimizer& optimizer, const World& world, const Agreement& agreement);

  // Loads the newest checkpoint of the folder, or checkpoint.weights when there is none; sets what was loaded. Returns
  // the steps that are done. Throws UsageError for a checkpoint of another model, of other data or of another order of
  // it, naming the setting.
  struct Start {
    std::int64_t steps = 0;
    std::filesystem::path from;  // empty: from nothing
  };
  [[nodiscard]] Start restore();

  // Whether one is due after so many steps, and none has been begun for it.
  [[nodiscard]] bool due(std::int64_t steps_done) const;
  void begin(std::int64_t steps_done);
  // Whether this rank still writes. Asked on all ranks; when none does, all call finish.
  [[nodiscard]] bool writing() const { return !checkpoint_.save_is_written(); }
  [[nodiscard]] bool under_way() const { return checkpoint_.save_is_under_way(); }
  // Waits for the one under way, and drops those that are too old. Nothing when none was.
  std::optional<SavedCheckpoint> finish();
  // The last one, unless it is there already.
  [[nodiscard]] bool wanted_at_end(std::int64_t steps_done) const;

 private:
  void check_matches(const std::filesystem::path& from, const std::map<std::string, std::string>& attributes) const;
  [[nodiscard]] std::map<std::string, std::string> attributes(std::int64_t steps_done) const;
  [[nodiscard]] std::filesystem::path folder_of(std::int64_t step) const;

  const TrainConfig& config_;
  const data::TokenDataset& data_;
  const Agreement& agreement_;
  const bool leads_;
  Checkpoint checkpoint_;
  std::unique_ptr<FolderLock> lock_;  // rank 0's
  std::int64_t last_step_ = 0;        // of the newest that was begun or loaded
  std::chrono::steady_clock::time_point begun_;
  double stalled_seconds_ = 0;
};

// Steps of the checkpoints in a folder, ascending; what a killed run left of others does not count.
[[nodiscard]] std::vector<std::int64_t> checkpoint_steps(const std::filesystem::path& folder);

}  // namespace fsdp::app
