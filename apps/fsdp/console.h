// Standard output: whole lines, and one live line that is drawn over. Any thread may print; callers keep lines apart.
//
// The only user of spdlog, in a target of its own: LibTorch's folder of headers carries another version of fmt than the
// one that spdlog was built with.
#pragma once

#include <string>
#include <string_view>

namespace fsdp::app::console {

void print(std::string_view line);
void warn(std::string_view line);
void draw_live(const std::string& line);
// The live line stays where it is, what follows comes below.
void end_live();
[[nodiscard]] bool is_terminal();

}  // namespace fsdp::app::console
