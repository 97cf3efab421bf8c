// CUDA C++ of AdamW and of norms; after kernel_source.h in one program.
#pragma once

namespace fsdp::cuda {

inline constexpr const char* kOptimizerKernelSource = R"cuda(
struct AdamWPiece {
  void* weight; void* first; void* second; float* step; const void* gradient; void* low; i64 count;
  float scale; float decay; int weight_dtype; int gradient_dtype; int low_dtype; int unused_;
};
struct AdamWArguments { AdamWPiece piece[40]; };

__device__ inline bool adamw_rests(const AdamWPiece& p, const float* skip, int marks) {
  if (skip != 0 && *skip != 0.0f) return true;
  return marks && is_mark(load1(p.gradient, p.gradient_dtype, 0));
}

__device__ inline float fast_sqrt(float x) { float r; asm("sqrt.approx.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }

struct AdamWFactors { float keep, step_size, inverse_root2, b1, b2, c1, c2, epsilon, gradient_scale; };

// Few instructions, so that memory is what it waits for: contracted by hand, root and quotient within 2 ulp.
__device__ inline void adamw_element(const AdamWFactors& f, float& w, float g, float& m, float& v) {
  g *= f.gradient_scale;
  m = __fmaf_rn(f.b1, m, f.c1 * g);
  v = __fmaf_rn(f.b2, v, f.c2 * g * g);
  float denominator = __fmaf_rn(fast_sqrt(v), f.inverse_root2, f.epsilon);
  w = __fmaf_rn(-f.step_size, __fdividef(m, denominator), w * f.keep);
}

__device__ inline void store8_any(void* p, int dtype, i64 i, const float* v) {
  if (dtype == 0) {
    float4* q = (float4*)((float*)p + i);
    q[0] = make_float4(v[0], v[1], v[2], v[3]);
    q[1] = make_float4(v[4], v[5], v[6], v[7]);
  } else {
    *(uint4*)((u16*)p + i) = make_uint4(pack2(v[0], v[1], dtype), pack2(v[2], v[3], dtype), pack2(v[4], v[5], dtype),
                                        pack2(v[6], v[7], dtype));
  }
}

// Dtypes are constants where the kernel below says so.
__device__ inline void adamw_stride(const AdamWPiece& p, const AdamWFactors& f, int weight_dtype, int gradient_dtype, int low_dtype) {
  bool fast = aligned8(p.weight) && aligned8(p.first) && aligned8(p.second) && aligned8(p.gradient) && aligned8(p.low) &&
              weight_dtype != 3 && gradient_dtype != 3 && low_dtype != 3;
  i64 stride = (i64)gridDim.x * blockDim.x * 8;
  for (i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * 8; i < p.count; i += stride) {
    if (fast && p.count - i >= 8) {
      float w[8], g[8], m[8], v[8];
      load8(p.weight, weight_dtype, i, w); load8(p.gradient, gradient_dtype, i, g);
      load8(p.first, weight_dtype, i, m); load8(p.second, weight_dtype, i, v);
      for (int k = 0; k < 8; ++k) adamw_element(f, w[k], g[k], m[k], v[k]);
      store8_any(p.weight, weight_dtype, i, w);
      store8_any(p.first, weight_dtype, i, m);
      store8_any(p.second, weight_dtype, i, v);
      if (p.low != 0) store8_any(p.low, low_dtype, i, w);
    } else {
      for (i64 j = i; j < p.count && j < i + 8; ++j) {
        float w = load1(p.weight, weight_dtype, j), g = load1(p.gradient, gradient_dtype, j);
        float m = load1(p.first, weight_dtype, j), v = load1(p.second, weight_dtype, j);
        adamw_element(f, w, g, m, v);
        store1(p.weight, weight_dtype, j, w, true);
        store1(p.first, weight_dtype, j, m, true);
        store1(p.second, weight_dtype, j, v, true);
        if (p.low != 0) store1(p.low, low_dtype, j, w, true);
      }
    }
  }
}

extern "C" __global__ void fsdp_adamw(const __grid_constant__ AdamWArguments arguments, const float* learning_rate,
                                      const float* skip, int marks, double beta1, double beta2, float epsilon,
                                      const float* gradient_scale) {
  const AdamWPiece& p = arguments.piece[blockIdx.y];
  if ((i64)blockIdx.x * blockDim.x * 8 >= p.count) return;
  __shared__ float shared[3];
  if (threadIdx.x == 0) {
    double step = (double)*p.step + 1.0;
    double bias1 = 1.0 - pow(beta1, step), bias2 = 1.0 - pow(beta2, step);
    shared[0] = (float)((double)(*learning_rate * p.scale) / bias1);
    shared[1] = (float)(1.0 / sqrt(bias2));
    shared[2] = adamw_rests(p, skip, marks) ? 1.0f : 0.0f;
  }
  __syncthreads();
  if (shared[2] != 0.0f) return;
  AdamWFactors f = {1.0f - *learning_rate * p.scale * p.decay, shared[0], shared[1], (float)beta1, (float)beta2,
                    (float)(1.0 - beta1), (float)(1.0 - beta2), epsilon, gradient_scale == 0 ? 1.0f : *gradient_scale};
  if (p.weight_dtype == 0 && p.gradient_dtype == 0 && p.low_dtype == 1) adamw_stride(p, f, 0, 0, 1);
  else if (p.weight_dtype == 0 && p.gradient_dtype == 1 && p.low_dtype == 1) adamw_stride(p, f, 0, 1, 1);
  else adamw_stride(p, f, p.weight_dtype, p.gradient_dtype, p.low_dtype);
}

// After the update: counts it.
extern "C" __global__ void fsdp_adamw_count(const __grid_constant__ AdamWArguments arguments, int pieces, const float* skip, int marks) {
  int k = threadIdx.x;
  if (k < pieces && !adamw_rests(arguments.piece[k], skip, marks)) *arguments.piece[k].step += 1.0f;
}

struct NormPiece { const void* data; i64 count; int dtype; int unused_; };
struct NormArguments { NormPiece piece[64]; };

// The sum over a block, in thread 0; the same for every run.
template <class T>
__device__ inline T block_sum(T v) {
  __shared__ T sums[32];
  for (int offset = 16; offset > 0; offset >>= 1) v += __shfl_down_sync(0xffffffffu, v, offset);
  if ((threadIdx.x & 31) == 0) sums[threadIdx.x >> 5] = v;
  __syncthreads();
  v = 0;
  if (threadIdx.x == 0) for (int w = 0; w < (int)(blockDim.x >> 5); ++w) v += sums[w];
  return v;
}

// partial[piece][block]: the squares that the block adds up. All blocks of the grid write theirs.
extern "C" __global__ void fsdp_squares(const __grid_constant__ NormArguments arguments, float* partial) {
  const NormPiece& p = arguments.piece[blockIdx.y];
  i64 stride = (i64)gridDim.x * blockDim.x * 8;
  bool fast = aligned8(p.data) && p.dtype != 3;
  float sum = 0.0f;
  for (i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * 8; i < p.count; i += stride) {
    float v[8], here = 0.0f;
    int count = p.count - i < 8 ? (int)(p.count - i) : 8;
    if (fast && count == 8) load8(p.data, p.dtype, i, v);
    else for (int k = 0; k < 8; ++k) v[k] = k < count ? load1(p.data, p.dtype, i + k) : 0.0f;
    for (int k = 0; k < 8; ++k) here = __fmaf_rn(v[k], v[k], here);
    sum += here;
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) partial[(i64)blockIdx.y * gridDim.x + blockIdx.x] = sum;
}

// One block a piece: norms[piece] of what the blocks added up.
extern "C" __global__ void fsdp_norms(const float* partial, int blocks, float* norms) {
  double sum = 0;
  for (int i = threadIdx.x; i < blocks; i += blockDim.x) sum += (double)partial[(i64)blockIdx.x * blocks + i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) norms[blockIdx.x] = (float)sqrt(sum);
}
)cuda";

}  // namespace fsdp::cuda
