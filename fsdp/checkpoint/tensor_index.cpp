#include "fsdp/checkpoint/tensor_index.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/fingerprint.h"
#include "fsdp/checkpoint/safetensors.h"
#include "fsdp/data/part_file.h"

namespace fsdp::checkpoint {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

constexpr const char* kFormat = "libfsdp checkpoint";
constexpr int kVersion = 1;
constexpr const char *kPlainFile = "model.safetensors", *kPlainIndex = "model.safetensors.index.json";

fs::path rank_description(const fs::path& folder, int rank) { return folder / fmt::format("rank-{:05}.json", rank); }

json read_json(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  FSDP_CHECK(file.good(), UsageError, "{} cannot be read", path.string());
  auto value = json::parse(file, nullptr, /*allow_exceptions=*/false);
  FSDP_CHECK(value.is_object(), UsageError, "{} is damaged: no JSON object", path.string());
  return value;
}

void write_json(const fs::path& path, const json& value) {
  data::PartFile file(path);
  const std::string text = value.dump(-1, ' ', false, json::error_handler_t::replace);  // whatever names are made of
  file.append(std::as_bytes(std::span(text)));
  file.close();
  file.publish();
}

json to_json(const StoredTensor& tensor) {
  json pieces = json::array();
  for (const auto& piece : tensor.pieces)
    pieces.push_back({piece.file, piece.offset, piece.elements.begin, piece.elements.end, piece.checksums});
  json value{{"dtype", tensor.dtype}, {"shape", tensor.sizes}, {"pieces", std::move(pieces)}};
  if (!tensor.row_major()) value["strides"] = tensor.strides;
  return value;
}

StoredTensor tensor_of(const json& value) {
  StoredTensor tensor{.dtype = value.at("dtype"), .sizes = value.at("shape")};
  tensor.strides = value.contains("strides") ? value.at("strides").get<std::vector<std::int64_t>>()
                                             : row_major_strides(tensor.sizes);
  for (const auto& piece : value.at("pieces"))
    tensor.pieces.push_back({piece.at(0), piece.at(1), {piece.at(2), piece.at(3)}, piece.at(4)});
  return tensor;
}

// Whether each element has one place of its own, from the first on.
bool are_dense(const StoredTensor& tensor) {
  if (tensor.sizes.size() != tensor.strides.size()) return false;
  std::vector<std::pair<std::int64_t, std::int64_t>> axes;  // (stride, size)
  for (std::size_t i = 0; i < tensor.sizes.size(); ++i) {
    if (tensor.sizes[i] < 0) return false;
    if (tensor.sizes[i] == 0) return true;
    if (tensor.sizes[i] > 1) axes.emplace_back(tensor.strides[i], tensor.sizes[i]);
  }
  std::sort(axes.begin(), axes.end());
  std::int64_t expected = 1;
  for (const auto& [stride, size] : axes) {
    if (stride != expected || __builtin_mul_overflow(expected, size, &expected)) return false;
  }
  return true;
}

void sort_pieces(StoredTensor& tensor) {
  std::sort(tensor.pieces.begin(), tensor.pieces.end(),
            [](const auto& a, const auto& b) { return a.elements.begin < b.elements.begin; });
}

}  // namespace

std::vector<std::int64_t> row_major_strides(const std::vector<std::int64_t>& sizes) {
  std::vector<std::int64_t> strides(sizes.size(), 1);
  for (std::size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * std::max<std::int64_t>(sizes[i], 1);
  return strides;
}

std::int64_t StoredTensor::elements() const {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>());
}

bool StoredTensor::row_major() const { return strides == row_major_strides(sizes); }

const StoredTensor* TensorIndex::find(const std::string& key) const {
  const auto found = tensors_.find(key);
  return found == tensors_.end() ? nullptr : &found->second;
}

std::int64_t TensorIndex::bytes() const {
  return std::accumulate(files_.begin(), files_.end(), std::int64_t{0},
                         [](std::int64_t sum, const auto& file) { return sum + file.bytes; });
}

fs::path TensorIndex::rank_file(const fs::path& folder, int rank) {
  return folder / fmt::format("rank-{:05}.safetensors", rank);
}

bool TensorIndex::is_checkpoint(const fs::path& folder) { return fs::is_regular_file(folder / kIndexFile); }

TensorIndex TensorIndex::open(const fs::path& path) {
  TensorIndex index;
  index.path_ = path;
  FSDP_CHECK(fs::exists(path), UsageError, "there is no checkpoint {}", path.string());
  if (!fs::is_directory(path)) {
    index.add_plain_file(path, nullptr);
  } else if (is_checkpoint(path)) {
    index.read_checkpoint();
  } else if (fs::is_regular_file(path / kPlainIndex)) {
    std::map<std::string, std::vector<std::string>> names_of_file;
    const json value = read_json(path / kPlainIndex);
    try {
      for (const auto& [name, file] : value.at("weight_map").items())
        names_of_file[file.get<std::string>()].push_back(name);
    } catch (const json::exception& error) {
      detail::fail<UsageError>("{}: no map of weights: {}", (path / kPlainIndex).string(), error.what());
    }
    for (const auto& [file, names] : names_of_file) index.add_plain_file(path / file, &names);
  } else {
    FSDP_CHECK(fs::exists(path / kPlainFile), UsageError,
               "{} is no checkpoint: it has no {} (a save that did not end?), and neither {} nor {}", path.string(),
               kIndexFile, kPlainFile, kPlainIndex);
    index.add_plain_file(path / kPlainFile, nullptr);
  }
  index.check_pieces();
  std::string text;
  for (const auto& [key, tensor] : index.tensors_) text += key + to_json(tensor).dump();
  index.fingerprint_ = fsdp::fingerprint(text);
  return index;
}

void TensorIndex::read_checkpoint() {
  const fs::path file = path_ / kIndexFile;
  const json value = read_json(file);
  try {
    FSDP_CHECK(value.at("format") == kFormat, UsageError, "{} is not the index of a checkpoint", file.string());
    FSDP_CHECK(value.at("version") == kVersion, UsageError,
               "{} has version {} of the format, this library reads version {}", file.string(),
               value.at("version").dump(), kVersion);
    ranks_ = value.at("ranks");
    attributes_ = value.at("attributes").get<std::map<std::string, std::string>>();
    for (const auto& item : value.at("files"))
      files_.push_back({path_ / item.at("name").get<std::string>(), item.at("bytes").get<std::int64_t>()});
    for (const auto& [key, tensor] : value.at("tensors").items()) tensors_.emplace(key, tensor_of(tensor));
  } catch (const json::exception& error) {
    detail::fail<UsageError>("{} is damaged: {}", file.string(), error.what());
  }
  check_files();
}

void TensorIndex::add_plain_file(const fs::path& path, const std::vector<std::string>* names) {
  const auto header = read_safetensors_header(path);
  const auto format = header.metadata.find("format");
  FSDP_CHECK(format == header.metadata.end() || format->second != kPiecesFormat, UsageError,
             "{} is what one rank wrote of a checkpoint: name the folder", path.string());
  const int file = static_cast<int>(files_.size());
  files_.push_back({path, static_cast<std::int64_t>(fs::file_size(path))});
  std::set<std::string> wanted;
  if (names != nullptr) wanted.insert(names->begin(), names->end());
  for (const auto& entry : header.entries) {
    if (names != nullptr && wanted.erase(entry.name) == 0) continue;
    StoredTensor tensor{.dtype = entry.dtype, .sizes = entry.sizes, .strides = row_major_strides(entry.sizes)};
    if (tensor.elements() > 0) tensor.pieces.push_back({file, entry.begin, {0, tensor.elements()}, {}});
    FSDP_CHECK(tensors_.emplace("weights/" + entry.name, std::move(tensor)).second, UsageError,
               "{}: tensor \"{}\" is there twice", path.string(), entry.name);
  }
  FSDP_CHECK(wanted.empty(), UsageError, "{} lacks tensor \"{}\", which {} says is there", path.string(),
             *wanted.begin(), kPlainIndex);
}

void TensorIndex::check_files() const {
  for (const auto& file : files_) {
    std::error_code error;
    const auto bytes = fs::file_size(file.path, error);
    FSDP_CHECK(!error, UsageError, "{} is missing: the checkpoint {} has {} files and needs them all",
               file.path.string(), path_.string(), files_.size());
    FSDP_CHECK(static_cast<std::int64_t>(bytes) == file.bytes, UsageError,
               "{} has {} bytes, the index says {}: the file was cut short or replaced", file.path.string(), bytes,
               file.bytes);
  }
}

void TensorIndex::check_pieces() {
  for (auto& [key, tensor] : tensors_) {
    sort_pieces(tensor);
    const std::int64_t width = element_bytes(tensor.dtype);
    FSDP_CHECK(width > 0, UsageError, "{}: \"{}\" has the unknown dtype \"{}\"", path_.string(), key, tensor.dtype);
    FSDP_CHECK(are_dense(tensor), UsageError, "{} is damaged: \"{}\" has impossible sizes or strides", path_.string(),
               key);
    std::int64_t end = 0;
    for (const auto& piece : tensor.pieces) {
      FSDP_CHECK(piece.elements.begin == end && !piece.elements.empty(), UsageError,
                 "{}: \"{}\" lacks elements {} to {}, or has them twice", path_.string(), key,
                 std::min(end, piece.elements.begin), std::max(end, piece.elements.begin));
      end = piece.elements.end;
      FSDP_CHECK(piece.file >= 0 && piece.file < static_cast<int>(files_.size()) && piece.offset >= 0 &&
                     piece.elements.length() <= files_[piece.file].bytes / width &&
                     piece.offset <= files_[piece.file].bytes - piece.elements.length() * width,
                 UsageError, "{}: a piece of \"{}\" lies outside of its file", path_.string(), key);
    }
    FSDP_CHECK(end == tensor.elements() || (tensor.elements() == 0 && end == 0), UsageError,
               "{}: \"{}\" lacks elements {} to {}", path_.string(), key, end, tensor.elements());
  }
}

void TensorIndex::describe_rank(const fs::path& folder, int rank, std::int64_t bytes,
                                const std::map<std::string, StoredTensor>& tensors) {
  json described = json::object();
  for (const auto& [key, tensor] : tensors) described[key] = to_json(tensor);
  write_json(rank_description(folder, rank), {{"bytes", bytes}, {"tensors", std::move(described)}});
}

void TensorIndex::write(const fs::path& folder, int ranks, const std::map<std::string, std::string>& attributes) {
  TensorIndex index;
  index.path_ = folder;
  for (int rank = 0; rank < ranks; ++rank) {
    const fs::path file = rank_file(folder, rank), description = rank_description(folder, rank);
    FSDP_CHECK(fs::exists(file) && fs::exists(description), Error,
               "rank {} has written its file, and rank 0 does not see it: {} must be one folder for all ranks", rank,
               folder.string());
    const json value = read_json(description);  // ours, a moment old
    index.files_.push_back({file, value.at("bytes").get<std::int64_t>()});
    for (const auto& [key, item] : value.at("tensors").items()) {
      StoredTensor part = tensor_of(item);
      for (auto& piece : part.pieces) piece.file = rank;
      const auto [place, fresh] = index.tensors_.try_emplace(key, part);
      if (fresh) continue;
      StoredTensor& whole = place->second;
      FSDP_CHECK(whole.sizes == part.sizes && whole.dtype == part.dtype && whole.strides == part.strides, Error,
                 "rank {} has other sizes or another dtype of \"{}\" than a rank before it: two modules of one name?",
                 rank, key);
      whole.pieces.insert(whole.pieces.end(), part.pieces.begin(), part.pieces.end());
    }
  }
  index.check_files();
  index.check_pieces();
  json files = json::array(), tensors = json::object();
  for (const auto& file : index.files_)
    files.push_back({{"name", file.path.filename().string()}, {"bytes", file.bytes}});
  for (const auto& [key, tensor] : index.tensors_) tensors[key] = to_json(tensor);
  write_json(folder / kIndexFile, {{"format", kFormat},
                                   {"version", kVersion},
                                   {"ranks", ranks},
                                   {"attributes", attributes},
                                   {"files", std::move(files)},
                                   {"tensors", std::move(tensors)}});
  for (int rank = 0; rank < ranks; ++rank) fs::remove(rank_description(folder, rank));
}

}  // namespace fsdp::checkpoint
