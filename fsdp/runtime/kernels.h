// The library's own device kernels: arithmetic on flat buffers that LibTorch has no single operator for.
//
// Each call launches on the calling thread's current stream and returns. Pointers are device memory that stays until
// the stream has passed the call. Dtypes: Float, BFloat16, Half, Double.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <span>

namespace fsdp {

// destination (+)= source / divisor. A real value never becomes -0, the mark of "no rank used it"
// (dbuffer/accumulate.h), and -0 stays -0 unless something is added to it.
struct ScaledSum {
  void* destination = nullptr;
  c10::ScalarType destination_dtype = c10::kFloat;
  const void* source = nullptr;
  c10::ScalarType source_dtype = c10::kFloat;
  std::int64_t count = 0;  // elements
  double divisor = 1;
  bool overwrite = false;
};

// destination (+)= (the sum of all parts, from the first on, in fp32, rounded to `dtype`) / divisor. What is -0 in all
// parts stays so unless something is added to it; no other sum becomes -0. Neither dtype may be Double.
struct SumOfParts {
  void* destination = nullptr;  // may be `own`
  c10::ScalarType destination_dtype = c10::kFloat;
  const void* own = nullptr;            // this rank's part
  const void* others = nullptr;         // the other parts, packed in order
  c10::ScalarType dtype = c10::kFloat;  // of the parts
  std::int64_t count = 0;               // elements a part
  int parts = 1, own_part = 0;          // how many, and which of them `own` is
  double divisor = 1;
  bool overwrite = true;
};

// A meeting of the ranks of one host on their streams, by a kernel: for graphs, where a stream's own waits for a value
// would keep the value of the recording.
struct Meeting {
  static constexpr int kMost = 32;        // ranks
  std::uint32_t* count = nullptr;         // meetings by this kernel so far, on this rank
  std::uint32_t* own_flags = nullptr;     // [rank] written by that rank
  std::uint32_t* peer_flags[kMost] = {};  // [rank] where this rank writes to that one
  int rank = 0, size = 1;
};

// One piece of work on a buffer of gradients that is being packed.
struct PackEntry {
  enum class Action : std::int32_t {
    copy,         // from `from`, -0 becomes +0
    add,          // of `from` to what is there
    mark_used,    // -0 becomes +0 at element 0 and at first_edge + k * edge_distance
    fill_unused,  // with -0
    clear,        // with 0
  };
  Action action = Action::copy;
  void* to = nullptr;
  const void* from = nullptr;  // dense, in the order of `to`
  c10::ScalarType from_dtype = c10::kFloat;
  std::int64_t count = 0;  // elements
  std::int64_t first_edge = 0, edge_distance = 1;
};

// A piece of a parameter that AdamW updates. Weight and moments have `weight_dtype`.
struct AdamWPiece {
  void* weight = nullptr;
  void* first_moment = nullptr;
  void* second_moment = nullptr;
  float* step = nullptr;  // updates so far; the kernel counts this one
  const void* gradient = nullptr;
  void* low_precision = nullptr;  // the new weight rounded; null: none wanted
  std::int64_t count = 0;         // elements
  float learning_rate_scale = 1, weight_decay = 0;
  c10::ScalarType weight_dtype = c10::kFloat, gradient_dtype = c10::kFloat, low_precision_dtype = c10::kBFloat16;
};

struct AdamWStep {
  const float* learning_rate = nullptr;   // on the device, so that a captured step can change it
  const float* skip = nullptr;            // on the device, 1: nothing changes; null: never
  const float* gradient_scale = nullptr;  // on the device, what gradients are multiplied by; null: 1
  // A gradient whose first element is -0 leaves its piece alone. For captured steps: elsewhere unused gradients are
  // undefined, and arithmetic of the user's may make -0.
  bool heed_marks = false;
  double beta1 = 0.9, beta2 = 0.999, epsilon = 1e-8;
};

// A piece of a gradient whose norm is asked for.
struct NormPiece {
  const void* data = nullptr;
  std::int64_t count = 0;  // elements
  c10::ScalarType dtype = c10::kFloat;
};

// Elementwise gate * sigmoid(gate) * up, dense, in fp32 and rounded once; and its gradients.
struct SwiGlu {
  const void* gate = nullptr;
  const void* up = nullptr;
  c10::ScalarType dtype = c10::kBFloat16;  // not Double, of all
  std::int64_t count = 0;                  // elements
  void* out = nullptr;                     // forward
  const void* gradient = nullptr;          // of out; backward
  void* gate_gradient = nullptr;
  void* up_gradient = nullptr;
};

// Heads turned by rotary positions: of each, element i with element i + width / 2. The tables are (positions, width),
// the sine's first half negative. Backward is the same with the sign turned.
struct Rotation {
  const void* x = nullptr;  // (batch, position, head, width); elements of a head lie side by side
  std::int64_t batch_stride = 0, position_stride = 0, head_stride = 0;  // elements
  void* out = nullptr;                                                  // the same, dense
  const void* cosine = nullptr;
  const void* sine = nullptr;
  c10::ScalarType dtype = c10::kBFloat16;  // not Double, of all
  std::int64_t batches = 0, positions = 0, heads = 0, width = 0;
  bool backward = false;
};

// Cross entropy of rows of logits, in one reading of them.
struct CrossEntropy {
  void* logits = nullptr;  // [rows, columns], dense
  c10::ScalarType dtype = c10::kBFloat16;
  std::int64_t rows = 0, columns = 0;
  const std::int64_t* targets = nullptr;  // [rows]; negative ones count for nothing
  float* log_sums = nullptr;              // [rows] logarithm of the sum of exponentials: forward writes, backward reads
  float* losses = nullptr;                // [rows], forward only
  const float* scale = nullptr;           // one number on the device, backward only: of every row's gradient
};

class Kernels {
 public:
  virtual ~Kernels() = default;
  virtual void scaled_sum(const ScaledSum& arguments) = 0;
  virtual void sum_of_parts(const SumOfParts& arguments) = 0;
  virtual void meet(const Meeting& arguments) = 0;  // what was on the stream before is visible to those who were there
  // All entries write to memory of `dtype`; they do not overlap.
  virtual void pack(std::span<const PackEntry> entries, c10::ScalarType dtype) = 0;
  virtual void adamw(std::span<const AdamWPiece> pieces, const AdamWStep& step) = 0;
  // norms[piece] = the 2-norm of each, in an order of its own that is the same in every run. `scratch` has room for
  // norm_scratch(pieces) numbers. No Double.
  virtual void norms(std::span<const NormPiece> pieces, float* scratch, float* norms) = 0;
  [[nodiscard]] virtual std::int64_t norm_scratch(std::size_t pieces) const = 0;
  virtual void swiglu_forward(const SwiGlu& arguments) = 0;
  virtual void swiglu_backward(const SwiGlu& arguments) = 0;
  virtual void rotate(const Rotation& arguments) = 0;
  virtual void cross_entropy_forward(const CrossEntropy& arguments) = 0;
  virtual void cross_entropy_backward(const CrossEntropy& arguments) = 0;  // logits become their gradients
  // Keeps `blocks` multiprocessors busy for so long; for tests and models of communication.
  virtual void spin(std::int64_t nanoseconds, int blocks) = 0;
};

}  // namespace fsdp
