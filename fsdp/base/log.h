// Where the library's few messages go. It never prints by itself: the default sink drops everything, an application
// installs its own. Any thread may log; the sink is called under a lock.
#pragma once

#include <functional>
#include <string_view>

namespace fsdp::log {

enum class Level { info, warning };

using Sink = std::function<void(Level, std::string_view message)>;

void set_sink(Sink sink);  // process-wide; an empty sink drops messages
void write(Level level, std::string_view message);

}  // namespace fsdp::log
