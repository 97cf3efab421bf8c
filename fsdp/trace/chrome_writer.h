// Writes spans as a Chrome trace (the JSON array format that chrome://tracing and Perfetto open).
#pragma once

#include <filesystem>
#include <map>
#include <span>
#include <string>

#include "fsdp/trace/span.h"

namespace fsdp::trace {

// One process row per rank, one thread row per stream. Unfinished spans are left out. The file appears whole or not at
// all: it is written beside its final name and renamed. Throws Error naming the path when that fails.
void write_chrome_trace(const std::filesystem::path& path, std::span<const Span> spans, int rank,
                        const std::map<int, std::string>& stream_names /* [stream id] */);

}  // namespace fsdp::trace
