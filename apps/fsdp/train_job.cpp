#include "apps/fsdp/train_job.h"

#include <vector>

#include "apps/fsdp/config_check.h"
#include "apps/fsdp/console.h"
#include "apps/fsdp/memory_check.h"
#include "apps/fsdp/output_path.h"
#include "apps/fsdp/settings.h"
#include "fsdp/base/check.h"
#include "fsdp/mesh/cuda_world.h"

namespace fsdp::app {

TrainConfig resolve_config(const ConfigSources& sources, const std::optional<Launcher>& launcher) {
  TrainConfig config = read_train_config(sources);
  int local_ranks = static_cast<int>(config.run.ranks);
  if (are_processes(launcher)) {
    FSDP_CHECK(!sources.ranks || *sources.ranks == launcher->size, UsageError,
               "--ranks {} asks for in-process ranks, but {} started {} processes, each of which is one rank: leave "
               "--ranks out",
               *sources.ranks, launcher->name, launcher->size);
    config.run.ranks = launcher->size;
    local_ranks = launcher->local_size;
  }
  // One process of a launcher is one rank too. Not of srun: an interactive shell of Slurm looks alike.
  if (launcher && launcher->size == 1 && launcher->name != "srun" && !sources.ranks) config.run.ranks = local_ranks = 1;
  validate_train_config(config);
  if (!uses_cuda(device_kind(config))) {
    FSDP_CHECK(!config.run.capture, UsageError,
               "run.capture: a step can be captured on CUDA only; this run is on the CPU");
    check_memory(config, local_ranks);
  }
  return config;
}

TrainJob::TrainJob(const TrainCommand& command, const std::optional<Launcher>& launcher)
    : config(resolve_config(command.sources, launcher)),
      leads(!are_processes(launcher) || launcher->rank == 0),
      data(std::make_unique<data::TokenDataset>(
          config.data.files, data::TokenDatasetOptions{.context = config.run.context,
                                                       .validation_fraction = config.data.validation_fraction,
                                                       .seed = static_cast<std::uint64_t>(config.run.seed),
                                                       .vocabulary = config.model.shape.vocabulary,
                                                       .weights = config.data.weights,
                                                       .mask_document_starts = config.data.mask_document_starts})) {
  std::filesystem::path log_path;
  if (leads) {
    std::vector<std::filesystem::path> inputs(config.data.files.begin(), config.data.files.end());
    inputs.emplace_back(command.sources.file);
    check_output_file(command.log, "--log", inputs);
    if (!command.log.empty()) inputs.push_back(command.log);
    check_output_file(command.profile, "--profile", inputs);
    if (!command.profile.empty()) make_parent_folder(command.profile, "--profile");
    log_path = command.log;
    profile = command.profile;
  }
  log = std::make_unique<RunLog>(log_path);
  progress = std::make_unique<Progress>(ProgressOptions{.live = !are_processes(launcher) && console::is_terminal(),
                                                        .steps = config.run.steps,
                                                        .log_interval = config.run.log_interval,
                                                        .max_seconds = config.run.max_seconds});
}

}  // namespace fsdp::app
