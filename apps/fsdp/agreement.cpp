#include "apps/fsdp/agreement.h"

#include <numeric>

namespace fsdp::app {
namespace {

std::vector<int> all_ranks(int size) {
  std::vector<int> ranks(size);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace

Agreement::Agreement(const World& world)
    : runtime_(*world.host().runtime()),
      communicator_(world.host().create_communicator(all_ranks(world.size()), "agreement")),
      stream_(world.host().runtime()->make_stream("agreement")) {
  communicator_.set_inline_limit(Bytes(1024));
}

std::vector<double> Agreement::sum(std::vector<double> values) const {
  std::vector<double> result(values.size());
  communicator_.all_reduce(values.data(), result.data(), Elements(static_cast<std::int64_t>(values.size())),
                           c10::kDouble, ReduceOp::sum, stream_, "agreement");
  Event done;
  stream_.record(done);
  runtime_.compute_stream().wait(done);
  done.synchronize();
  return result;
}

}  // namespace fsdp::app
