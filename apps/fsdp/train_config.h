// What `fsdp train` does, as plain values. Every field has its row in config_table.cpp; defaults are written here only.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "models/moe_config.h"

namespace fsdp::app {

struct ModelConfig {
  std::string preset = "tiny";
  models::TransformerConfig shape;  // the preset's, then what the file sets
  models::MoeConfig moe;            // the same; its base is `shape`
};

struct DataConfig {
  std::vector<std::string> files;
  std::vector<double> weights;        // [file]; empty: by size
  double validation_fraction = 0.05;  // of each file, from its end
  bool mask_document_starts = false;
};

struct MeshConfig {
  std::vector<std::string>
      axes;  // "name=size", the last one spans neighbouring ranks; empty: one axis "dp" of all ranks
};

struct ParallelConfig {
  std::string strategy = "zero3";
  std::string prefetch = "depth";
  std::int64_t prefetch_amount = 1;
  std::string reshard = "automatic";
  bool keep_last = true;
  bool keep_first = false;
  std::int64_t reduction_delay = 0;
  bool unify_communication_stream = false;
  std::string reduce = "every_microbatch";
  std::string param_dtype = "fp32";
  std::string reduce_dtype = "fp32";
  // Mixtures of experts.
  std::int64_t expert_ranks = 1;
  std::string schedule = "1f1b";
  bool delay_weight_gradients = true;
  bool release_early = false;
};

struct OptimizerConfig {
  std::string name = "adamw";
  double learning_rate = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double momentum = 0.9;  // of sgd
  double weight_decay = 0.1;
  std::int64_t warmup_steps = 0;
  std::string decay = "cosine";
  double final_fraction = 0.1;
  double clip_norm = 1.0;  // 0: off
};

struct RunConfig {
  std::int64_t steps = 100;
  std::int64_t batch = 8;      // sequences a step, over all ranks and microbatches
  std::int64_t context = 128;  // tokens a sequence
  std::int64_t microbatches = 1;
  std::int64_t ranks = 1;
  std::string device = "auto";
  bool capture = false;
  std::int64_t seed = 0;
  std::int64_t eval_interval = 0;  // steps; 0: only at the end
  std::int64_t eval_batches = 8;
  std::int64_t log_interval = 10;    // steps
  std::int64_t sample_length = 200;  // tokens; 0: none
  std::string sample_prompt = "In the beginning ";
  double sample_temperature = 0.8;
  double max_seconds = 0;         // of training; 0: no limit
  double deadline_seconds = 600;  // for a collective to wait for its peers
};

struct CheckpointConfig {
  std::string folder;         // empty: none
  std::int64_t interval = 0;  // steps; 0: only at the end
  std::int64_t keep = 2;      // 0: all
  bool resume = true;
  std::string weights;  // a checkpoint or .safetensors file that a new run begins with; empty: random ones
  std::string weights_format = "own";
};

struct TrainConfig {
  ModelConfig model;
  DataConfig data;
  MeshConfig mesh;
  ParallelConfig parallel;
  OptimizerConfig optimizer;
  RunConfig run;
  CheckpointConfig checkpoint;
};

}  // namespace fsdp::app
