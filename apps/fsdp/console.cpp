#include "apps/fsdp/console.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <cstdio>

namespace fsdp::app::console {
namespace {

spdlog::logger& logger() {
  static const auto instance = [] {
    auto created = spdlog::stdout_logger_mt("fsdp");
    created->set_pattern("%v");
    created->flush_on(spdlog::level::info);
    return created;
  }();
  return *instance;
}

}  // namespace

void print(std::string_view line) { logger().info(line); }

void warn(std::string_view line) { logger().warn("warning: {}", line); }

void draw_live(const std::string& line) {
  std::fputs(("\r\x1b[K" + line).c_str(), stdout);
  std::fflush(stdout);
}

void end_live() {
  std::fputs("\n", stdout);
  std::fflush(stdout);
}

bool is_terminal() { return isatty(STDOUT_FILENO) == 1; }

}  // namespace fsdp::app::console
