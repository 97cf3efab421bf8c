#include "fsdp/module/prefetch_plan.h"

#include <algorithm>

namespace fsdp {

PrefetchTable::PrefetchTable(std::span<const int> forward, std::span<const int> backward,
                             const std::vector<bool>& owns_weights, int depth) {
  for (Phase phase : {Phase::forward, Phase::backward}) {
    const auto order = phase == Phase::forward ? forward : backward;
    auto& table = tables_[static_cast<int>(phase)];
    table.resize(owns_weights.size());
    for (std::size_t position = 0; position < order.size(); ++position) {
      auto& targets = table[order[position]];
      for (std::size_t next = position + 1; next < order.size() && static_cast<int>(targets.size()) < depth; ++next) {
        if (owns_weights[order[next]]) targets.push_back(order[next]);
      }
    }
  }
}

void RecordedOrder::begin(std::uint64_t signature) {
  active_ = true;
  signature_ = signature;
  seen_.clear();
  cursor_ = 0;
  const auto found = recordings_.find(signature);
  replay_ = found == recordings_.end() ? nullptr : &found->second;
}

std::span<const int> RecordedOrder::need(int unit, int depth) {
  if (!active_) return {};
  seen_.push_back(unit);
  if (replay_ == nullptr) return {};
  if (cursor_ >= replay_->size() || (*replay_)[cursor_] != unit) {
    ++mismatches_;
    replay_ = nullptr;
    return {};
  }
  ++cursor_;
  const auto count = std::min<std::size_t>(static_cast<std::size_t>(depth), replay_->size() - cursor_);
  return {replay_->data() + cursor_, count};
}

void RecordedOrder::end() {
  if (!active_) return;
  recordings_[signature_].assign(seen_.begin(), seen_.end());
  replay_ = nullptr;
  active_ = false;
}

void RecordedOrder::discard() {
  replay_ = nullptr;
  active_ = false;
}

}  // namespace fsdp
