#include "apps/fsdp/checkpoints.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <string_view>

#include "apps/fsdp/config_table.h"
#include "fsdp/base/check.h"
#include "fsdp/checkpoint/checkpoint_folder.h"
#include "fsdp/checkpoint/tensor_index.h"
#include "models/llama_names.h"

namespace fsdp::app {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "step-";

// What a run must have in common with the one that it continues, beside the sizes of weights: the function that they
// make, and the samples that come next.
constexpr std::array kMustMatch{"model.heads",
                                "model.rope_theta",
                                "model.norm_epsilon",
                                "model.top_k",
                                "model.bias_rate",
                                "data.weights",
                                "run.batch",
                                "run.context",
                                "run.seed",
                                "optimizer.name",
                                "data.validation_fraction",
                                "data.mask_document_starts"};

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

fs::path name_of(std::int64_t step) { return fmt::format("{}{:08}", kPrefix, step); }

std::optional<std::int64_t> step_of(const fs::path& folder) {
  const std::string name = folder.filename().string();
  if (!name.starts_with(kPrefix)) return std::nullopt;
  std::int64_t step = 0;
  const char* end = name.data() + name.size();
  const auto [stop, error] = std::from_chars(name.data() + kPrefix.size(), end, step);
  return error == std::errc{} && stop == end && name == name_of(step) ? std::optional(step) : std::nullopt;
}

// Here, while nothing is lost yet, and not when the first checkpoint is due.
void check_folder(const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  const bool writable = !error && ::access(folder.c_str(), W_OK | X_OK) == 0;
  FSDP_CHECK(writable, UsageError, "checkpoint.folder: {} cannot be written: {}", folder.string(),
             error ? error.message() : std::strerror(errno));
}

// A run that was killed while it replaced a checkpoint leaves the old one aside, while it wrote one a part of it.
void tidy(const fs::path& folder) {
  std::error_code ignored;
  std::vector<fs::path> aside, parts;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    const auto whole = fs::path(entry.path()).replace_extension();
    if (!step_of(whole)) continue;
    if (entry.path().extension() == ".old") aside.push_back(entry.path());
    if (entry.path().extension() == ".part") parts.push_back(entry.path());
  }
  for (const auto& old : aside) {
    checkpoint::recover(fs::path(old).replace_extension());
    fs::remove_all(old, ignored);
  }
  for (const auto& part : parts) fs::remove_all(part, ignored);
}

}  // namespace

FolderLock::FolderLock(const fs::path& folder) {
  const fs::path path = folder / ".lock";
  file_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (file_ < 0 || ::flock(file_, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return;
  ::close(file_);
  detail::fail<UsageError>("checkpoint.folder: another run is using {}: wait for it, or choose another folder",
                           folder.string());
}

FolderLock::~FolderLock() {
  if (file_ >= 0) ::close(file_);
}

std::vector<std::int64_t> checkpoint_steps(const fs::path& folder) {
  std::vector<std::int64_t> steps;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    if (const auto step = step_of(entry.path()); step && checkpoint::TensorIndex::is_checkpoint(entry.path()))
      steps.push_back(*step);
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

Checkpoints::Checkpoints(const TrainConfig& config, const data::TokenDataset& data, TrainedModel& model,
                         ShardedOptimizer& optimizer, const World& world, const Agreement& agreement)
    : config_(config),
      data_(data),
      agreement_(agreement),
      leads_(world.rank() == Rank(0)),
      checkpoint_(*model.context(), &optimizer) {
  for (const auto& [name, tensor] : model.extra_state()) checkpoint_.add_tensor(name, tensor);
}

fs::path Checkpoints::folder_of(std::int64_t step) const { return fs::path(config_.checkpoint.folder) / name_of(step); }

Checkpoints::Start Checkpoints::restore() {
  const auto& settings = config_.checkpoint;
  if (!settings.folder.empty()) {
    std::int64_t newest = 0;
    if (leads_) {  // one looks, so that all see the same
      check_folder(settings.folder);
      lock_ = std::make_unique<FolderLock>(settings.folder);
      tidy(settings.folder);
      if (const auto steps = checkpoint_steps(settings.folder); !steps.empty()) newest = steps.back();
    }
    newest = static_cast<std::int64_t>(agreement_.sum({static_cast<double>(newest)})[0]);
    const auto from = folder_of(newest);
    FSDP_CHECK(settings.resume || newest == 0, UsageError,
               "checkpoint.resume is false, and {} is there from an earlier run: choose another checkpoint.folder, or "
               "remove it",
               from.string());
    FSDP_CHECK(newest <= config_.run.steps, UsageError, "{} has {} steps behind it, and run.steps is {}", from.string(),
               newest, config_.run.steps);
    if (newest > 0) {
      check_matches(from, checkpoint::TensorIndex::open(from).attributes());
      static_cast<void>(checkpoint_.load(from));
      last_step_ = newest;
      return {newest, from};
    }
  }
  if (settings.weights.empty()) return {};
  LoadOptions options{.optimizer = false};
  if (settings.weights_format == "llama") options.stored_name = models::llama_name;
  static_cast<void>(checkpoint_.load(settings.weights, options));
  return {0, settings.weights};
}

bool Checkpoints::due(std::int64_t steps_done) const {
  const auto& settings = config_.checkpoint;
  return !settings.folder.empty() && settings.interval > 0 && steps_done % settings.interval == 0 &&
         steps_done != last_step_;
}

bool Checkpoints::wanted_at_end(std::int64_t steps_done) const {
  return !config_.checkpoint.folder.empty() && steps_done > 0 && steps_done != last_step_;
}

void Checkpoints::begin(std::int64_t steps_done) {
  last_step_ = steps_done;
  begun_ = Clock::now();
  checkpoint_.begin_save(folder_of(steps_done), attributes(steps_done));
  stalled_seconds_ = seconds_since(begun_);
}

std::optional<SavedCheckpoint> Checkpoints::finish() {
  if (!checkpoint_.save_is_under_way()) return std::nullopt;
  const auto start = Clock::now();
  checkpoint_.finish_save();
  SavedCheckpoint saved{.step = last_step_,
                        .folder = folder_of(last_step_),
                        .seconds = seconds_since(begun_),
                        .stalled_seconds = stalled_seconds_ + seconds_since(start)};
  if (leads_) saved.bytes = checkpoint::TensorIndex::open(saved.folder).bytes();
  if (leads_ && config_.checkpoint.keep > 0) {
    auto steps = checkpoint_steps(config_.checkpoint.folder);
    while (static_cast<std::int64_t>(steps.size()) > config_.checkpoint.keep) {
      checkpoint::remove_checkpoint(folder_of(steps.front()));
      steps.erase(steps.begin());
    }
  }
  return saved;
}

std::map<std::string, std::string> Checkpoints::attributes(std::int64_t steps_done) const {
  std::map<std::string, std::string> result{
      {"step", std::to_string(steps_done)},
      {"training_tokens", std::to_string(data_.train_tokens())},
      {"first_sequences", fmt::format("{:x}", data::digest(data_.train_batch(0, 4)))}};
  for (const Field& field : config_fields()) result["config." + std::string(field.key)] = shown_value(field, config_);
  return result;
}

void Checkpoints::check_matches(const fs::path& from, const std::map<std::string, std::string>& saved) const {
  const auto now = attributes(0);
  const auto compare = [&](const std::string& key, const char* shown) {
    const auto found = saved.find(key);
    if (found == saved.end()) return;  // a setting that there was not
    FSDP_CHECK(
        found->second == now.at(key), UsageError,
        "{} was saved with {} = {}, and it is {} now, so the run would not go on where it stopped: set it back, or "
        "begin a new run with another checkpoint.folder and checkpoint.weights = \"{}\"",
        from.string(), shown, found->second, now.at(key), from.string());
  };
  for (const char* key : kMustMatch) compare("config." + std::string(key), key);
  compare("training_tokens", "the number of training tokens");
  compare("first_sequences", "the digest of the first sequences");
}

}  // namespace fsdp::app
