#include "apps/fsdp/trainer.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "apps/fsdp/batch_tensors.h"
#include "apps/fsdp/config_check.h"
#include "apps/fsdp/evaluation.h"
#include "apps/fsdp/interrupt.h"
#include "apps/fsdp/settings.h"
#include "fsdp/base/check.h"
#include "fsdp/optim/adamw.h"
#include "fsdp/optim/clip_grad_norm.h"
#include "fsdp/optim/sgd.h"
#include "models/sampling.h"

namespace fsdp::app {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t kPromptTokens = 8;
constexpr std::int64_t kStepsBeforeCapture = 3;  // everything in a step must have run before

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

std::unique_ptr<ShardedOptimizer> make_optimizer(FsdpContext& context, const OptimizerConfig& config) {
  const ParameterOptionsFunction no_decay_of_vectors = [](const std::string&, at::IntArrayRef sizes) {
    ParameterOptions options;
    if (sizes.size() <= 1) options.weight_decay = 0.0;
    return options;
  };
  if (config.name == "sgd") {
    const SgdOptions options{
        .learning_rate = config.learning_rate, .momentum = config.momentum, .weight_decay = config.weight_decay};
    return std::make_unique<Sgd>(context, options, no_decay_of_vectors);
  }
  const AdamWOptions options{.learning_rate = config.learning_rate,
                             .beta1 = config.beta1,
                             .beta2 = config.beta2,
                             .weight_decay = config.weight_decay};
  return std::make_unique<AdamW>(context, options, no_decay_of_vectors);
}

// A sampled text on one line: bytes that are not printable ASCII are shown as escapes.
std::string printable(const std::vector<std::int64_t>& bytes) {
  std::string text;
  for (const auto byte : bytes) {
    if (byte == '\n' || (byte >= ' ' && byte <= '~')) {
      text += static_cast<char>(byte);
    } else {
      text += fmt::format("\\x{:02x}", byte);
    }
  }
  return text;
}

}  // namespace

Trainer::Trainer(World world, const TrainShared& shared)
    : world_(std::move(world)),
      shared_(shared),
      config_(shared.config),
      agreement_(world_),
      model_(make_trained_model(world_, config_)),
      context_(model_->context()),
      optimizer_(make_optimizer(*context_, config_.optimizer)),
      checkpoints_(config_, shared.data, *model_, *optimizer_, world_, agreement_) {
  const auto device = world_.runtime()->device();
  loss_scale_ = at::zeros({}, at::TensorOptions().dtype(at::kFloat).device(device));
  result_.exposed_is_known = !device.is_cuda();
}

RunResult Trainer::run() {
  const auto& run = config_.run;
  result_.parameters = parameter_count(config_);
  result_.ranks = world_.size();
  double exposed_seconds = 0;
  const auto start = checkpoints_.restore();
  result_.steps = first_step_ = start.steps;
  if (leads()) shared_.log.begin(start.steps);
  profiler_.emplace(leads() ? shared_.profile : std::filesystem::path{}, world_.runtime(),
                    static_cast<int>(world_.rank().value()), run.steps - first_step_);
  if (!start.from.empty()) print(fmt::format("weights from {}, after {} steps", start.from.string(), start.steps));
  batches_ = std::make_unique<data::BatchPrefetcher>([this](std::int64_t step) { return make_batches(step); },
                                                     first_step_, run.steps);
  if (first_step_ > 0 && evaluation_is_due(first_step_)) evaluate(first_step_);  // the stop may have come before it
  for (std::int64_t index = first_step_; index < run.steps && !result_.interrupted; ++index) {
    profiler_->before_step(index - first_step_);
    StepResult step_result;
    const Stop stop = step(index, step_result);
    result_.steps = step_result.step;
    result_.seconds += step_result.seconds;
    result_.tokens += step_result.tokens;
    exposed_seconds += step_result.exposed * step_result.seconds;
    result_.data_wait += step_result.data_wait;
    report(step_result);
    if (stop.checkpoint_written) finish_checkpoint();
    if (checkpoints_.due(result_.steps)) {
      finish_checkpoint();
      checkpoints_.begin(result_.steps);
    }
    if (stop.interrupted || stop.out_of_time) {
      result_.interrupted = stop.interrupted;
      result_.out_of_time = stop.out_of_time && !stop.interrupted;
      break;
    }
    if (evaluation_is_due(result_.steps)) {
      evaluate(result_.steps);
      if (result_.interrupted) break;
    }
  }
  finish_checkpoint();
  if (checkpoints_.wanted_at_end(result_.steps)) {
    checkpoints_.begin(result_.steps);
    finish_checkpoint();
  }
  result_.exposed = result_.seconds > 0 ? exposed_seconds / result_.seconds : 0;
  result_.skipped_steps = optimizer_->skipped_steps();
  if (const auto overlap = profiler_->finish(); !overlap.empty()) print(overlap);
  if (!result_.interrupted) {
    evaluate(result_.steps);
    if (run.sample_length > 0 && !result_.interrupted) sample();
  }
  print(to_string(context_->memory_report()));
  return result_;
}

data::BatchPrefetcher::Batches Trainer::make_batches(std::int64_t step) const {
  const auto& run = config_.run;
  const auto at_once = run.batch / (world_.size() * run.microbatches);
  data::BatchPrefetcher::Batches batches;
  for (std::int64_t micro = 0; micro < run.microbatches; ++micro) {
    const auto first = (micro * world_.size() + world_.rank().value()) * at_once;
    batches.push_back(shared_.data.train_batch(step * run.batch + first, at_once));
  }
  return batches;
}

double Trainer::target_count(std::int64_t step) const {
  const auto& run = config_.run;
  const auto targets = shared_.data.count_targets(step * run.batch, run.batch);
  FSDP_CHECK(targets > 0, UsageError,
             "step {} has no targets: every token of it begins a document, and data.mask_document_starts leaves these "
             "out; prepare the files with longer documents",
             step + 1);
  return static_cast<double>(targets);
}

Trainer::Stop Trainer::step(std::int64_t index, StepResult& result) {
  const auto& run = config_.run;
  const auto start = Clock::now();
  const auto blocked_before = world_.runtime()->blocked_time();
  result.step = index + 1;
  result.learning_rate = learning_rate_schedule(config_).at(index);
  optimizer_->set_learning_rate(result.learning_rate);

  const auto waited_before = batches_->waited();
  auto batches = batches_->next(index);
  result.data_wait = std::chrono::duration<double>(batches_->waited() - waited_before).count();

  if (config_.data.mask_document_starts) {
    // Ranks and microbatches hold different numbers of targets: sums, over the number in the whole step. The library
    // averages over the ranks, so their number comes in again.
    loss_scale_.fill_(static_cast<double>(world_.size()) / target_count(index));
  }
  const auto& inputs = load(std::move(batches));
  const auto sums_there = captured_ ? captured_->replay() : compute(inputs);
  const auto sums_here = sums_there.to(c10::kCPU);  // waits for the device
  const double loss_sum = sums_here[0].item<double>();
  if (run.capture && index + 1 - first_step_ == kStepsBeforeCapture)
    captured_.emplace(context_->capture([this] { return compute(inputs_); }));

  const bool late = run.max_seconds > 0 && result_.seconds + seconds_since(start) >= run.max_seconds;
  const auto sums =
      agreement_.sum({loss_sum, interrupted() ? 1.0 : 0.0, late ? 1.0 : 0.0, checkpoints_.writing() ? 1.0 : 0.0});
  result.loss = sums[0] / static_cast<double>(world_.size() * run.microbatches);
  result.grad_norm = sums_here[1].item<double>();
  result.tokens = run.batch * run.context;
  result.peak_bytes = result_.peak_bytes;
  result.seconds = seconds_since(start);
  result.exposed = static_cast<double>(world_.runtime()->blocked_time() - blocked_before) * 1e-9 / result.seconds;
  return {.interrupted = sums[1] > 0,
          .out_of_time = sums[2] > 0,
          .checkpoint_written = checkpoints_.under_way() && sums[3] == 0};
}

const std::vector<BatchTensors>& Trainer::load(data::BatchPrefetcher::Batches batches) {
  const auto device = world_.runtime()->device();
  std::vector<BatchTensors> loaded;
  for (auto& batch : batches) loaded.push_back(to_tensors(std::move(batch), device));
  if (!config_.run.capture || inputs_.empty()) {
    inputs_ = std::move(loaded);
  } else {
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      inputs_[i].tokens.copy_(loaded[i].tokens);
      inputs_[i].targets.copy_(loaded[i].targets);
    }
  }
  return inputs_;
}

at::Tensor Trainer::compute(const std::vector<BatchTensors>& batches) {
  const at::Tensor loss_sum =
      model_->forward_backward(batches, config_.data.mask_document_starts ? loss_scale_ : at::Tensor());
  const double clip = config_.optimizer.clip_norm;
  const auto norm = grad_norm(*context_);
  optimizer_->step(norm, clip > 0 ? std::optional(clip) : std::nullopt);
  result_.peak_bytes =
      std::max(result_.peak_bytes, context_->memory_report().total().value() + optimizer_->state_bytes().value());
  optimizer_->zero_grad();
  model_->after_step();
  return at::stack({loss_sum, norm.to(at::kDouble)});
}

bool Trainer::evaluation_is_due(std::int64_t steps_done) const {
  const auto& run = config_.run;
  return run.eval_interval > 0 && steps_done % run.eval_interval == 0 && steps_done < run.steps;
}

void Trainer::evaluate(std::int64_t steps_done) {
  const auto loss = validation_loss(*model_, shared_.data, config_.run, world_, agreement_);
  result_.interrupted = !loss.has_value();
  if (!loss) return;
  result_.validation_loss = loss;
  if (!leads()) return;
  shared_.log.validation(steps_done, *loss);
  shared_.progress.line(fmt::format("validation loss {:.4f} after {} steps", *loss, steps_done));
}

void Trainer::finish_checkpoint() {
  const auto saved = checkpoints_.finish();
  if (!saved || !leads()) return;
  shared_.log.checkpoint(*saved);
  print(fmt::format("checkpoint: {} ({}, {:.1f} s, training stood still for {:.2f} s)", saved->folder.string(),
                    format_bytes(saved->bytes), saved->seconds, saved->stalled_seconds));
}

void Trainer::report(const StepResult& result) {
  if (!leads()) return;
  shared_.log.step(result);
  shared_.progress.step(result);
}

void Trainer::sample() {
  const auto& run = config_.run;
  const bool bytes = shared_.data.bytes_only();
  std::vector<std::int64_t> prompt;
  if (bytes) {
    for (const char c : run.sample_prompt) prompt.push_back(static_cast<unsigned char>(c));
  } else {
    const auto held_out = shared_.data.validation_batch(0, 1, 1);  // there is no tokenizer here for a prompt of text
    prompt.assign(held_out.tokens.begin(),
                  held_out.tokens.begin() + std::min<std::int64_t>(kPromptTokens, held_out.context));
  }
  const auto stop = [this] { return result_.interrupted = agreement_.sum({interrupted() ? 1.0 : 0.0})[0] > 0; };
  const auto added = models::sample_tokens([this](const at::Tensor& tokens) { return model_->logits(tokens); }, prompt,
                                           {.length = run.sample_length,
                                            .context = std::min(run.context, config_.model.shape.max_context),
                                            .temperature = run.sample_temperature,
                                            .seed = static_cast<std::uint64_t>(run.seed),
                                            .device = world_.runtime()->device(),
                                            .stop = stop});
  if (bytes) return print(fmt::format("sample:\n{}{}", run.sample_prompt, printable(added)));
  print(fmt::format("sample, as tokens:\n{} -> {}", fmt::join(prompt, " "), fmt::join(added, " ")));
}

void Trainer::print(const std::string& text) {
  if (leads()) shared_.progress.line(text);
}

}  // namespace fsdp::app
