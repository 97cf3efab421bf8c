#include "fsdp/checkpoint/checkpoint.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <set>
#include <span>
#include <thread>
#include <unordered_map>

#include "fsdp/base/check.h"
#include "fsdp/checkpoint/checkpoint_folder.h"
#include "fsdp/checkpoint/rank_status.h"
#include "fsdp/checkpoint/safetensors.h"
#include "fsdp/checkpoint/sharded_state.h"
#include "fsdp/checkpoint/tensor_index.h"
#include "fsdp/checkpoint/tensor_reader.h"
#include "fsdp/data/part_file.h"

namespace fsdp {
namespace {

namespace fs = std::filesystem;
using namespace checkpoint;

constexpr std::size_t kNamesShown = 5;
constexpr std::chrono::milliseconds kBetweenQuestions{20};

std::span<const std::byte> bytes_in(const at::Tensor& contiguous) {
  return {static_cast<const std::byte*>(contiguous.const_data_ptr()), contiguous.nbytes()};
}

std::vector<std::uint64_t> checksums_of(std::span<const std::byte> bytes) {
  std::vector<std::uint64_t> sums;
  constexpr auto kBlock = static_cast<std::size_t>(kChecksumBlock);
  for (std::size_t at = 0; at < bytes.size(); at += kBlock)
    sums.push_back(checkpoint::checksum(bytes.subspan(at, std::min(kBlock, bytes.size() - at))));
  return sums;
}

// This rank's tensors that it, of all that hold them, writes.
std::vector<LocalTensor> own_tensors(std::vector<LocalBlock> blocks, const RankStatus& ranks) {
  std::vector<std::int64_t> signatures;
  for (const auto& block : blocks) signatures.push_back(block.signature);
  const auto all = ranks.gather(signatures);
  std::vector<LocalTensor> own;
  for (auto& block : blocks) {
    std::vector<int> holders;
    for (int r = 0; r < ranks.size(); ++r) {
      if (std::find(all[r].begin(), all[r].end(), block.signature) != all[r].end()) holders.push_back(r);
    }
    // In turns, so that ranks that hold the same share the work.
    const auto& first = all[holders.front()];
    const auto place = std::find(first.begin(), first.end(), block.signature) - first.begin();
    if (holders[static_cast<std::size_t>(place) % holders.size()] != ranks.rank()) continue;
    for (auto& tensor : block.tensors) {
      const bool empty = std::find(tensor.sizes.begin(), tensor.sizes.end(), 0) != tensor.sizes.end();
      if (!tensor.elements.empty() || empty) own.push_back(std::move(tensor));
    }
  }
  return own;
}

// To the host as it is written, unless it is there.
void write_rank_file(const fs::path& folder, int rank, const std::vector<LocalTensor>& tensors,
                     const std::atomic<bool>& given_up) {
  FSDP_CHECK(fs::is_directory(folder), Error,
             "rank 0 has made {}, and this rank does not see it: it must be one folder for all ranks", folder.string());
  SafetensorsHeader header;
  for (const auto& t : tensors) {
    header.entries.push_back({.name = t.elements.empty() ? t.key : fmt::format("{}@{}", t.key, t.elements.begin),
                              .dtype = dtype_name(t.values.scalar_type(), t.key),
                              .sizes = {t.values.numel()},
                              .bytes = static_cast<std::int64_t>(t.values.nbytes())});
  }
  header.metadata["format"] = kPiecesFormat;
  data::PartFile file(TensorIndex::rank_file(folder, rank));
  const std::string start = make_safetensors_header(header);
  file.append(std::as_bytes(std::span(start)));
  std::map<std::string, StoredTensor> described;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (given_up) return;
    const LocalTensor& t = tensors[i];
    const at::Tensor here = t.values.to(c10::kCPU).contiguous();
    file.append(bytes_in(here));
    StoredTensor stored{.dtype = header.entries[i].dtype, .sizes = t.sizes, .strides = t.strides};
    if (!t.elements.empty())
      stored.pieces.push_back({0, header.entries[i].begin, t.elements, checksums_of(bytes_in(here))});
    described.emplace(t.key, std::move(stored));
  }
  const std::int64_t bytes = file.size();
  file.close();
  file.publish();
  TensorIndex::describe_rank(folder, rank, bytes, described);
}

// To memory that the device writes at the speed of its bus. LibTorch keeps it when it is freed, so later saves find it.
// Enqueued on the current stream.
void copy_to_host(std::vector<LocalTensor>& tensors) {
  for (auto& tensor : tensors) {
    if (tensor.values.is_cpu()) {
      tensor.values = tensor.values.clone();
      continue;
    }
    const at::Tensor host =
        at::empty(tensor.values.sizes(), at::TensorOptions().dtype(tensor.values.scalar_type()).pinned_memory(true));
    host.copy_(tensor.values, /*non_blocking=*/true);
    tensor.values = host;
  }
}

std::string some_of(const std::vector<std::string>& names) {
  std::string text;
  for (std::size_t i = 0; i < std::min(names.size(), kNamesShown); ++i)
    text += (i > 0 ? ", \"" : "\"") + names[i] + '"';
  return names.size() > kNamesShown ? text + fmt::format(" and {} more", names.size() - kNamesShown) : text;
}

std::string text_of(const std::vector<std::int64_t>& sizes) { return fmt::format("({})", fmt::join(sizes, ", ")); }

// The kinds of state that the optimizer keeps must be those that were saved.
void check_state_kinds(const TensorIndex& index, const ShardedOptimizer& optimizer) {
  const std::string prefix = "optimizer/";
  std::set<std::string> stored;
  bool any = false;
  for (auto item = index.tensors().lower_bound(prefix); item != index.tensors().end(); ++item) {
    if (!item->first.starts_with(prefix)) break;
    any = true;
    const auto end = item->first.find('/', prefix.size());
    if (end != std::string::npos) stored.insert(item->first.substr(prefix.size(), end - prefix.size()));
  }
  FSDP_CHECK(any, UsageError,
             "{} was saved without an optimizer: load it with LoadOptions::optimizer = false, or into a Checkpoint "
             "without one",
             index.path().string());
  stored.erase("step");
  const std::set<std::string> here(optimizer.state_names().begin(), optimizer.state_names().end());
  FSDP_CHECK(stored == here, UsageError,
             "{} holds the optimizer state [{}], and this optimizer keeps [{}]: use the optimizer that was saved, or "
             "load with LoadOptions::optimizer = false",
             index.path().string(), fmt::join(stored, ", "), fmt::join(here, ", "));
}

// Reads into local tensors, whatever their dtype and order of elements.
class LocalReader {
 public:
  explicit LocalReader(const TensorIndex& index) : index_(index), reader_(index) {}

  void read(const std::string& key, const LocalTensor& to) {
    if (to.elements.empty()) return;
    const StoredTensor& stored = *index_.find(key);
    if (stored.strides == to.strides) {
      to.values.copy_(read_range(key, stored, to.elements));
      return;
    }
    // Elements lie in another order: all of them, in the order of the sizes, then in that of here.
    const at::Tensor whole = read_range(key, stored, {0, stored.elements()}).as_strided(stored.sizes, stored.strides);
    const at::Tensor ordered = at::empty_strided(to.sizes, to.strides, whole.options());
    ordered.copy_(whole);
    to.values.copy_(ordered.as_strided({to.elements.length()}, {1}, to.elements.begin));
  }
  at::Tensor read_range(const std::string& key, const StoredTensor& stored, ElementRange range) {
    const at::Tensor host = at::empty({range.length()}, dtype_of(stored.dtype));
    reader_.read(key, range, {static_cast<std::byte*>(host.mutable_data_ptr()), host.nbytes()});
    return host;
  }

 private:
  const TensorIndex& index_;
  TensorReader reader_;
};

}  // namespace

struct Checkpoint::Impl {
  FsdpContext& context;
  ShardedOptimizer* optimizer;
  RankStatus ranks;
  NamedTensors added;
};

// A save under way: files are written by a thread of their own.
struct Checkpoint::Pending {
  fs::path folder;
  std::map<std::string, std::string> attributes;
  std::vector<LocalTensor> tensors;
  std::exception_ptr error;
  std::atomic<bool> written{false}, given_up{false};
  std::thread thread;

  void start(int rank) {
    thread = std::thread([this, rank] {
      try {
        write_rank_file(part_of(folder), rank, tensors, given_up);
      } catch (...) {
        error = std::current_exception();
      }
      tensors.clear();
      written = true;
    });
  }
  ~Pending() {
    given_up = true;
    if (thread.joinable()) thread.join();
  }
};

Checkpoint::Checkpoint(FsdpContext& context, ShardedOptimizer* optimizer)
    : impl_(std::make_unique<Impl>(Impl{context, optimizer, RankStatus(context.mesh().world()), {}})) {}

Checkpoint::~Checkpoint() {
  if (!pending_) return;
  const fs::path folder = pending_->folder;
  pending_.reset();
  if (impl_->ranks.rank() == 0) discard_part(folder);
}

void Checkpoint::add_tensor(const std::string& name, const at::Tensor& tensor) {
  FSDP_CHECK(tensor.defined(), UsageError, "the tensor \"{}\" is undefined", name);
  for (const auto& [other, value] : impl_->added)
    FSDP_CHECK(other != name, UsageError, "add_tensor: a tensor \"{}\" was added before", name);
  impl_->added.emplace_back(name, tensor);
}

void Checkpoint::save(const fs::path& folder, const std::map<std::string, std::string>& attributes) {
  start(folder, attributes, /*in_background=*/false);
  finish_save();
}

void Checkpoint::begin_save(const fs::path& folder, const std::map<std::string, std::string>& attributes) {
  start(folder, attributes, /*in_background=*/true);
}

void Checkpoint::start(const fs::path& folder, const std::map<std::string, std::string>& attributes,
                       bool in_background) {
  finish_save();
  at::NoGradGuard no_grad;
  const bool leads = impl_->ranks.rank() == 0;
  Runtime& runtime = *impl_->context.mesh().runtime();
  auto pending = std::make_unique<Pending>();
  pending->folder = folder;
  pending->attributes = attributes;
  std::vector<std::int64_t> claims;
  LocalState state;
  impl_->ranks.all([&] {
    impl_->context.wait_for_gradients();
    impl_->context.check_between_steps("saving a checkpoint");
    claims = partition_claims(impl_->context);
  });
  const auto all_claims = impl_->ranks.gather(claims);
  bool made = false;
  try {
    impl_->ranks.all([&] {
      state = local_state(impl_->context, impl_->optimizer, impl_->added, all_claims);
      if (!leads) return;
      make_part(folder);
      made = true;
    });
    pending->tensors = own_tensors(std::move(state.blocks), impl_->ranks);
    impl_->ranks.all([&] {
      if (in_background) copy_to_host(pending->tensors);
      runtime.compute_stream().synchronize();
      pending->start(impl_->ranks.rank());
    });
  } catch (...) {
    pending.reset();
    if (made) discard_part(folder);
    throw;
  }
  pending_ = std::move(pending);
}

bool Checkpoint::save_is_written() const { return !pending_ || pending_->written; }

void Checkpoint::finish_save() {
  if (!pending_) return;
  const std::unique_ptr<Pending> pending = std::move(pending_);
  const bool leads = impl_->ranks.rank() == 0;
  try {
    // Ranks that are done ask again and again, so that no deadline passes while another one writes.
    while (impl_->ranks.maximum({pending->written ? 0 : 1})[0] != 0) std::this_thread::sleep_for(kBetweenQuestions);
    pending->thread.join();
    impl_->ranks.all([&] {
      if (pending->error) std::rethrow_exception(pending->error);
    });
    impl_->ranks.all([&] {
      if (!leads) return;
      TensorIndex::write(part_of(pending->folder), impl_->ranks.size(), pending->attributes);
      publish_part(pending->folder);
    });
  } catch (...) {
    if (leads) discard_part(pending->folder);
    throw;
  }
}

LoadResult Checkpoint::load(const fs::path& folder, const LoadOptions& options) {
  FSDP_CHECK(!options.stored_name || !options.optimizer, UsageError,
             "LoadOptions::stored_name is for weights that another program wrote: set LoadOptions::optimizer = false");
  finish_save();
  at::NoGradGuard no_grad;
  LoadResult result;
  TensorIndex index;
  LocalState state;
  std::vector<std::int64_t> claims;   // of this rank, then what index it has opened
  std::vector<std::int64_t> claimed;  // [key of the index] 1: this rank wants it
  std::unordered_map<const StoredTensor*, std::size_t> numbers;
  std::vector<std::pair<const LocalTensor*, std::string>> reads;
  std::vector<at::Tensor> zeros;
  const auto stored_key = [&](const std::string& key) {
    const std::string prefix = "weights/";
    return options.stored_name && key.starts_with(prefix) ? prefix + options.stored_name(key.substr(prefix.size()))
                                                          : key;
  };
  const auto plan = [&](const LocalTensor& tensor) {
    const bool of_optimizer = tensor.key.starts_with("optimizer/");
    if (tensor.key.starts_with(kStepPrefix) || (of_optimizer && !options.optimizer)) return;
    if (index.ranks() == 0 && !tensor.key.starts_with("weights/")) return;  // plain files have nothing else
    const std::string key = stored_key(tensor.key);
    const auto found = index.tensors().find(key);
    if (found == index.tensors().end()) {
      if (of_optimizer)
        zeros.push_back(tensor.values);
      else if (options.optimizer || !tensor.key.starts_with("tensors/"))
        result.missing.push_back(key.substr(key.find('/') + 1));
      return;
    }
    FSDP_CHECK(found->second.sizes == tensor.sizes, UsageError, "\"{}\" has sizes {} here, and {} in {}", tensor.key,
               text_of(tensor.sizes), text_of(found->second.sizes), folder.string());
    FSDP_CHECK(c10::isFloatingType(dtype_of(found->second.dtype)) == c10::isFloatingType(tensor.values.scalar_type()),
               UsageError, "\"{}\" is {} here, and {} in {}", tensor.key, c10::toString(tensor.values.scalar_type()),
               found->second.dtype, folder.string());
    claimed[numbers.at(&found->second)] = 1;
    reads.emplace_back(&tensor, key);
  };
  const bool with_optimizer = impl_->optimizer != nullptr && options.optimizer;
  impl_->ranks.all([&] {
    if (impl_->ranks.rank() == 0) recover(folder);
  });
  impl_->ranks.all([&] {
    index = TensorIndex::open(folder);
    impl_->context.mesh().runtime()->synchronize();  // no rank reads this one's weights any more, after `all`
    impl_->context.wait_for_gradients();
    impl_->context.check_between_steps("loading a checkpoint");
    FSDP_CHECK(!with_optimizer || index.ranks() > 0, UsageError,
               "{} has weights only, no state of an optimizer: load it with LoadOptions::optimizer = false",
               folder.string());
    claims = partition_claims(impl_->context);
    claims.push_back(index.fingerprint());
  });
  auto all_claims = impl_->ranks.gather(claims);
  for (std::size_t r = 0; r < all_claims.size(); ++r) {
    FSDP_CHECK(all_claims[r].back() == all_claims[0].back(), UsageError,
               "{} is not the same checkpoint on rank 0 and on rank {}: it must be one folder for all ranks",
               folder.string(), r);
  }
  for (auto& of_rank : all_claims) of_rank.pop_back();
  impl_->ranks.all([&] {
    state = local_state(impl_->context, impl_->optimizer, impl_->added, all_claims);
    claimed.resize(index.tensors().size());
    for (const auto& [key, tensor] : index.tensors()) numbers.emplace(&tensor, numbers.size());
    if (with_optimizer) check_state_kinds(index, *impl_->optimizer);
    for (const auto& block : state.blocks) {
      for (const auto& tensor : block.tensors) plan(tensor);
    }
    FSDP_CHECK(!options.strict || result.missing.empty(), UsageError, "{} lacks {} of the model: {}", folder.string(),
               result.missing.size(), some_of(result.missing));
  });
  claimed = impl_->ranks.maximum(std::move(claimed));
  std::size_t number = 0;
  for (const auto& [key, tensor] : index.tensors()) {
    const bool counts = !key.starts_with("optimizer/") && (options.optimizer || !key.starts_with("tensors/"));
    if (claimed[number++] == 0 && counts) result.unused.push_back(key.substr(key.find('/') + 1));
  }
  FSDP_CHECK(!options.strict || result.unused.empty(), UsageError, "{} has {} that the model lacks: {}",
             folder.string(), result.unused.size(), some_of(result.unused));
  impl_->ranks.all([&] {
    LocalReader reader(index);
    for (const auto& [tensor, key] : reads) reader.read(key, *tensor);
    for (auto& tensor : zeros) tensor.zero_();
    if (!with_optimizer) return;
    std::vector<float> steps;
    for (const auto& step : state.steps) {
      const StoredTensor* stored = index.find(step.key);
      if (stored == nullptr) {
        result.fresh.push_back(step.key.substr(std::string(kStepPrefix).size()));
        steps.push_back(0);
        continue;
      }
      // Another number of parts may have been saved: that of the part in which this one begins.
      const std::int64_t element = step.partition.index * stored->elements() / step.partition.count;
      steps.push_back(reader.read_range(step.key, *stored, {element, element + 1}).item<float>());
    }
    impl_->optimizer->set_steps(steps);
  });
  impl_->context.weights_changed();
  result.attributes = index.attributes();
  result.ranks = index.ranks();
  return result;
}

}  // namespace fsdp
