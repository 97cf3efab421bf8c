#include "apps/fsdp/agreement.h"

#include "fsdp/mesh/all_hosts.h"

namespace fsdp::app {

Agreement::Agreement(const World& world)
    : runtime_(*world.host().runtime()),
      communicator_(all_hosts(world, "agreement")),
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
