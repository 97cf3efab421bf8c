#include "apps/fsdp/run_log.h"

#include <nlohmann/json.hpp>
#include <span>
#include <string>

#include "apps/fsdp/output_path.h"
#include "fsdp/base/check.h"
#include "fsdp/data/part_file.h"

namespace fsdp::app {

RunLog::RunLog(const std::filesystem::path& path) : path_(path) {
  if (path_.empty()) return;
  make_parent_folder(path_, "--log");
  file_.open(path_, std::ios::app);
  FSDP_CHECK(file_.good(), UsageError, "--log: cannot write {}", path_.string());
}

void RunLog::begin(std::int64_t steps) {
  if (path_.empty()) return;
  file_.close();
  std::string kept;
  if (steps > 0) {
    std::ifstream before(path_);
    for (std::string line; std::getline(before, line);) {
      const auto object = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
      if (!object.is_object() || !object.contains("step") || !object["step"].is_number_integer()) continue;
      const auto step = object["step"].get<std::int64_t>();
      if (step < steps || (step == steps && object.value("event", "") != "validation")) kept += line + '\n';
    }
  }
  if (!kept.empty()) {  // beside it first: a run that is killed here loses nothing
    data::PartFile whole(path_);
    whole.append(std::as_bytes(std::span(kept)));
    whole.close();
    whole.publish();
  }
  file_.open(path_, kept.empty() ? std::ios::trunc : std::ios::app);
  FSDP_CHECK(file_.good(), Error, "--log: cannot write {}", path_.string());
}

void RunLog::checkpoint(const SavedCheckpoint& saved) {
  write({{"event", "checkpoint"},
         {"step", saved.step},
         {"folder", saved.folder.string()},
         {"bytes", saved.bytes},
         {"seconds", saved.seconds},
         {"stalled_ms", saved.stalled_seconds * 1e3}});
}

void RunLog::step(const StepResult& result) {
  write({{"event", "step"},
         {"step", result.step},
         {"loss", result.loss},
         {"grad_norm", result.grad_norm},
         {"lr", result.learning_rate},
         {"tokens_per_second", result.tokens_per_second()},
         {"step_ms", result.seconds * 1e3},
         {"peak_bytes", result.peak_bytes},
         {"exposed", result.exposed},
         {"data_wait_ms", result.data_wait * 1e3}});
}

void RunLog::validation(std::int64_t step, double loss) {
  write({{"event", "validation"}, {"step", step}, {"validation_loss", loss}});
}

void RunLog::done(const RunResult& result) {
  nlohmann::ordered_json object{{"event", result.interrupted ? "interrupted" : "done"}};
  object["validation_loss"] =
      result.validation_loss ? nlohmann::ordered_json(*result.validation_loss) : nlohmann::ordered_json();
  object.update({{"parameters", result.parameters},
                 {"ranks", result.ranks},
                 {"steps", result.steps},
                 {"seconds", result.seconds},
                 {"tokens_per_second", result.tokens_per_second()},
                 {"exposed", result.exposed},
                 {"data_wait_seconds", result.data_wait},
                 {"peak_bytes", result.peak_bytes},
                 {"skipped_steps", result.skipped_steps},
                 {"out_of_time", result.out_of_time}});
  write(object);
}

void RunLog::write(const nlohmann::ordered_json& object) {
  if (path_.empty()) return;
  file_ << object.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n" << std::flush;
  FSDP_CHECK(file_.good(), Error, "writing the log {} failed: is the disk full?", path_.string());
}

}  // namespace fsdp::app
