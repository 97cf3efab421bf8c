// One figure of a benchmark as a line of JSON on standard output.
#pragma once

#include <cstdio>
#include <optional>
#include <string>

namespace fsdp::bench {

struct Figure {
  std::string bench, metric;
  double value = 0;
  std::string unit;
  std::optional<double> peer = {};    // the same figure of what it is compared with, from the same run
  std::optional<double> target = {};  // for value / peer where there is a peer, else for the value
  const char* better = "lower";
};

inline void print(const Figure& figure) {
  std::printf("{\"bench\":\"%s\",\"metric\":\"%s\",\"value\":%.4g,\"unit\":\"%s\"", figure.bench.c_str(),
              figure.metric.c_str(), figure.value, figure.unit.c_str());
  if (figure.peer) std::printf(",\"peer\":%.4g,\"ratio\":%.4g", *figure.peer, figure.value / *figure.peer);
  if (figure.target) std::printf(",\"target\":%.4g", *figure.target);
  std::printf(",\"better\":\"%s\"}\n", figure.better);
  std::fflush(stdout);
}

}  // namespace fsdp::bench
