// `fsdp checkpoint`: show, check and export checkpoints. Runs on one process, whatever the number of ranks that saved.
//
// Holds what the parser writes to: must outlive the parsing of the CLI::App that it was added to, and must not move.
#pragma once

#include <string>

namespace CLI {
class App;
}

namespace fsdp::app {

class CheckpointCommand {
 public:
  void add_to(CLI::App& app);
  // Whether the parsed command line is one of these.
  [[nodiscard]] bool parsed() const;
  // Prints the result, returns the exit code. Throws UsageError for what is no checkpoint, or damaged.
  [[nodiscard]] int run() const;

 private:
  [[nodiscard]] std::string inspect() const;
  [[nodiscard]] std::string verify() const;
  [[nodiscard]] std::string export_weights() const;

  std::string path_, output_, dtype_ = "stored", names_ = "own";
  bool tensors_ = false, json_ = false;
  CLI::App *command_ = nullptr, *inspect_ = nullptr, *verify_ = nullptr;
};

}  // namespace fsdp::app
