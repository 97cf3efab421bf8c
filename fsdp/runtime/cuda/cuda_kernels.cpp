#include "fsdp/runtime/cuda/cuda_kernels.h"

#include <c10/cuda/CUDAStream.h>
#include <nvrtc.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "fsdp/runtime/cuda/cuda_check.h"
#include "fsdp/runtime/cuda/kernel_source.h"
#include "fsdp/runtime/cuda/model_kernel_source.h"
#include "fsdp/runtime/cuda/optimizer_kernel_source.h"

namespace fsdp::cuda {
namespace {

constexpr int kThreads = 256, kElements = 8;  // a thread handles so many at a time
constexpr int kBlocksPerMultiprocessor = 8;
constexpr std::int64_t kMostRows = 32768;
constexpr std::size_t kPackEntries = 64, kAdamWPieces = 40, kNormPieces = 64;

// As in kernel_source.h.
struct DevicePackEntry {
  const void* from;
  void* to;
  std::int64_t count, first_edge, edge_distance;
  int from_dtype, action;
};
struct DevicePackArguments {
  DevicePackEntry entry[kPackEntries];
};
struct DeviceAdamWPiece {
  void *weight, *first, *second;
  float* step;
  const void* gradient;
  void* low;
  std::int64_t count;
  float scale, decay;
  int weight_dtype, gradient_dtype, low_dtype, unused;
};
struct DeviceAdamWArguments {
  DeviceAdamWPiece piece[kAdamWPieces];
};
struct DeviceNormPiece {
  const void* data;
  std::int64_t count;
  int dtype, unused;
};
struct DeviceNormArguments {
  DeviceNormPiece piece[kNormPieces];
};
struct DeviceRotation {
  const void* x;
  void* out;
  const void *cosine, *sine;
  std::int64_t batch_stride, position_stride, head_stride, positions, heads, width, rows;
  int dtype;
  float sign;
};
static_assert(sizeof(DevicePackArguments) <= 4000 && sizeof(DeviceAdamWArguments) <= 4000);

int code(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::kFloat:
      return 0;
    case c10::kBFloat16:
      return 1;
    case c10::kHalf:
      return 2;
    case c10::kDouble:
      return 3;
    default:
      detail::fail<UsageError>("gradients cannot be {}: expected Float, Double, BFloat16 or Half",
                               c10::toString(dtype));
  }
}

// 1 / divisor where multiplying by it gives the bits of a division: of powers of two. Else 0.
float exact_inverse(float divisor) {
  int exponent = 0;
  return std::frexp(divisor, &exponent) == 0.5f && std::abs(exponent) < 100 ? 1 / divisor : 0;
}

std::vector<char> compile(int major, int minor) {
  nvrtcProgram program = nullptr;
  const auto check = [&](nvrtcResult result, const char* what) {
    if (result == NVRTC_SUCCESS) return;
    std::string log;
    std::size_t size = 0;
    if (program != nullptr && nvrtcGetProgramLogSize(program, &size) == NVRTC_SUCCESS && size > 1) {
      log.resize(size);
      nvrtcGetProgramLog(program, log.data());
    }
    detail::fail<Error>("NVRTC: {} of the library's kernels failed: {}\n{}", what, nvrtcGetErrorString(result), log);
  };
  const std::string source = std::string(kKernelSource) + kOptimizerKernelSource + kModelKernelSource;
  check(nvrtcCreateProgram(&program, source.c_str(), "fsdp_kernels.cu", 0, nullptr, nullptr), "creation");
  const std::string architecture = fmt::format("--gpu-architecture=sm_{}{}", major, minor);
  // No contraction: sums are the same as the host's.
  const char* options[] = {architecture.c_str(), "--std=c++17", "--fmad=false"};
  check(nvrtcCompileProgram(program, 3, options), "compilation");
  std::size_t size = 0;
  check(nvrtcGetCUBINSize(program, &size), "size");
  std::vector<char> binary(size);
  check(nvrtcGetCUBIN(program, binary.data()), "reading");
  nvrtcDestroyProgram(&program);
  return binary;
}

class CudaKernels final : public Kernels {
 public:
  CudaKernels() {
    int device = 0, major = 0, minor = 0;
    FSDP_CUDA_CHECK(cudaGetDevice(&device));
    FSDP_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    FSDP_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    FSDP_CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount, device));
    binary_ = compile(major, minor);
    FSDP_CUDA_CHECK(cudaLibraryLoadData(&library_, binary_.data(), nullptr, nullptr, 0, nullptr, nullptr, 0));
    scaled_sum_ = find("fsdp_scaled_sum");
    scaled_sum_double_ = find("fsdp_scaled_sum_double");
    sum_of_parts_ = find("fsdp_sum_of_parts");
    meet_ = find("fsdp_meet");
    pack_ = find("fsdp_pack");
    adamw_ = find("fsdp_adamw");
    adamw_count_ = find("fsdp_adamw_count");
    squares_ = find("fsdp_squares");
    norms_ = find("fsdp_norms");
    swiglu_forward_ = find("fsdp_swiglu_forward");
    swiglu_backward_ = find("fsdp_swiglu_backward");
    rotate_ = find("fsdp_rotate");
    entropy_forward_ = find("fsdp_cross_entropy_forward");
    entropy_backward_ = find("fsdp_cross_entropy_backward");
    spin_ = find("fsdp_spin");
    // A block that takes all of a multiprocessor's shared memory shares it with no product.
    FSDP_CUDA_CHECK(cudaDeviceGetAttribute(&shared_memory_, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    FSDP_CUDA_CHECK(cudaFuncSetAttribute(spin_, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_memory_));
    load();
  }

  ~CudaKernels() override { cudaLibraryUnload(library_); }

  void scaled_sum(const ScaledSum& a) override {
    if (a.count == 0) return;
    const bool wide = a.destination_dtype == c10::kDouble || a.source_dtype == c10::kDouble;
    void* destination = a.destination;
    const void* source = a.source;
    int destination_dtype = code(a.destination_dtype), source_dtype = code(a.source_dtype), overwrite = a.overwrite;
    std::int64_t count = a.count;
    float divisor = static_cast<float>(a.divisor), inverse = exact_inverse(divisor);
    double wide_divisor = a.divisor;
    if (wide) {
      void* arguments[] = {&destination, &destination_dtype, &source, &source_dtype, &count, &wide_divisor, &overwrite};
      launch(scaled_sum_double_, dim3(blocks(count, 1)), arguments);
      return;
    }
    void* arguments[] = {&destination, &destination_dtype, &source,  &source_dtype,
                         &count,       &divisor,           &inverse, &overwrite};
    launch(scaled_sum_, dim3(blocks(count, kElements)), arguments);
  }

  void sum_of_parts(const SumOfParts& a) override {
    if (a.count == 0) return;
    FSDP_INVARIANT(a.dtype != c10::kDouble && a.destination_dtype != c10::kDouble);
    SumOfParts s = a;
    int destination_dtype = code(a.destination_dtype), dtype = code(a.dtype), overwrite = a.overwrite;
    float divisor = static_cast<float>(a.divisor), inverse = exact_inverse(divisor);
    void* arguments[] = {&s.destination, &destination_dtype, &s.own,   &s.others, &dtype,    &s.count,
                         &s.parts,       &s.own_part,        &divisor, &inverse,  &overwrite};
    launch(sum_of_parts_, dim3(blocks(s.count, kElements)), arguments);
  }

  void meet(const Meeting& meeting) override {
    FSDP_INVARIANT(meeting.size <= Meeting::kMost);
    Meeting m = meeting;
    void* arguments[] = {&m};
    FSDP_CUDA_CHECK(cudaLaunchKernel(meet_, dim3(1), dim3(Meeting::kMost), arguments, 0,
                                     c10::cuda::getCurrentCUDAStream().stream()));
  }

  void pack(std::span<const PackEntry> entries, c10::ScalarType dtype) override {
    int to_dtype = code(dtype);
    for (std::size_t begin = 0; begin < entries.size(); begin += kPackEntries) {
      const auto some = entries.subspan(begin, std::min(kPackEntries, entries.size() - begin));
      DevicePackArguments device{};
      std::int64_t most = 1;
      for (std::size_t i = 0; i < some.size(); ++i) {
        const PackEntry& e = some[i];
        device.entry[i] = {e.from,
                           e.to,
                           e.count,
                           e.first_edge,
                           std::max<std::int64_t>(1, e.edge_distance),
                           e.from == nullptr ? 0 : code(e.from_dtype),
                           static_cast<int>(e.action)};
        const bool marks_only = e.action == PackEntry::Action::mark_used;
        most = std::max(most, marks_only ? std::int64_t{1} : e.count);
      }
      void* arguments[] = {&device, &to_dtype};
      launch(pack_, dim3(blocks(most, kElements), static_cast<unsigned>(some.size())), arguments);
    }
  }

  void adamw(std::span<const AdamWPiece> pieces, const AdamWStep& step) override {
    const float *learning_rate = step.learning_rate, *skip = step.skip, *gradient_scale = step.gradient_scale;
    double beta1 = step.beta1, beta2 = step.beta2;
    float epsilon = static_cast<float>(step.epsilon);
    int marks = step.heed_marks ? 1 : 0;
    for (std::size_t begin = 0; begin < pieces.size(); begin += kAdamWPieces) {
      const auto some = pieces.subspan(begin, std::min(kAdamWPieces, pieces.size() - begin));
      DeviceAdamWArguments device{};
      std::int64_t most = 1;
      for (std::size_t i = 0; i < some.size(); ++i) {
        const AdamWPiece& p = some[i];
        device.piece[i] = {p.weight,
                           p.first_moment,
                           p.second_moment,
                           p.step,
                           p.gradient,
                           p.low_precision,
                           p.count,
                           p.learning_rate_scale,
                           p.weight_decay,
                           code(p.weight_dtype),
                           code(p.gradient_dtype),
                           code(p.low_precision_dtype),
                           0};
        most = std::max(most, p.count);
      }
      void* arguments[] = {&device, &learning_rate, &skip, &marks, &beta1, &beta2, &epsilon, &gradient_scale};
      launch(adamw_, dim3(blocks(most, kElements), static_cast<unsigned>(some.size())), arguments);
      int count = static_cast<int>(some.size());
      void* count_arguments[] = {&device, &count, &skip, &marks};
      launch(adamw_count_, dim3(1), count_arguments);
    }
  }

  void norms(std::span<const NormPiece> pieces, float* scratch, float* norms) override {
    for (std::size_t begin = 0; begin < pieces.size(); begin += kNormPieces) {
      const auto some = pieces.subspan(begin, std::min(kNormPieces, pieces.size() - begin));
      DeviceNormArguments device{};
      std::int64_t most = 1;
      for (std::size_t i = 0; i < some.size(); ++i) {
        FSDP_INVARIANT(some[i].dtype != c10::kDouble);
        device.piece[i] = {some[i].data, some[i].count, code(some[i].dtype), 0};
        most = std::max(most, some[i].count);
      }
      const unsigned across = blocks(most, kElements), count = static_cast<unsigned>(some.size());
      void* squares[] = {&device, &scratch};
      launch(squares_, dim3(across, count), squares);
      int across_argument = static_cast<int>(across);
      float* to = norms + begin;
      void* sums[] = {&scratch, &across_argument, &to};
      launch(norms_, dim3(count), sums);
    }
  }
  [[nodiscard]] std::int64_t norm_scratch(std::size_t pieces) const override {
    return static_cast<std::int64_t>(std::min(kNormPieces, pieces)) * multiprocessors_ * kBlocksPerMultiprocessor;
  }

  void swiglu_forward(const SwiGlu& s) override {
    if (s.count == 0) return;
    SwiGlu a = s;
    int dtype = code(s.dtype);
    void* arguments[] = {&a.gate, &a.up, &a.out, &dtype, &a.count};
    launch(swiglu_forward_, dim3(all_blocks(s.count, kElements)), arguments);
  }
  void swiglu_backward(const SwiGlu& s) override {
    if (s.count == 0) return;
    SwiGlu a = s;
    int dtype = code(s.dtype);
    void* arguments[] = {&a.gradient, &a.gate, &a.up, &a.gate_gradient, &a.up_gradient, &dtype, &a.count};
    launch(swiglu_backward_, dim3(all_blocks(s.count, kElements)), arguments);
  }
  void rotate(const Rotation& r) override {
    const std::int64_t rows = r.batches * r.positions * r.heads;
    if (rows == 0 || r.width == 0) return;
    DeviceRotation device{
        r.x,         r.out,   r.cosine, r.sine, r.batch_stride, r.position_stride,        r.head_stride,
        r.positions, r.heads, r.width,  rows,   code(r.dtype),  r.backward ? -1.0f : 1.0f};
    void* arguments[] = {&device};
    const std::int64_t chunks = (r.width / 2 + kElements - 1) / kElements;
    FSDP_INVARIANT(rows * chunks < std::int64_t{1} << 32);
    launch(rotate_, dim3(all_blocks(rows * chunks, 1)), arguments);
  }

  void cross_entropy_forward(const CrossEntropy& c) override {
    if (c.rows == 0) return;
    int dtype = code(c.dtype);
    CrossEntropy a = c;
    void* arguments[] = {&a.logits, &dtype, &a.columns, &a.targets, &a.log_sums, &a.losses};
    launch(entropy_forward_, dim3(static_cast<unsigned>(c.rows)), arguments);
  }

  void cross_entropy_backward(const CrossEntropy& c) override {
    if (c.rows == 0) return;
    int dtype = code(c.dtype);
    CrossEntropy a = c;
    void* arguments[] = {&a.logits, &dtype, &a.columns, &a.targets, &a.log_sums, &a.scale};
    const auto across = (c.columns + kThreads * kElements - 1) / (kThreads * kElements);
    for (std::int64_t row = 0; row < c.rows; row += kMostRows) {  // a grid has at most so many in its second dimension
      const auto rows = std::min(kMostRows, c.rows - row);
      launch(entropy_backward_, dim3(static_cast<unsigned>(across), static_cast<unsigned>(rows)), arguments);
      a.logits =
          static_cast<std::byte*>(a.logits) + rows * c.columns * static_cast<std::int64_t>(c10::elementSize(c.dtype));
      a.targets += rows;
      a.log_sums += rows;
    }
  }

  void spin(std::int64_t nanoseconds, int blocks) override {
    if (nanoseconds <= 0 || blocks <= 0) return;
    void* arguments[] = {&nanoseconds};
    FSDP_CUDA_CHECK(cudaLaunchKernel(spin_, dim3(static_cast<unsigned>(blocks)), dim3(32), arguments,
                                     static_cast<std::size_t>(shared_memory_),
                                     c10::cuda::getCurrentCUDAStream().stream()));
  }

 private:
  [[nodiscard]] const void* find(const char* name) const {
    cudaKernel_t kernel = nullptr;
    FSDP_CUDA_CHECK(cudaLibraryGetKernel(&kernel, library_, name));
    return reinterpret_cast<const void*>(kernel);
  }

  // CUDA loads a kernel at its first launch.
  void load() {
    void* nothing = nullptr;
    int dtype = 0;
    std::int64_t count = 0;
    float one = 1;
    double wide_one = 1;
    void* sum[] = {&nothing, &dtype, &nothing, &dtype, &count, &one, &one, &dtype};
    launch(scaled_sum_, dim3(1), sum);
    void* wide_sum[] = {&nothing, &dtype, &nothing, &dtype, &count, &wide_one, &dtype};
    launch(scaled_sum_double_, dim3(1), wide_sum);
    void* parts[] = {&nothing, &dtype, &nothing, &nothing, &dtype, &count, &dtype, &dtype, &one, &one, &dtype};
    launch(sum_of_parts_, dim3(1), parts);
    DevicePackArguments entries{};
    entries.entry[0].action = static_cast<int>(PackEntry::Action::clear);
    void* pack[] = {&entries, &dtype};
    launch(pack_, dim3(1), pack);
    DeviceAdamWArguments pieces{};
    void* adamw[] = {&pieces, &nothing, &nothing, &dtype, &wide_one, &wide_one, &one, &nothing};
    launch(adamw_, dim3(1), adamw);
    void* counted[] = {&pieces, &dtype, &nothing, &dtype};
    launch(adamw_count_, dim3(1), counted);
    DeviceNormArguments no_pieces{};
    float* none = nullptr;
    void* swiglu[] = {&nothing, &nothing, &nothing, &dtype, &count};
    launch(swiglu_forward_, dim3(1), swiglu);
    void* swiglu_back[] = {&nothing, &nothing, &nothing, &nothing, &nothing, &dtype, &count};
    launch(swiglu_backward_, dim3(1), swiglu_back);
    DeviceRotation no_rows{};
    no_rows.heads = no_rows.positions = no_rows.width = 2;
    void* rotation[] = {&no_rows};
    launch(rotate_, dim3(1), rotation);
    const std::int64_t* no_targets = nullptr;
    // No columns: the forward kernel still writes one row's results, the backward one nothing.
    void* row = nullptr;
    FSDP_CUDA_CHECK(cudaMalloc(&row, 64));
    FSDP_CUDA_CHECK(cudaMemset(row, 0xff, 64));  // a target of -1
    no_targets = static_cast<const std::int64_t*>(row);
    none = reinterpret_cast<float*>(static_cast<std::byte*>(row) + 32);
    void* entropy[] = {&nothing, &dtype, &count, &no_targets, &none, &none};
    launch(entropy_forward_, dim3(1), entropy);
    launch(entropy_backward_, dim3(1), entropy);
    void* squares[] = {&no_pieces, &none};
    launch(squares_, dim3(1), squares);
    int one_block = 1;
    void* norm[] = {&none, &one_block, &none};
    launch(norms_, dim3(1), norm);
    meet({.count = static_cast<std::uint32_t*>(row)});  // of one rank
    FSDP_CUDA_CHECK(cudaStreamSynchronize(c10::cuda::getCurrentCUDAStream().stream()));
    FSDP_CUDA_CHECK(cudaFree(row));
    void* spin[] = {&count};
    FSDP_CUDA_CHECK(cudaLaunchKernel(spin_, dim3(1), dim3(32), spin, static_cast<std::size_t>(shared_memory_),
                                     c10::cuda::getCurrentCUDAStream().stream()));
    FSDP_CUDA_CHECK(cudaStreamSynchronize(c10::cuda::getCurrentCUDAStream().stream()));
  }

  [[nodiscard]] unsigned blocks(std::int64_t count, int per_thread) const {
    const std::int64_t needed = (count + kThreads * per_thread - 1) / (kThreads * per_thread);
    return static_cast<unsigned>(
        std::clamp<std::int64_t>(needed, 1, std::int64_t{multiprocessors_} * kBlocksPerMultiprocessor));
  }

  [[nodiscard]] static unsigned all_blocks(std::int64_t count, int per_thread) {
    return static_cast<unsigned>((count + std::int64_t{kThreads} * per_thread - 1) /
                                 (std::int64_t{kThreads} * per_thread));
  }

  static void launch(const void* kernel, dim3 grid, void** arguments) {
    FSDP_CUDA_CHECK(
        cudaLaunchKernel(kernel, grid, dim3(kThreads), arguments, 0, c10::cuda::getCurrentCUDAStream().stream()));
  }

  std::vector<char> binary_;
  cudaLibrary_t library_ = nullptr;
  int multiprocessors_ = 1, shared_memory_ = 0;
  const void *scaled_sum_, *scaled_sum_double_, *sum_of_parts_, *meet_, *pack_, *adamw_, *adamw_count_, *squares_,
      *norms_, *swiglu_forward_, *swiglu_backward_, *rotate_, *entropy_forward_, *entropy_backward_, *spin_;
};

}  // namespace

std::unique_ptr<Kernels> make_kernels() { return std::make_unique<CudaKernels>(); }

}  // namespace fsdp::cuda
