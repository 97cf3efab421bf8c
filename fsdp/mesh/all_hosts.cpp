#include "fsdp/mesh/all_hosts.h"

#include <numeric>
#include <vector>

namespace fsdp {

Communicator all_hosts(const World& world, const std::string& name) {
  std::vector<int> ranks(static_cast<std::size_t>(world.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return world.host().create_communicator(ranks, name);
}

}  // namespace fsdp
