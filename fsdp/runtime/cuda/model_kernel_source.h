// CUDA C++ of parts of models; after kernel_source.h and optimizer_kernel_source.h in one program.
#pragma once

namespace fsdp::cuda {

inline constexpr const char* kModelKernelSource = R"cuda(
// `vector`: all pointers are aligned to eight elements.
__device__ inline void read8(const void* p, int dtype, i64 i, i64 n, bool vector, float* v) {
  if (vector && n - i >= 8) load8(p, dtype, i, v);
  else for (int k = 0; k < 8; ++k) v[k] = i + k < n ? load1(p, dtype, i + k) : 0.0f;
}
__device__ inline void write8(void* p, int dtype, i64 i, i64 n, bool vector, const float* v) {
  if (vector && n - i >= 8) store8_any(p, dtype, i, v);
  else for (int k = 0; k < 8 && i + k < n; ++k) store1(p, dtype, i + k, v[k], true);
}
__device__ inline float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

// out = gate * sigmoid(gate) * up
extern "C" __global__ void fsdp_swiglu_forward(const void* gate, const void* up, void* out, int dtype, i64 n) {
  bool vector = aligned8(gate) && aligned8(up) && aligned8(out);
  i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * 8;
  if (i >= n) return;
  float g[8], u[8];
  read8(gate, dtype, i, n, vector, g);
  read8(up, dtype, i, n, vector, u);
  for (int k = 0; k < 8; ++k) u[k] *= g[k] * sigmoid(g[k]);
  write8(out, dtype, i, n, vector, u);
}

extern "C" __global__ void fsdp_swiglu_backward(const void* gradient, const void* gate, const void* up, void* gate_gradient,
                                                void* up_gradient, int dtype, i64 n) {
  bool vector = aligned8(gradient) && aligned8(gate) && aligned8(up) && aligned8(gate_gradient) && aligned8(up_gradient);
  i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * 8;
  if (i >= n) return;
  float d[8], g[8], u[8];
  read8(gradient, dtype, i, n, vector, d);
  read8(gate, dtype, i, n, vector, g);
  read8(up, dtype, i, n, vector, u);
  for (int k = 0; k < 8; ++k) {
    float s = sigmoid(g[k]), dk = d[k];
    d[k] = dk * u[k] * s * (1.0f + g[k] * (1.0f - s));
    u[k] = dk * g[k] * s;
  }
  write8(gate_gradient, dtype, i, n, vector, d);
  write8(up_gradient, dtype, i, n, vector, u);
}

struct Rotation {
  const void* x; void* out; const void* cosine; const void* sine;
  i64 batch_stride, position_stride, head_stride;
  i64 positions, heads, width, rows;
  int dtype; float sign;
};

// A thread turns eight pairs (i, i + width / 2) of a head; `rows` are batches x positions x heads.
extern "C" __global__ void fsdp_rotate(const __grid_constant__ Rotation r) {
  u32 half = (u32)r.width / 2, chunks = (half + 7) / 8;  // divisions of 64 bits would take longer than the memory
  u32 t = blockIdx.x * blockDim.x + threadIdx.x;
  u32 row = t / chunks, i = (t - row * chunks) * 8;
  if (row >= r.rows) return;
  u32 place = row / (u32)r.heads, head = row - place * (u32)r.heads;
  u32 batch = place / (u32)r.positions, position = place - batch * (u32)r.positions;
  i64 bytes = element_size(r.dtype);
  const char* x = (const char*)r.x + (batch * r.batch_stride + position * r.position_stride + head * r.head_stride) * bytes;
  char* out = (char*)r.out + (i64)row * r.width * bytes;
  const char* cosine = (const char*)r.cosine + position * r.width * bytes;
  const char* sine = (const char*)r.sine + position * r.width * bytes;
  bool vector = half % 8 == 0 && aligned8(x) && aligned8(out) && aligned8(cosine) && aligned8(sine);
  float a[8], b[8], ca[8], cb[8], sa[8], sb[8];
  read8(x, r.dtype, i, half, vector, a);
  read8(x + half * bytes, r.dtype, i, half, vector, b);
  read8(cosine, r.dtype, i, half, vector, ca);
  read8(cosine + half * bytes, r.dtype, i, half, vector, cb);
  read8(sine, r.dtype, i, half, vector, sa);
  read8(sine + half * bytes, r.dtype, i, half, vector, sb);
  for (int k = 0; k < 8; ++k) {
    float low = a[k], high = b[k];
    a[k] = low * ca[k] + r.sign * high * sa[k];
    b[k] = high * cb[k] + r.sign * low * sb[k];
  }
  write8(out, r.dtype, i, half, vector, a);
  write8(out + half * bytes, r.dtype, i, half, vector, b);
}
)cuda";

}  // namespace fsdp::cuda
