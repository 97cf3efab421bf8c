#include "fsdp/moe/expert_exchange.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <exception>
#include <numeric>

#include "fsdp/base/check.h"
#include "fsdp/mesh/axis_ranks.h"

namespace fsdp::moe {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr std::size_t kHeld = 16;  // sent rows that may be kept until the host looks whether they have gone

struct Exchange : torch::autograd::Function<Exchange> {
  // LibTorch keeps what is no tensor as IValues; the exchange travels as a capsule.
  struct Way : torch::CustomClassHolder {
    std::shared_ptr<ExpertExchange> exchange;
    std::vector<std::int64_t> sent, received;
    const char *label = "", *backward_label = "";
  };
  static at::Tensor forward(AutogradContext* context, const at::Tensor& rows, const c10::intrusive_ptr<Way>& way) {
    context->saved_data["way"] = c10::IValue::make_capsule(way);
    return way->exchange->exchange(rows, way->sent, way->received, way->label);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto way = c10::static_intrusive_pointer_cast<Way>(context->saved_data["way"].toCapsule());
    return {way->exchange->exchange(gradients[0].contiguous(), way->received, way->sent, way->backward_label),
            at::Tensor()};
  }
};

std::int64_t sum(const std::vector<std::int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), std::int64_t{0});
}

// Pieces of rows, cut at `sizes` of (outer, inner) order, put together in (inner, outer) order.
at::Tensor transpose_pieces(const at::Tensor& rows, const std::vector<std::vector<std::int64_t>>& sizes, bool back) {
  const std::size_t ranks = sizes.size(), experts = sizes.empty() ? 0 : sizes[0].size();
  std::vector<at::Tensor> pieces(ranks * experts);
  std::int64_t begin = 0;
  const auto take = [&](std::size_t rank, std::size_t expert, std::size_t place) {
    pieces[place] = rows.narrow(0, begin, sizes[rank][expert]);
    begin += sizes[rank][expert];
  };
  if (back) {
    for (std::size_t e = 0; e < experts; ++e)
      for (std::size_t r = 0; r < ranks; ++r) take(r, e, r * experts + e);
  } else {
    for (std::size_t r = 0; r < ranks; ++r)
      for (std::size_t e = 0; e < experts; ++e) take(r, e, e * ranks + r);
  }
  return at::cat(pieces);
}

// As one node: the gradient of a piece of rows, left to autograd, is as large as all rows.
struct Regroup : torch::autograd::Function<Regroup> {
  struct Pieces : torch::CustomClassHolder {
    std::vector<std::vector<std::int64_t>> sizes;
    bool back = false;
  };
  static at::Tensor forward(AutogradContext* context, const at::Tensor& rows,
                            const c10::intrusive_ptr<Pieces>& pieces) {
    context->saved_data["pieces"] = c10::IValue::make_capsule(pieces);
    return transpose_pieces(rows, pieces->sizes, pieces->back);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto pieces = c10::static_intrusive_pointer_cast<Pieces>(context->saved_data["pieces"].toCapsule());
    return {transpose_pieces(gradients[0], pieces->sizes, !pieces->back), at::Tensor()};
  }
};

at::Tensor regroup(const at::Tensor& rows, const ExchangeCounts& counts, bool back) {
  auto pieces = c10::make_intrusive<Regroup::Pieces>();
  pieces->sizes = counts.received_by_expert;
  pieces->back = back;
  return Regroup::apply(rows, pieces);
}

}  // namespace

std::vector<std::int64_t> ExchangeCounts::rows_by_expert() const {
  std::vector<std::int64_t> rows(received_by_expert.empty() ? 0 : received_by_expert[0].size());
  for (const auto& of_rank : received_by_expert) {
    for (std::size_t e = 0; e < rows.size(); ++e) rows[e] += of_rank[e];
  }
  return rows;
}

std::shared_ptr<ExpertExchange> ExpertExchange::create(const DeviceMesh& mesh, const std::string& axis,
                                                       std::int64_t experts) {
  const int index = mesh.axis_index(axis), size = mesh.axis(index).size;
  FSDP_CHECK(experts > 0 && experts % size == 0, UsageError,
             "{} experts cannot be shared equally by the {} ranks of mesh axis \"{}\"", experts, size, axis);
  return std::shared_ptr<ExpertExchange>(new ExpertExchange(
      mesh.world().create_communicator(ranks_on_axis(mesh, index), axis + ".exchange"), mesh.runtime(), experts));
}

ExpertExchange::ExpertExchange(Communicator communicator, std::shared_ptr<Runtime> runtime, std::int64_t experts)
    : communicator_(std::move(communicator)),
      runtime_(std::move(runtime)),
      experts_(experts),
      stream_(runtime_->make_stream("exchange")) {}

ExpertExchange::PendingCounts ExpertExchange::start_counts(const at::Tensor& load, std::int64_t rows) {
  at::NoGradGuard no_grad;
  FSDP_CHECK(load.dim() == 1 && load.size(0) == experts_, UsageError, "expected the load of {} experts, got {}",
             experts_, load.numel());
  PendingCounts pending;
  pending.rows = rows;
  if (load.is_meta()) return pending;
  pending.sent = load.to(at::kLong).contiguous();
  pending.received = at::empty_like(pending.sent);
  const Stream current = runtime_->compute_stream();
  if (!(current == stream_)) {
    Event ready;
    current.record(ready);
    stream_.wait(ready);
  }
  const std::vector<std::int64_t> each(static_cast<std::size_t>(size()), own_experts());
  communicator_.all_to_all_v(pending.sent.const_data_ptr(), each, pending.received.mutable_data_ptr(), each, at::kLong,
                             stream_, "FSDP:experts:counts");
  if (!pending.sent.is_cuda()) {
    pending.sent_here = pending.sent;
    pending.received_here = pending.received;
  } else {
    const auto pinned = at::TensorOptions().dtype(at::kLong).pinned_memory(true);
    pending.sent_here = at::empty({experts_}, pinned);
    pending.received_here = at::empty({experts_}, pinned);
    stream_.enqueue([&] {
      pending.sent_here.copy_(pending.sent, /*non_blocking=*/true);
      pending.received_here.copy_(pending.received, /*non_blocking=*/true);
    });
  }
  stream_.record(pending.done);
  hold(pending.sent, pending.received);
  return pending;
}

ExpertExchange::~ExpertExchange() {
  if (std::uncaught_exceptions() > 0 && runtime_->device().is_cuda()) return;  // what runs there may wait for a peer
  try {
    stream_.synchronize();
  } catch (const std::exception&) {  // it was thrown to whoever waited, or nobody will
  }
}

void ExpertExchange::reset() {
  stream_.reset();
  communicator_.reset();
  held_.clear();
}

ExchangeCounts ExpertExchange::finish_counts(const PendingCounts& pending) {
  const auto ranks = static_cast<std::size_t>(size()), own = static_cast<std::size_t>(own_experts());
  ExchangeCounts counts;
  counts.sent.resize(ranks);
  counts.received.resize(ranks);
  counts.received_by_expert.assign(ranks, std::vector<std::int64_t>(own));
  if (!pending.sent.defined()) {  // no data: as if every expert had equally many
    for (std::size_t r = 0; r < ranks; ++r) {
      for (std::size_t e = 0; e < own; ++e) {
        const auto expert = static_cast<std::int64_t>(r * own + e);
        const std::int64_t rows = pending.rows * (expert + 1) / experts_ - pending.rows * expert / experts_;
        counts.sent[r] += rows;
        counts.received_by_expert[r][e] = rows;
      }
      // Equal loads everywhere, up to rounding: what comes from a rank is what goes to it.
      std::int64_t total = 0;
      for (std::size_t e = 0; e < own; ++e) total += counts.received_by_expert[r][e];
      counts.received[r] = total;
    }
    return counts;
  }
  pending.done.synchronize();
  const auto* to = pending.sent_here.const_data_ptr<std::int64_t>();
  const auto* from = pending.received_here.const_data_ptr<std::int64_t>();
  for (std::size_t r = 0; r < ranks; ++r) {
    for (std::size_t e = 0; e < own; ++e) {
      counts.sent[r] += to[r * own + e];
      counts.received_by_expert[r][e] = from[r * own + e];
      counts.received[r] += from[r * own + e];
    }
  }
  return counts;
}

at::Tensor ExpertExchange::exchange(const at::Tensor& rows, const std::vector<std::int64_t>& sent,
                                    const std::vector<std::int64_t>& received, const char* label) {
  FSDP_INVARIANT(rows.is_contiguous() && rows.size(0) == sum(sent));
  auto sizes = rows.sizes().vec();
  sizes[0] = sum(received);
  const std::int64_t width =
      rows.size(0) > 0 ? rows.numel() / rows.size(0)
                       : std::accumulate(sizes.begin() + 1, sizes.end(), std::int64_t{1}, std::multiplies<>());
  at::Tensor result = at::empty(sizes, rows.options());
  auto out = sent, in = received;
  for (auto* counts : {&out, &in}) {
    for (auto& count : *counts) count *= width;
  }
  const Stream current = runtime_->compute_stream();
  const bool elsewhere = !(current == stream_);
  if (elsewhere) {
    Event ready;
    current.record(ready);
    stream_.wait(ready);
  }
  const bool meta = rows.is_meta();
  communicator_.all_to_all_v(meta ? nullptr : rows.const_data_ptr(), out, meta ? nullptr : result.mutable_data_ptr(),
                             in, rows.scalar_type(), stream_, label);
  ++exchanges_;
  if (elsewhere && unordered_ == 0) join();
  if (!meta) hold(rows, result);
  return result;
}

// The caller may drop both at once, while the stream still reads and writes them. Of the result only the memory is
// held: autograd copies a gradient that somebody else refers to, which would read it before it has come.
void ExpertExchange::hold(const at::Tensor& rows, const at::Tensor& result) {
  held_.push_back({rows, result.storage(), {}});
  stream_.record(held_.back().done);
  while (!held_.empty() && held_.front().done.query()) held_.pop_front();
  while (held_.size() > kHeld) {
    held_.front().done.synchronize();
    held_.pop_front();
  }
}

void ExpertExchange::join() {
  const Stream current = runtime_->compute_stream();
  if (current == stream_) return;
  Event exchanged;
  stream_.record(exchanged);
  current.wait(exchanged);
}

at::Tensor ExpertExchange::dispatch(const at::Tensor& rows, const ExchangeCounts& counts) {
  auto way = c10::make_intrusive<Exchange::Way>();
  way->exchange = shared_from_this();
  way->sent = counts.sent;
  way->received = counts.received;
  way->label = "FSDP:experts:dispatch";
  way->backward_label = "FSDP:experts:dispatch_backward";
  return Exchange::apply(rows.contiguous(), way);
}

at::Tensor ExpertExchange::combine(const at::Tensor& rows, const ExchangeCounts& counts) {
  auto way = c10::make_intrusive<Exchange::Way>();
  way->exchange = shared_from_this();
  way->sent = counts.received;
  way->received = counts.sent;
  way->label = "FSDP:experts:combine";
  way->backward_label = "FSDP:experts:combine_backward";
  return Exchange::apply(rows.contiguous(), way);
}

bool grouped_as_received(const ExchangeCounts& counts) {
  return counts.received_by_expert.size() <= 1 || counts.received_by_expert[0].size() <= 1;
}

at::Tensor group_by_expert(const at::Tensor& rows, const ExchangeCounts& counts) {
  return grouped_as_received(counts) ? rows : regroup(rows, counts, /*back=*/false);
}

at::Tensor ungroup_by_rank(const at::Tensor& rows, const ExchangeCounts& counts) {
  return grouped_as_received(counts) ? rows : regroup(rows, counts, /*back=*/true);
}

}  // namespace fsdp::moe
