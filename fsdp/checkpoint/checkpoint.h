// Saves and loads weights, optimizer state and buffers of a sharded run, on any number of ranks and any mesh.
//
//   fsdp::Checkpoint checkpoint(*context, &optimizer);
//   checkpoint.save("runs/a/step-1000", {{"step", "1000"}});
//   ...
//   auto loaded = checkpoint.load("runs/a/step-1000");        // the same strategy or another, more ranks or fewer
//   auto step = std::stoll(loaded.attributes.at("step"));
//
// Every rank writes what it holds, in a file of its own; of what several ranks hold alike, one does. Every rank reads
// the elements it needs. Ranks tell each other only whether they succeeded. The folder must be one for all ranks (a
// file system they share). Weights are stored whole-tensor-wise by name, so neither strategy, mesh, units nor prefetch
// need be those of the run that saved. The format is that of tensor_index.h: any reader of safetensors can open the
// files.
//
// A checkpoint appears under its name only when it is whole: it is written as FOLDER.part, made durable and renamed. If
// any rank fails, all throw the same error, and what was there before stays.
//
// All ranks make it and make the same calls, between steps. Host thread of the rank; `context` and `optimizer` outlive
// it.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/module/context.h"
#include "fsdp/optim/optimizer.h"

namespace fsdp {

struct LoadOptions {
  // false: weights and buffers only, from a checkpoint, a .safetensors file, or a folder with one or several of them
  // (as Hugging Face writes them). The optimizer stays as it is.
  bool optimizer = true;
  // Weights that the model has and the file lacks, or the other way round, are an error that lists them.
  bool strict = true;
  // Names in the file of the model's weights; default: the same.
  std::function<std::string(const std::string& name)> stored_name = {};
};

struct LoadResult {
  std::map<std::string, std::string> attributes;
  int ranks = 0;                     // that had saved it; 0: plain files
  std::vector<std::string> missing;  // weights and buffers of the model that were not there; they keep their values
  std::vector<std::string> unused;   // and those there that the model does not have
  std::vector<std::string> fresh;    // parameters of which the checkpoint has no optimizer state (frozen then): zeros
};

class Checkpoint {
 public:
  explicit Checkpoint(FsdpContext& context, ShardedOptimizer* optimizer = nullptr);
  ~Checkpoint();  // waits for what is still being written; that save is lost unless finish_save was called
  Checkpoint(const Checkpoint&) = delete;
  Checkpoint& operator=(const Checkpoint&) = delete;

  // A further tensor to save and load, in place: whole, equal on all ranks that add it, as buffers must be too: one
  // rank's are kept (ranks of other pipeline stages
  // add others). For state that is neither parameter nor buffer.
  void add_tensor(const std::string& name, const at::Tensor& tensor);

  // Blocks until the checkpoint is there. Replaces one of that name. `attributes` are rank 0's. Throws UsageError for a
  // folder that cannot be written, Error naming rank and file when writing fails.
  void save(const std::filesystem::path& folder, const std::map<std::string, std::string>& attributes = {});

  // The same in the background: returns when the state is copied to host memory (as much as this rank holds), so that
  // training goes on; nothing is there until finish_save. A save begun before is finished first.
  void begin_save(const std::filesystem::path& folder, const std::map<std::string, std::string>& attributes = {});
  // Whether finish_save would wait for this rank's file. No communication: ask on all ranks and decide together.
  [[nodiscard]] bool save_is_written() const;
  [[nodiscard]] bool save_is_under_way() const { return pending_ != nullptr; }
  void finish_save();  // waits, then as the end of `save`. Nothing to do when none is under way

  // In place. Dtypes may differ from the stored ones. Throws UsageError, before anything is changed, for weights that
  // are missing, unexpected or of other sizes; and naming file and byte for damage, when part of the weights may have
  // been replaced: do not use the model then. Optimizer state of another kind (SGD's for AdamW) is an error, and so is
  // none at all; see LoadOptions.
  LoadResult load(const std::filesystem::path& folder, const LoadOptions& options = {});

 private:
  struct Pending;
  struct Impl;
  void start(const std::filesystem::path& folder, const std::map<std::string, std::string>& attributes,
             bool in_background);

  std::unique_ptr<Impl> impl_;
  std::unique_ptr<Pending> pending_;
};

}  // namespace fsdp
