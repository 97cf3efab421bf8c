#include "apps/fsdp/bench_command.h"

#include <CLI/CLI.hpp>

namespace fsdp::app {

void BenchCommand::add_to(CLI::App& app) {
  command_ = app.add_subcommand("bench", "Measure on this machine's GPU; prints JSON lines");
  command_->require_subcommand(1);

  step_ = command_->add_subcommand("step", "Time, host time and memory of a step, sharded and not");
  step_->add_option("--shape", step.shape, "A to E, or layers,width,tokens,ffn");
  step_
      ->add_option("--modes", step.modes,
                   "bare, sharded or control, then +graph, +late, +keep=GIB, +kernel, +nccl, +rings")
      ->delimiter(',');
  step_->add_option("--ranks", step.ranks, "Ranks of the loopback")->check(CLI::Range(1, 4096));
  step_->add_option("--rounds", step.rounds)->check(CLI::Range(1, 100000));
  step_->add_option("--depth", step.depth, "Units gathered ahead")->check(CLI::Range(0, 64));
  step_->add_flag("--link", step.link, "The loopback takes the time of a link");
  step_->add_flag("--nccl", step.nccl, "Real ranks, one a GPU, instead of a loopback");
  step_->add_flag("--serve", step.serve, "Run the mode named on each line of the input");

  host_ = command_->add_subcommand("host", "Host time that sharding adds to a unit");
  host_->add_option("--shape", host.shape, "A to E, or layers,width,tokens,ffn");
  host_->add_option("--ranks", host.ranks)->check(CLI::Range(1, 4096));
  host_->add_option("--rounds", host.rounds)->check(CLI::Range(1, 100000));
  host_->add_flag("--nccl", host.nccl, "Real ranks, one a GPU, instead of a loopback");

  collectives_ = command_->add_subcommand("collectives", "Gathers and reductions between real ranks, one a GPU");
  collectives_->add_option("--ranks", collectives.ranks)->check(CLI::Range(2, 4096));
  collectives_->add_option("--largest", collectives.largest_mib, "MiB")->check(CLI::Range(1, 4096));
  collectives_->add_option("--rounds", collectives.rounds)->check(CLI::Range(1, 10000));

  overlap_ = command_->add_subcommand("overlap", "How much communication hides under compute");
  overlap_->add_option("--shape", overlap.shape, "layers,width,tokens,ffn; ffn 0: linear units");
  overlap_->add_option("--strategy", overlap.strategy, "zero1, zero2 or zero3");
  overlap_->add_option("--ranks", overlap.ranks)->check(CLI::Range(1, 4096));
  overlap_->add_option("--microbatches", overlap.microbatches)->check(CLI::Range(1, 64));
  overlap_->add_option("--steps", overlap.steps)->check(CLI::Range(1, 1000));
  overlap_->add_option("--prefetch", overlap.prefetch, "depth, lists, none, recorded or delayed_release");
  overlap_->add_option("--amount", overlap.amount, "Units ahead, or releases held back")->check(CLI::Range(0, 64));
  overlap_->add_option("--delay", overlap.delay, "Reductions held back")->check(CLI::Range(0, 64));
  overlap_->add_option("--keep-last", overlap.keep_last, "The last unit of forward stays gathered: true or false");
  overlap_->add_flag("--unify", overlap.unify, "Gathers and reductions on one stream");
  overlap_->add_option("--gather-multiprocessors", overlap.gather_multiprocessors, "Held by a gather; 0: copy engine")
      ->check(CLI::Range(0, 132));
  overlap_->add_option("--carve-out", overlap.carve_out, "Multiprocessors that matrix products leave free")
      ->check(CLI::Range(0, 128));
  overlap_->add_flag("--nccl", overlap.nccl, "Real ranks, one a GPU, instead of a loopback");
  overlap_->add_option("--symmetric", overlap.symmetric, "With --nccl: registered memory, true or false");
  overlap_->add_option("--one-sided", overlap.one_sided, "With --nccl: gathers read the peers' shares, true or false");
  overlap_->add_option("--reducer", overlap.reducer, "With --nccl: copy_engine or kernel")
      ->check(CLI::IsMember({"copy_engine", "kernel"}));
  overlap_->add_option("--trace", overlap.trace, "Write the steps as a Chrome trace to this file");

  schedule_ = command_->add_subcommand("schedule", "What the merged schedule of a mixture of experts hides");
  schedule_->add_option("--preset", schedule.preset);
  schedule_->add_option("--layers", schedule.layers)->check(CLI::Range(1, 1000));
  schedule_->add_option("--sequences", schedule.sequences)->check(CLI::Range(1, 4096));
  schedule_->add_option("--context", schedule.context)->check(CLI::Range(16, 1 << 20));
  schedule_->add_option("--ranks", schedule.ranks, "Ranks that share the experts")->check(CLI::Range(2, 4096));
  schedule_->add_flag("--nccl", schedule.nccl, "Real ranks, one a GPU, instead of a loopback");
  schedule_->add_flag("--simulated", schedule.simulated, "On the virtual clock, without a GPU");
  schedule_->add_option("--link", schedule.link_gigabytes_per_second, "GB/s of the virtual clock's links")
      ->check(CLI::PositiveNumber);
  schedule_->add_option("--microbatches", schedule.microbatches)->check(CLI::Range(1, 1024));
  schedule_->add_option("--rounds", schedule.rounds)->check(CLI::Range(1, 100000));
  schedule_->add_option("--trace", schedule.trace, "Write one merged step as a Chrome trace to this file");

  train_ = command_->add_subcommand("train", "A whole training step with optimizer, by hand and with the library");
  train_->add_option("--preset", train.preset);
  train_->add_option("--modes", train.modes, "bare, sharded, sharded+graph")->delimiter(',');
  train_->add_option("--sequences", train.sequences)->check(CLI::Range(1, 4096));
  train_->add_option("--context", train.context)->check(CLI::Range(16, 1 << 20));
  train_->add_option("--rounds", train.rounds)->check(CLI::Range(1, 100000));
  train_->add_option("--ranks", train.ranks, "Ranks of a loopback, or of --nccl")->check(CLI::Range(1, 4096));
  train_->add_flag("--nccl", train.nccl, "Real ranks, one a GPU, instead of a loopback");
}

bool BenchCommand::parsed() const { return command_ != nullptr && command_->parsed(); }

int BenchCommand::run() const {
  return step_->parsed()          ? bench_step(step)
         : host_->parsed()        ? bench_host(host)
         : collectives_->parsed() ? bench_collectives(collectives)
         : schedule_->parsed()    ? bench_schedule(schedule)
         : overlap_->parsed()     ? bench_overlap(overlap)
                                  : bench_train(train);
}

}  // namespace fsdp::app
