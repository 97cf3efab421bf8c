#include "apps/fsdp/bench_step.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/ones_like.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string_view>

#include "apps/fsdp/bench_model.h"
#include "apps/fsdp/console.h"
#include "fsdp/base/check.h"
#include "fsdp/base/log.h"
#include "fsdp/mesh/all_hosts.h"
#include "fsdp/mesh/cuda_world.h"
#include "fsdp/mesh/device_mesh.h"
#include "fsdp/mesh/spawn_ranks.h"

namespace fsdp::app {
namespace {

using Clock = std::chrono::steady_clock;

double milliseconds(Clock::duration d) { return std::chrono::duration<double, std::milli>(d).count(); }

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

struct Times {
  double step = 0, forward_host = 0, backward_host = 0;  // ms
  double communication_host = 0;                         // of both: ms inside the communication backend
};

// Measures the host time that a group's own calls take.
class TimedGroup final : public CommunicatorBackend {
 public:
  TimedGroup(std::shared_ptr<CommunicatorBackend> inner, Clock::duration& spent)
      : inner_(std::move(inner)), spent_(spent) {}
  void execute(const Collective& operation) override {
    const auto start = Clock::now();
    inner_->execute(operation);
    spent_ += Clock::now() - start;
  }
  void abort(const std::string& reason) override { inner_->abort(reason); }
  void reset() override { inner_->reset(); }
  [[nodiscard]] std::string path() const override { return inner_->path(); }
  [[nodiscard]] std::string why_no_symmetric_memory() const override { return inner_->why_no_symmetric_memory(); }
  [[nodiscard]] c10::DataPtr allocate_symmetric(Bytes size) override { return inner_->allocate_symmetric(size); }
  [[nodiscard]] bool register_symmetric(void* base, Bytes size) override {
    return inner_->register_symmetric(base, size);
  }
  void deregister_symmetric(void* base) override { inner_->deregister_symmetric(base); }
  [[nodiscard]] std::unique_ptr<PeerInbox> make_inbox(Bytes largest_share, Kernels& kernels,
                                                      std::string& why) override {
    return inner_->make_inbox(largest_share, kernels, why);
  }
  [[nodiscard]] Bytes peer_granularity() const override { return inner_->peer_granularity(); }
  [[nodiscard]] std::shared_ptr<PeerMemory> make_peer_memory(const std::vector<PeerPart>& parts, Kernels& kernels,
                                                             std::string& why) override {
    return inner_->make_peer_memory(parts, kernels, why);
  }

 private:
  std::shared_ptr<CommunicatorBackend> inner_;
  Clock::duration& spent_;
};

std::vector<int> all_ranks(int count) {
  std::vector<int> ranks;
  for (int r = 0; r < count; ++r) ranks.push_back(r);
  return ranks;
}

// A name of --modes, taken apart.
struct Variant {
  bool sharded = false, control = false;
  bool graph = false, late = false, kernel = false, nccl = false, rings = false;
  double keep_gib = 0;
};

Variant variant_of(const std::string& name) {
  std::istringstream words(name);
  std::string word;
  std::getline(words, word, '+');
  Variant v{.sharded = word == "sharded", .control = word == "control"};
  bool good = v.sharded || v.control || word == "bare";
  const std::map<std::string, bool*> flags{
      {"graph", &v.graph}, {"late", &v.late}, {"kernel", &v.kernel}, {"nccl", &v.nccl}, {"rings", &v.rings}};
  constexpr std::string_view kKeep = "keep=";
  while (std::getline(words, word, '+')) {
    const auto flag = flags.find(word);
    if (flag != flags.end()) {
      *flag->second = true;
    } else if (word.starts_with(kKeep)) {
      const auto text = word.substr(kKeep.size());
      char* end = nullptr;
      v.keep_gib = std::strtod(text.c_str(), &end);
      good = good && !text.empty() && *end == '\0' && v.keep_gib > 0 && v.keep_gib < 1000;
    } else {
      good = false;
    }
    good = good && (v.sharded || word == "graph");  // the others are about sharding
  }
  FSDP_CHECK(good, UsageError,
             "--modes: expected bare, sharded or control, then +graph, and of sharded ones +late, +keep=GIB, +kernel, "
             "+nccl or +rings; got \"{}\"",
             name);
  return v;
}

// One way to run the step.
class Mode {
 public:
  virtual ~Mode() = default;
  virtual Times run() = 0;
  double peak_bytes = 0;  // over what the device held before, of a step after warm-up
};

class StepMode final : public Mode {
 public:
  StepMode(const BenchStepCommand& command, const BenchShape& shape, const std::string& name, const World& world)
      : world_(world), runtime_(*world_.runtime()) {
    const Variant variant = variant_of(name);
    graph_ = variant.graph;
    const auto device = runtime_.device();
    const auto before = runtime_.device_memory().in_use.value();
    model_ = BenchStack(shape, /*own_linear=*/variant.sharded, device);
    if (variant.sharded) {
      ContextOptions options;
      options.prefetch = command.depth == 0 ? Prefetch::none() : Prefetch::depth(command.depth);
      options.late_first_prefetch = variant.late;
      options.symmetric_memory = !variant.rings;
      options.one_sided_gathers = !variant.nccl && !variant.rings;
      if (variant.kernel || variant.rings) options.reducer = Reducer::kernel;
      UnitOptions unit;
      if (variant.keep_gib > 0) {
        unit.reshard = Reshard::by_budget;
        options.keep_budget = Bytes(static_cast<std::int64_t>(variant.keep_gib * (1 << 30)));
      }
      context_ = FsdpContext::create(make_mesh(), options);
      shard_bench_stack(*context_, model_, unit);
    }
    if (variant.control) add_copies(shape, command.ranks);
    input_ = bench_input(shape, device);
    one_ = at::ones_like(input_);
    for (int i = 0; i < 3; ++i) step();
    wait();
    runtime_.reset_device_peak();
    step();
    wait();
    peak_bytes = static_cast<double>(runtime_.device_memory().peak.value() - before);
    if (context_) {  // registered memory is not the allocator's; resting weights lie in it
      const auto report = context_->memory_report();
      if (report.arena > Bytes(0))
        peak_bytes += static_cast<double>((report.arena + report.main_weights + report.model_weights).value());
    }
    if (graph_) capture();
  }

  Times run() override {
    wait();
    meet();
    const auto start = Clock::now();
    spent_ = {};
    if (graph_) {
      replay();
      wait();
      return {milliseconds(Clock::now() - start), 0, 0, 0};
    }
    const auto [middle, end] = step();
    wait();
    return {milliseconds(Clock::now() - start), milliseconds(middle - start), milliseconds(end - middle),
            milliseconds(spent_)};
  }

 private:
  std::pair<Clock::time_point, Clock::time_point> step() {
    const auto y = model_->forward(input_);
    const auto middle = Clock::now();
    y.backward(one_);
    const auto end = Clock::now();
    input_.mutable_grad().reset();
    if (context_) {
      for (auto* group : context_->groups()) group->zero_gradients(/*set_to_none=*/true);
    } else {
      for (auto& p : model_->parameters()) p.mutable_grad().reset();
    }
    return {middle, end};
  }

  void capture() {
    if (context_) {
      captured_.emplace(context_->capture([this] {
        step();
        return at::Tensor();
      }));
    } else {
      bare_graph_ = runtime_.capture([this] { step(); });
    }
    for (int i = 0; i < 2; ++i) replay();
    wait();
  }
  void replay() {
    if (captured_)
      captured_->replay();
    else
      bare_graph_->replay();
  }

  // The copies of the same bytes at the same places, and nothing else of a sharded step.
  void add_copies(const BenchShape& shape, int ranks) {
    const auto share = shape.parameters() / shape.layers / ranks;
    const auto options = at::TensorOptions().dtype(at::kBFloat16).device(runtime_.device());
    shard_ = at::empty({share}, options);
    for (auto& whole : whole_) whole = at::empty({share * ranks}, options);
    gather_ = world_.create_communicator(all_ranks(ranks), "control.gather", GroupUse::gather);
    reduce_ = world_.create_communicator(all_ranks(ranks), "control.reduce", GroupUse::reduce);
    gather_stream_ = runtime_.make_stream("gather");
    reduce_stream_ = runtime_.make_stream("reduce");
    const auto gather = [this, share](std::size_t layer) {
      Event here;
      runtime_.compute_stream().record(here);
      gather_stream_.wait(here);
      gather_.all_gather(shard_.data_ptr(), whole_[layer % 2].data_ptr(), Elements(share), at::kBFloat16,
                         gather_stream_, "FSDP:control:unshard");
    };
    model_->before_layer = [this, gather, share](std::size_t layer, const at::Tensor& x) {
      gather(layer);
      const auto y = x.view_as(x);
      y.register_hook([this, gather, share, layer](const at::Tensor&) {
        gather(layer);
        Event here;
        runtime_.compute_stream().record(here);
        reduce_stream_.wait(here);
        reduce_.reduce_scatter(whole_[2].data_ptr(), whole_[2].data_ptr(), Elements(share), at::kBFloat16,
                               reduce_stream_, "FSDP:control:reduce_gradients");
      });
      return y;
    };
  }
  // As the mesh makes them, but measured.
  DeviceMesh make_mesh() {
    const auto ranks = all_ranks(world_.size());
    const auto timed = [&](const char* name, GroupUse use) {
      const auto plain = world_.create_communicator(ranks, name, use);
      return Communicator(std::make_shared<TimedGroup>(plain.backend(), spent_), world_.runtime(), plain.rank(),
                          plain.size(), plain.name());
    };
    const Communicator gather = timed("dp.gather", GroupUse::gather), reduce = timed("dp.reduce", GroupUse::reduce);
    return DeviceMesh(world_, {"dp"}, {{gather, reduce, world_.host().create_communicator(ranks, "dp.host")}});
  }

  void wait() {
    runtime_.compute_stream().synchronize();
    for (const Stream* stream : {&gather_stream_, &reduce_stream_}) {
      if (*stream) stream->synchronize();
    }
  }

  // Real ranks start each step together.
  void meet() {
    if (world_.backend_name() != "nccl") return;
    if (!hosts_) hosts_ = all_hosts(world_, "bench");
    const Stream stream = world_.host().runtime()->compute_stream();
    hosts_.barrier(stream, "bench");
  }

  World world_;
  Runtime& runtime_;
  Communicator hosts_;
  Clock::duration spent_{};  // on the host, inside the communication backend
  bool graph_ = false;
  BenchStack model_{nullptr};
  std::shared_ptr<FsdpContext> context_;
  at::Tensor input_, one_;
  std::optional<FsdpContext::CapturedStep> captured_;
  std::unique_ptr<DeviceGraph> bare_graph_;
  at::Tensor shard_, whole_[3];
  Communicator gather_, reduce_;
  Stream gather_stream_, reduce_stream_;
};

StepSummary summary(const BenchShape& shape, const std::string& name, const Mode& mode,
                    const std::vector<Times>& times) {
  std::vector<double> steps, forwards, backwards, communication;
  for (const Times& t : times) {
    communication.push_back(1000 * t.communication_host / static_cast<double>(shape.layers));
    steps.push_back(t.step);
    forwards.push_back(1000 * t.forward_host / static_cast<double>(shape.layers));
    backwards.push_back(1000 * t.backward_host / static_cast<double>(shape.layers));
  }
  return {.mode = name,
          .step_ms = median(steps),
          .least_step_ms = *std::min_element(steps.begin(), steps.end()),
          .forward_host_us = median(forwards),
          .backward_host_us = median(backwards),
          .communication_host_us = median(communication),
          .peak_gib = mode.peak_bytes / (1 << 30),
          .rounds = static_cast<int>(times.size())};
}

nlohmann::json description(const BenchStepCommand& command) {
  return {{"shape", bench_shape(command.shape).name},
          {"ranks", command.ranks},
          {"loopback", command.nccl   ? "none: NCCL"
                       : command.link ? "link"
                                      : "copy"},
          {"depth", command.depth}};
}

// Answers "mode count" lines with the step times in ms, as a list; for a peer that takes turns with it.
void serve(const std::function<Mode&(const std::string&)>& find) {
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string name;
    int count = 0;
    if (!(words >> name >> count)) continue;
    nlohmann::json answer = nlohmann::json::array();
    Mode& mode = find(name);
    for (int i = 0; i < count; ++i) {
      const Times t = mode.run();
      answer.push_back({t.step, t.forward_host, t.backward_host, t.communication_host});
    }
    std::cout << nlohmann::json{{"times", answer}, {"peak_gib", mode.peak_bytes / (1 << 30)}}.dump() << std::endl;
  }
}

}  // namespace

StepMeasurement measure_steps(const BenchStepCommand& command) {
  const BenchShape shape = bench_shape(command.shape);
  for (const auto& name : command.modes) static_cast<void>(variant_of(name));
  if (command.nccl) {
    static_cast<void>(uses_cuda(DeviceKind::cuda));  // says once why it cannot be
    if (const auto code = spawn_ranks(command.ranks)) return {code, {}};
  }
  const World world =
      command.nccl
          ? World::from_environment({.device = DeviceKind::cuda, .deadline = std::chrono::seconds(60)})
          : World::loopback({.size = command.ranks,
                             .mode = command.link ? LoopbackOptions::Mode::link : LoopbackOptions::Mode::copy});
  log::set_sink([&](log::Level level, std::string_view message) {
    if (level == log::Level::warning || command.nccl) std::cerr << message << std::endl;
  });
  std::map<std::string, std::unique_ptr<Mode>> modes;
  const auto find = [&](const std::string& name) -> Mode& {
    auto& mode = modes[name];
    if (!mode) mode = std::make_unique<StepMode>(command, shape, name, world);
    return *mode;
  };
  if (command.serve) {
    serve(find);
    return {};
  }
  std::map<std::string, std::vector<Times>> times;
  for (int round = 0; round < command.rounds; ++round) {
    for (const auto& name : command.modes) times[name].push_back(find(name).run());
  }
  StepMeasurement result;
  if (world.rank() != Rank(0)) return result;
  for (const auto& name : command.modes) result.modes.push_back(summary(shape, name, find(name), times[name]));
  return result;
}

int bench_step(const BenchStepCommand& command) {
  const StepMeasurement measured = measure_steps(command);
  for (const StepSummary& mode : measured.modes) {
    auto line = description(command);
    line.update({{"bench", "step"},
                 {"mode", mode.mode},
                 {"step_ms", mode.step_ms},
                 {"step_ms_least", mode.least_step_ms},
                 {"forward_host_us_per_unit", mode.forward_host_us},
                 {"backward_host_us_per_unit", mode.backward_host_us},
                 {"of_it_communication_us_per_unit", mode.communication_host_us},
                 {"peak_gib", mode.peak_gib},
                 {"rounds", mode.rounds}});
    console::print(line.dump());
  }
  return measured.code.value_or(0);
}

int bench_host(const BenchStepCommand& command) {
  BenchStepCommand both = command;
  both.modes = {"bare", "sharded"};
  const StepMeasurement measured = measure_steps(both);
  if (measured.modes.size() == 2) {
    const StepSummary &bare = measured.modes[0], &sharded = measured.modes[1];
    auto line = description(command);
    line.update({{"bench", "host"},
                 {"forward_us_per_unit", sharded.forward_host_us},
                 {"backward_us_per_unit", sharded.backward_host_us},
                 {"bare_forward_us_per_unit", bare.forward_host_us},
                 {"bare_backward_us_per_unit", bare.backward_host_us},
                 {"of_it_communication_us_per_unit", sharded.communication_host_us},
                 {"rounds", sharded.rounds}});
    console::print(line.dump());
  }
  return measured.code.value_or(0);
}

}  // namespace fsdp::app
