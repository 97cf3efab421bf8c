#include "apps/fsdp/data_command.h"

#include <CLI/CLI.hpp>

#include "apps/fsdp/console.h"

namespace fsdp::app {
namespace {

CLI::App* add_prepare(CLI::App& app, DataPrepareOptions& options) {
  auto* command = app.add_subcommand("prepare", "Write a pair of token files from text or from tokens");
  command->add_option("--input", options.inputs, "Files to read; - is standard input")->required();
  command->add_option("--output", options.output, "Prefix of the .bin and .idx file")->required();
  command
      ->add_option("--format", options.format,
                   "text: bytes are tokens; jsonl: so are those of a string a line; tokens: lists of ids a line")
      ->capture_default_str();
  command->add_option("--key", options.key, "jsonl: the key of the string")->capture_default_str();
  command->add_option("--document", options.document, "text: what is a document: file, line or paragraph")
      ->capture_default_str();
  command->add_option("--append-token", options.append_token, "Put this id at the end of each document");
  command->add_option("--vocabulary", options.vocabulary, "Ids are below this number");
  command->add_option("--dtype", options.dtype, "uint8, uint16, int16, int32 or int64; else chosen by the vocabulary");
  command->add_flag("--overwrite", options.overwrite, "Replace the files when they exist");
  return command;
}

CLI::App* add_inspect(CLI::App& app, DataInspectOptions& options) {
  auto* command = app.add_subcommand("inspect", "Check token files and tell what they hold");
  command->add_option("files", options.files, "Prefixes of pairs, or plain files")->required();
  command->add_flag("--json", options.json, "Print one JSON object a file");
  return command;
}

void add_sample(CLI::App& app, DataSampleOptions& options) {
  auto* command = app.add_subcommand("sample", "Print a stretch of tokens");
  command->add_option("file", options.file, "Prefix of a pair, or a plain file")->required();
  command->add_option("--document", options.document, "Begin at this document (0: the first), end with it");
  command->add_option("--position", options.position, "Begin at this token (0: the first)");
  command->add_option("--length", options.length, "Tokens to print at most")->capture_default_str();
  command->add_flag("--text", options.text, "Print tokens below 256 as bytes");
}

}  // namespace

void DataCommand::add_to(CLI::App& app) {
  command_ = app.add_subcommand("data", "Make, check and show token files");
  command_->require_subcommand(1);
  prepare_command_ = add_prepare(*command_, prepare);
  inspect_command_ = add_inspect(*command_, inspect);
  add_sample(*command_, sample);
}

bool DataCommand::parsed() const { return command_ != nullptr && command_->parsed(); }

int DataCommand::run() const {
  if (prepare_command_->parsed()) {
    console::print(data_prepare(prepare));
  } else if (inspect_command_->parsed()) {
    console::print(data_inspect(inspect));
  } else {
    console::print(data_sample(sample));
  }
  return 0;
}

}  // namespace fsdp::app
