#include "apps/fsdp/train.h"

#include <fmt/format.h>
#include <signal.h>
#include <sys/prctl.h>

#include <cmath>

#include "apps/fsdp/config_check.h"
#include "apps/fsdp/config_table.h"
#include "apps/fsdp/console.h"
#include "apps/fsdp/interrupt.h"
#include "apps/fsdp/rank_errors.h"
#include "apps/fsdp/settings.h"
#include "apps/fsdp/silent_exit.h"
#include "apps/fsdp/trainer.h"
#include "fsdp/base/check.h"
#include "fsdp/base/env.h"
#include "fsdp/base/log.h"
#include "fsdp/mesh/cuda_world.h"
#include "fsdp/mesh/launch.h"
#include "fsdp/mesh/spawn_ranks.h"

namespace fsdp::app {
namespace {

// Ranks of a torchrun that was killed would go on alone.
void end_with_agent() {
  if (env::text("TORCHELASTIC_RUN_ID")) prctl(PR_SET_PDEATHSIG, SIGTERM);
}

std::string describe(const TrainJob& job, const std::optional<Launcher>& launcher) {
  const auto& shape = job.config.model.shape;
  const auto& run = job.config.run;
  const auto ranks = are_processes(launcher) ? fmt::format("{} ranks started by {}", run.ranks, launcher->name)
                                             : fmt::format("{} in-process ranks", run.ranks);
  const auto& moe = job.config.model.moe;
  const auto experts = moe.experts == 0
                           ? std::string()
                           : fmt::format(", {} experts of {} over {} ranks, {} a token ({} parameters active), {}",
                                         moe.experts, moe.expert_width, job.config.parallel.expert_ranks, moe.top_k,
                                         moe_config(job.config).active_parameter_count(), job.config.parallel.schedule);
  return fmt::format(
      "model: {} parameters, {} layers x {} wide, {} heads, {} kv heads{}\n"
      "data: {}\n"
      "run: {}, {}, {} steps of {} sequences x {} tokens in {} microbatches",
      parameter_count(job.config), shape.layers, shape.width, shape.heads, shape.kv_heads, experts,
      job.data->describe(), ranks, job.config.parallel.strategy, run.steps, run.batch, run.context, run.microbatches);
}

std::string describe(const RunResult& result) {
  std::string text = fmt::format("{} steps in {} ({:.0f} tokens/s)", result.steps, format_duration(result.seconds),
                                 result.tokens_per_second());
  if (result.exposed_is_known) text += fmt::format(", {:.1f} % of the time exposed", 100 * result.exposed);
  text +=
      fmt::format(", {:.1f} % waiting for data", result.seconds > 0 ? 100 * result.data_wait / result.seconds : 0.0);
  if (result.skipped_steps > 0)
    text += fmt::format(", {} steps skipped for gradients that were not finite", result.skipped_steps);
  if (result.out_of_time) text += ", ended by run.max_seconds";
  if (result.interrupted) text += ", interrupted";
  return text;
}

void report(const TrainJob& job, const TrainCommand& command, const RunResult& result) {
  job.log->done(result);
  job.progress->line(describe(result));
  if (!command.log.empty()) job.progress->line(fmt::format("log: {}", command.log.string()));
  if (!command.profile.empty()) job.progress->line(fmt::format("trace: {}", command.profile.string()));
}

// Settings and sizes of the data; the same data may lie in another place on another machine.
std::string what_must_agree(const TrainJob& job) {
  std::string text;
  for (const Field& field : config_fields()) {
    if (field.key == "data.files" || field.key == "run.log_interval" || field.key == "checkpoint.keep") continue;
    auto value = shown_value(field, job.config);
    const bool a_path = field.key == "checkpoint.folder" || field.key == "checkpoint.weights";  // spelled in some way
    if (a_path && value != "\"\"") value = "a path";
    text += fmt::format("{} = {}\n", field.key, value);
  }
  return text + fmt::format("training tokens = {}\nheld out tokens = {}\ndigest of the first sequences = {:x}, {:x}\n",
                            job.data->train_tokens(), job.data->validation_tokens(),
                            data::digest(job.data->train_batch(0, 4)),
                            data::digest(job.data->validation_batch(0, 1, 1)));
}

// Everything the library says goes through the progress display while a run lasts.
class LogToProgress {
 public:
  LogToProgress(Progress& progress, bool leads) {
    log::set_sink([&progress, leads](log::Level level, std::string_view message) {
      if (level == log::Level::warning)
        progress.warning(message);
      else if (leads)
        progress.line(message);
    });
  }
  LogToProgress(const LogToProgress&) = delete;
  LogToProgress& operator=(const LogToProgress&) = delete;
  ~LogToProgress() { log::set_sink({}); }
};

std::string first_lines(const std::exception& error) {
  const std::string what = error.what();
  return what.substr(0, what.find("\nException raised from"));  // without the stack trace that LibTorch adds
}

// On GPUs each rank is a process of its own: starts them where no launcher has.
std::optional<int> spawn_if_needed(const TrainCommand& command) {
  const TrainConfig config = resolve_config(command.sources, std::nullopt);  // what is wrong with it is said once
  if (config.run.ranks == 1 || !uses_cuda(device_kind(config))) return std::nullopt;
  FSDP_CHECK(config.run.ranks <= cuda_device_count(), UsageError,
             "{} ranks need as many GPUs, and this process sees {}: take fewer ranks, or run.device = \"cpu\"",
             config.run.ranks, cuda_device_count());
  log::set_sink([](log::Level, std::string_view message) { console::warn(fmt::format("fsdp: {}", message)); });
  return spawn_ranks(static_cast<int>(config.run.ranks));
}

}  // namespace

int train(const TrainCommand& command) {
  const auto launcher = find_launcher();
  const bool processes = are_processes(launcher);
  if (!launcher) {
    if (const auto code = spawn_if_needed(command)) return *code;
  }
  std::optional<TrainJob> job;
  std::string error;
  try {
    job.emplace(command, launcher);
  } catch (const UsageError& refused) {
    if (!processes) throw;
    error = refused.what();  // the others have to know first
  }
  install_interrupt_handler();
  if (processes && launcher->name == "torchrun") end_with_agent();

  RunResult result;
  bool started = false;
  const auto rank_main = [&](World world) {
    if (processes) {
      settle_errors(world, error);
      settle_differences(world, what_must_agree(*job));
    }
    started = true;
    const bool leads = world.rank() == Rank(0);
    Trainer trainer(std::move(world), {job->config, *job->data, *job->progress, *job->log, job->profile});
    const auto own = trainer.run();
    if (leads || processes) result = own;
    if (leads) report(*job, command, own);  // now: a launcher that ends the job may not leave time for it later
  };
  LaunchOptions options;
  options.world.device = DeviceKind::automatic;  // as the others, most likely, whatever is wrong here
  if (job) {
    options.ranks = static_cast<int>(job->config.run.ranks);
    options.world.device = device_kind(job->config);
    options.world.deadline = std::chrono::milliseconds(std::llround(1000 * job->config.run.deadline_seconds));
  }
  {
    std::optional<LogToProgress> log_to_progress;
    if (job) log_to_progress.emplace(*job->progress, job->leads);
    if (job && job->leads) job->progress->line(describe(*job, launcher));
    try {
      launch(rank_main, options);
    } catch (const AbortedError& aborted) {
      if (processes) throw SilentExit{};
      throw RunFailure(first_lines(aborted));
    } catch (const std::exception& failed) {
      if (!started && dynamic_cast<const UsageError*>(&failed) != nullptr) throw;
      const auto what = first_lines(failed);
      throw RunFailure(processes && !what.starts_with("rank ") ? fmt::format("rank {}: {}", launcher->rank, what)
                                                               : what);
    }
  }
  return result.interrupted ? 130 : 0;
}

}  // namespace fsdp::app
