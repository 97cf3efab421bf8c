#include "fsdp/trace/chrome_writer.h"

#include <fstream>
#include <nlohmann/json.hpp>

#include "fsdp/base/check.h"

namespace fsdp::trace {

void write_chrome_trace(const std::filesystem::path& path, std::span<const Span> spans, int rank,
                        const std::map<int, std::string>& stream_names) {
  const std::filesystem::path partial = path.string() + ".partial";
  struct RemovePartial {
    const std::filesystem::path& path;
    ~RemovePartial() {
      std::error_code ignored;
      std::filesystem::remove(path, ignored);  // nothing there after the rename
    }
  } remove_partial{partial};
  {
    std::ofstream file(partial);
    FSDP_CHECK(file.good(), Error, "cannot write the trace {}: does its folder exist and is it writable?",
               path.string());
    file << "[\n";
    file << nlohmann::json{{"name", "process_name"},
                           {"ph", "M"},
                           {"pid", rank},
                           {"args", {{"name", fmt::format("rank {}", rank)}}}}
                .dump();
    for (const auto& [id, name] : stream_names) {
      file << ",\n"
           << nlohmann::json{{"name", "thread_name"},
                             {"ph", "M"},
                             {"pid", rank},
                             {"tid", id},
                             {"args", {{"name", name}}}}
                  .dump();
    }
    for (const Span& span : spans) {
      if (span.end == kUnset) continue;
      nlohmann::json event{{"name", span.name},
                           {"cat", to_string(span.kind)},
                           {"ph", "X"},
                           {"pid", rank},
                           {"tid", span.stream},
                           {"ts", static_cast<double>(span.begin) * 1e-3},
                           {"dur", static_cast<double>(span.end - span.begin) * 1e-3}};
      if (is_communication(span.kind)) event["args"] = {{"sequence", span.sequence}, {"bytes", span.bytes}};
      file << ",\n" << event.dump();
    }
    file << "\n]\n";
    file.flush();
    FSDP_CHECK(file.good(), Error, "writing the trace {} failed: is the disk full?", path.string());
  }
  std::error_code error;
  std::filesystem::rename(partial, path, error);
  FSDP_CHECK(!error, Error, "cannot move {} to {}: {}", partial.string(), path.string(), error.message());
}

}  // namespace fsdp::trace
