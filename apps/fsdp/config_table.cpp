#include "apps/fsdp/config_table.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "apps/fsdp/edit_distance.h"
#include "fsdp/base/check.h"
#include "models/presets.h"

namespace fsdp::app {
namespace {

// A captureless accessor for `expression`, a member of TrainConfig.
#define FIELD(expression) \
  [](TrainConfig & config) -> auto& { return config.expression; }

template <typename T, typename Accessor>
Target target(Accessor accessor) {
  return static_cast<T& (*)(TrainConfig&)>(accessor);
}

template <typename Accessor>
Field integer(std::string_view key, std::string_view meaning, Accessor accessor, double minimum, double maximum) {
  return {key, meaning, target<std::int64_t>(accessor), minimum, maximum};
}
template <typename Accessor>
Field number(std::string_view key, std::string_view meaning, Accessor accessor, double minimum, double maximum) {
  return {key, meaning, target<double>(accessor), minimum, maximum};
}
template <typename Accessor>
Field flag(std::string_view key, std::string_view meaning, Accessor accessor) {
  return {key, meaning, target<bool>(accessor)};
}
template <typename Accessor>
Field text(std::string_view key, std::string_view meaning, Accessor accessor,
           std::vector<std::string_view> choices = {}) {
  return {.key = key, .meaning = meaning, .target = target<std::string>(accessor), .choices = std::move(choices)};
}
template <typename Accessor>
Field texts(std::string_view key, std::string_view meaning, Accessor accessor, bool required) {
  return {.key = key, .meaning = meaning, .target = target<TextList>(accessor), .required = required};
}

template <typename Accessor>
Field numbers(std::string_view key, std::string_view meaning, Accessor accessor) {
  return {.key = key, .meaning = meaning, .target = target<NumberList>(accessor)};
}

constexpr double kMany = 1e9;

void set_preset(TrainConfig& config) {
  config.model.moe = *models::find_moe_preset(config.model.preset);
  config.model.shape = config.model.moe.base;
}

std::vector<Field> make_fields() {
  return {
      text("model.preset", "size by name; the other model keys override it", FIELD(model.preset),
           models::preset_names()),
      integer("model.vocabulary", "token kinds; text is read as bytes, so at least 256 for it",
              FIELD(model.shape.vocabulary), 1, kMany),
      integer("model.layers", "transformer blocks", FIELD(model.shape.layers), 1, 10000),
      integer("model.width", "features a token", FIELD(model.shape.width), 1, 1 << 20),
      integer("model.heads", "query heads", FIELD(model.shape.heads), 1, 65536),
      integer("model.kv_heads", "key and value heads", FIELD(model.shape.kv_heads), 1, 65536),
      integer("model.ffn_width", "features inside the feed-forward", FIELD(model.shape.ffn_width), 1, 1 << 22),
      integer("model.max_context", "longest sequence in tokens", FIELD(model.shape.max_context), 1, kMany),
      number("model.rope_theta", "base of the rotary frequencies", FIELD(model.shape.rope_theta), 1, 1e12),
      number("model.norm_epsilon", "added under the root of RMSNorm", FIELD(model.shape.norm_epsilon), 1e-12, 1),
      flag("model.tied_embeddings", "output head = token embedding", FIELD(model.shape.tied_embeddings)),
      flag("model.recompute", "compute blocks again in backward instead of keeping their intermediate values",
           FIELD(model.shape.recompute)),
      integer("model.experts", "of each mixture layer; 0: a dense model", FIELD(model.moe.experts), 0, 65536),
      integer("model.top_k", "experts a token", FIELD(model.moe.top_k), 1, 65536),
      integer("model.expert_width", "features inside an expert", FIELD(model.moe.expert_width), 1, 1 << 22),
      integer("model.shared_width", "features inside the expert of all tokens; 0: none", FIELD(model.moe.shared_width),
              0, 1 << 22),
      integer("model.dense_layers", "first layers without experts", FIELD(model.moe.dense_layers), 0, 10000),
      number("model.auxiliary_loss", "coefficient of the load-balancing loss", FIELD(model.moe.auxiliary_loss), 0, 100),
      number("model.bias_rate", "of balancing experts by biases; 0: off", FIELD(model.moe.bias_rate), 0, 1),

      texts("data.files", "token files (PREFIX of a .bin/.idx pair) or plain text files, read as bytes",
            FIELD(data.files), true),
      numbers("data.weights", "share of each file among the samples, of any scale; empty: by size",
              FIELD(data.weights)),
      number("data.validation_fraction", "share of each file held out, from its end", FIELD(data.validation_fraction),
             0.0001, 0.9),
      flag("data.mask_document_starts", "no loss for the first token of a document", FIELD(data.mask_document_starts)),

      texts("mesh.axes", "\"name=size\" of each axis, the last varies fastest; empty: \"dp\" of all ranks",
            FIELD(mesh.axes), false),

      text("parallel.strategy", "what is sharded; hsdp and hfsdp need two mesh axes", FIELD(parallel.strategy),
           {"ddp", "zero1", "zero2", "zero3", "hsdp", "hfsdp"}),
      text("parallel.prefetch", "which units are gathered early", FIELD(parallel.prefetch),
           {"none", "depth", "recorded", "delayed_release"}),
      integer("parallel.prefetch_amount", "units ahead, or releases held back", FIELD(parallel.prefetch_amount), 1,
              1000),
      text("parallel.reshard", "what happens to gathered weights after forward", FIELD(parallel.reshard),
           {"automatic", "after_forward", "never"}),
      flag("parallel.keep_last", "the last unit of forward stays gathered until its backward",
           FIELD(parallel.keep_last)),
      flag("parallel.keep_first", "the first unit stays gathered between microbatches", FIELD(parallel.keep_first)),
      integer("parallel.reduction_delay", "packed units held back before their reduction",
              FIELD(parallel.reduction_delay), 0, 1000),
      flag("parallel.unify_communication_stream", "gathers and reductions share one stream",
           FIELD(parallel.unify_communication_stream)),
      text("parallel.reduce", "when gradients of several microbatches are reduced", FIELD(parallel.reduce),
           {"every_microbatch", "last_microbatch"}),
      text("parallel.param_dtype", "of gathered weights and compute", FIELD(parallel.param_dtype), {"fp32", "bf16"}),
      text("parallel.reduce_dtype", "of gradients on the wire", FIELD(parallel.reduce_dtype), {"fp32", "bf16"}),
      integer("parallel.expert_ranks", "neighbouring ranks that share the experts of each layer",
              FIELD(parallel.expert_ranks), 1, 65536),
      text("parallel.schedule", "of experts' microbatches: one after the other, or forwards beside backwards",
           FIELD(parallel.schedule), {"sequential", "1f1b"}),
      flag("parallel.delay_weight_gradients", "weight gradients when there is an exchange to hide (experts)",
           FIELD(parallel.delay_weight_gradients)),
      flag("parallel.release_early", "1f1b: free attention's activations sooner, hide less",
           FIELD(parallel.release_early)),

      text("optimizer.name", "update rule", FIELD(optimizer.name), {"adamw", "sgd"}),
      number("optimizer.learning_rate", "highest learning rate", FIELD(optimizer.learning_rate), 0, 1000),
      number("optimizer.beta1", "adamw: decay of the first moment", FIELD(optimizer.beta1), 0, 0.999999),
      number("optimizer.beta2", "adamw: decay of the second moment", FIELD(optimizer.beta2), 0, 0.999999),
      number("optimizer.momentum", "sgd: momentum", FIELD(optimizer.momentum), 0, 0.999999),
      number("optimizer.weight_decay", "of matrices; norms have none", FIELD(optimizer.weight_decay), 0, 100),
      integer("optimizer.warmup_steps", "steps of linear warm-up", FIELD(optimizer.warmup_steps), 0, kMany),
      text("optimizer.decay", "shape of the learning rate after warm-up", FIELD(optimizer.decay),
           {"constant", "linear", "cosine"}),
      number("optimizer.final_fraction", "last learning rate as a share of the highest",
             FIELD(optimizer.final_fraction), 0, 1),
      number("optimizer.clip_norm", "largest gradient norm; 0: no clipping", FIELD(optimizer.clip_norm), 0, 1e12),

      integer("run.steps", "optimizer steps", FIELD(run.steps), 1, kMany),
      integer("run.batch", "sequences a step, over all ranks and microbatches", FIELD(run.batch), 1, 1 << 24),
      integer("run.context", "tokens a sequence", FIELD(run.context), 1, 1 << 24),
      integer("run.microbatches", "backwards a step", FIELD(run.microbatches), 1, 1 << 20),
      integer("run.ranks", "on this machine; --ranks overrides it, and a launcher's number of processes both",
              FIELD(run.ranks), 1, 256),
      text("run.device", "cpu (in-process ranks), cuda (one process a GPU), or auto: cuda where there is a GPU",
           FIELD(run.device), {"auto", "cpu", "cuda"}),
      flag("run.capture", "run each step as one CUDA graph, captured after some steps", FIELD(run.capture)),
      integer("run.seed", "of weights, data order and sampling", FIELD(run.seed), 0, 9e15),
      integer("run.eval_interval", "steps between evaluations; 0: only at the end", FIELD(run.eval_interval), 0, kMany),
      integer("run.eval_batches", "batches of held-out text an evaluation", FIELD(run.eval_batches), 1, 1 << 20),
      integer("run.log_interval", "steps between printed lines", FIELD(run.log_interval), 1, kMany),
      integer("run.sample_length", "tokens of text sampled at the end; 0: none", FIELD(run.sample_length), 0, 1 << 20),
      text("run.sample_prompt", "text that the sample continues", FIELD(run.sample_prompt)),
      number("run.sample_temperature", "0: always the likeliest byte", FIELD(run.sample_temperature), 0, 100),
      number("run.max_seconds", "training ends at the next step after so long; 0: no limit", FIELD(run.max_seconds), 0,
             1e9),
      number("run.deadline_seconds", "a collective that waits longer for a rank fails, naming it",
             FIELD(run.deadline_seconds), 0.001, 1e6),

      text("checkpoint.folder", "where checkpoints lie, one file system for all ranks; empty: none are written",
           FIELD(checkpoint.folder)),
      integer("checkpoint.interval", "steps between checkpoints; 0: only when the run ends or is interrupted",
              FIELD(checkpoint.interval), 0, kMany),
      integer("checkpoint.keep", "newest checkpoints that stay; 0: all", FIELD(checkpoint.keep), 0, kMany),
      flag("checkpoint.resume", "go on from the newest checkpoint in the folder, when there is one",
           FIELD(checkpoint.resume)),
      text("checkpoint.weights",
           "weights that a new run begins with: a checkpoint, a .safetensors file, or a folder with such files",
           FIELD(checkpoint.weights)),
      text("checkpoint.weights_format", "names of the weights in it: as here, or as Llama's files have them",
           FIELD(checkpoint.weights_format), {"own", "llama"}),
  };
}
#undef FIELD

template <typename T>
bool holds(const Target& target) {
  return std::holds_alternative<T& (*)(TrainConfig&)>(target);
}

// A TOML string: quotes, backslashes and control characters escaped.
std::string quoted(std::string_view text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      result += '\\';
      result += c;
    } else if (static_cast<unsigned char>(c) < ' ' || c == '\x7f') {
      result += fmt::format("\\u{:04X}", static_cast<unsigned>(c));
    } else {
      result += c;
    }
  }
  return result + "\"";
}

std::string show(const Value& value) {
  return std::visit(
      [](const auto& v) -> std::string {
        using T = std::decay_t<decltype(v)>;
        if constexpr (std::is_same_v<T, TextList>) {
          std::string list;
          for (const auto& text : v) list += (list.empty() ? "" : ", ") + quoted(text);
          return "[" + list + "]";
        } else if constexpr (std::is_same_v<T, NumberList>) {
          return fmt::format("[{}]", fmt::join(v, ", "));
        } else if constexpr (std::is_same_v<T, std::string>) {
          return quoted(v);
        } else if constexpr (std::is_same_v<T, double>) {
          const std::string number = fmt::format("{}", v);
          return number.find_first_of(".en") == std::string::npos ? number + ".0" : number;  // stays a number
        } else {
          return fmt::format("{}", v);
        }
      },
      value);
}

Value value_in(const Field& field, TrainConfig& config) {
  return std::visit([&](auto accessor) { return Value(accessor(config)); }, field.target);
}

}  // namespace

const std::vector<Field>& config_fields() {
  static const std::vector<Field> fields = make_fields();
  return fields;
}

const Field& find_field(std::string_view key, const std::string& origin) {
  const Field* nearest = nullptr;
  std::size_t best = std::string_view::npos;
  for (const Field& field : config_fields()) {
    if (field.key == key) return field;
    if (const auto distance = edit_distance(key, field.key); distance < best) {
      best = distance;
      nearest = &field;
    }
  }
  throw UsageError(fmt::format("{}: unknown key {}; the nearest is {}, `fsdp train --help-config` shows all", origin,
                               key, nearest->key));
}

std::string expectation(const Field& field) {
  if (!field.choices.empty()) return fmt::format("one of {}", fmt::join(field.choices, ", "));
  if (holds<bool>(field.target)) return "true or false";
  if (holds<std::string>(field.target)) return "a text";
  if (holds<TextList>(field.target)) return "a list of texts";
  if (holds<NumberList>(field.target)) return "a list of numbers";
  return fmt::format("{} from {} to {}", holds<std::int64_t>(field.target) ? "an integer" : "a number", field.minimum,
                     field.maximum);
}

void assign(const Field& field, TrainConfig& config, const Value& value, const std::string& origin) {
  const bool accepted = std::visit(
      [&](auto accessor) {
        using T = std::decay_t<decltype(accessor(config))>;
        T result;
        if (const T* same = std::get_if<T>(&value)) {
          result = *same;
        } else if (const auto* whole = std::get_if<std::int64_t>(&value);
                   whole != nullptr && std::is_same_v<T, double>) {
          if constexpr (std::is_same_v<T, double>) result = static_cast<double>(*whole);
        } else if (const auto* texts = std::get_if<TextList>(&value);
                   !(std::is_same_v<T, NumberList> && texts != nullptr && texts->empty())) {
          return false;
        }
        if constexpr (std::is_same_v<T, std::int64_t> || std::is_same_v<T, double>) {
          // Written so that nan is refused as well.
          const auto plain = static_cast<double>(result);
          if (!(plain >= field.minimum && plain <= field.maximum)) return false;
        }
        if constexpr (std::is_same_v<T, std::string>) {
          if (!field.choices.empty() && std::ranges::find(field.choices, result) == field.choices.end()) return false;
        }
        accessor(config) = std::move(result);
        return true;
      },
      field.target);
  FSDP_CHECK(accepted, UsageError, "{}: {}: expected {}, got {}", origin, field.key, expectation(field), show(value));
  if (field.key == "model.preset") set_preset(config);
}

std::string shown_value(const Field& field, TrainConfig config) { return show(value_in(field, config)); }

std::string describe_fields() {
  TrainConfig defaults;
  set_preset(defaults);
  std::string result, section;
  for (const Field& field : config_fields()) {
    const auto dot = field.key.find('.');
    if (const std::string own(field.key.substr(0, dot)); own != section) {
      result += fmt::format("{}[{}]\n", section.empty() ? "" : "\n", own);
      section = own;
    }
    const bool of_preset = field.key.starts_with("model.") && field.key != "model.preset";
    const std::string standard = field.required ? "required"
                                 : of_preset    ? fmt::format("default: the preset's, for {} {}", defaults.model.preset,
                                                              show(value_in(field, defaults)))
                                                : "default " + show(value_in(field, defaults));
    result += fmt::format("  {:<26} {}\n  {:<26} {}; {}\n", field.key.substr(dot + 1), field.meaning, "",
                          expectation(field), standard);
  }
  return result + "\nIn a TOML file under its section, or on the command line: --set section.key=value";
}

std::string to_toml(TrainConfig config) {
  std::string result, section;
  for (const Field& field : config_fields()) {
    const auto dot = field.key.find('.');
    if (const std::string own(field.key.substr(0, dot)); own != section) {
      result += fmt::format("{}[{}]\n", section.empty() ? "" : "\n", own);
      section = own;
    }
    result += fmt::format("{} = {}\n", field.key.substr(dot + 1), show(value_in(field, config)));
  }
  result.pop_back();  // the console ends the last line
  return result;
}

}  // namespace fsdp::app
