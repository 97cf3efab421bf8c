// CUDA C++ of the library's own kernels, compiled by NVRTC when a runtime is made (docs/kernels.md): what all of them use,
// sums, packing, cross entropy. The optimizer's and the models' follow in headers of their own, as one program.
//
// Dtype codes: 0 float, 1 bf16, 2 half, 3 double; the structs mirror those of cuda_kernels.cpp. Threads handle eight
// elements at a time where both sides are aligned to them.
#pragma once

namespace fsdp::cuda {

inline constexpr const char* kKernelSource = R"cuda(
typedef long long i64;
typedef unsigned int u32;
typedef unsigned short u16;

__device__ inline float from_bf16(u16 v) { return __uint_as_float((u32)v << 16); }
__device__ inline u16 to_bf16(float f) {
  u32 u = __float_as_uint(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return (u16)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
__device__ inline float from_half(u16 v) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v)); return f; }
__device__ inline u16 to_half(float f) { u16 v; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(v) : "f"(f)); return v; }
__device__ inline bool is_mark(float f) { return __float_as_uint(f) == 0x80000000u; }

// The value as it will be stored: rounded, and never -0 unless `mark`.
__device__ inline u16 clean16(u16 v, bool mark) { return (v == 0x8000u && !mark) ? (u16)0 : v; }

// Two values as they are stored, the first in the low half.
__device__ inline u32 pack2(float lo, float hi, int dtype) {
#if __CUDA_ARCH__ >= 800
  u32 r;
  if (dtype == 1) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
#else
  return dtype == 1 ? (u32)to_bf16(lo) | ((u32)to_bf16(hi) << 16) : (u32)to_half(lo) | ((u32)to_half(hi) << 16);
#endif
}
__device__ inline bool has_mark16(u32 w) {  // a half of it is -0
  u32 x = w ^ 0x80008000u;
  return ((x - 0x00010001u) & ~x & 0x80008000u) != 0;
}

__device__ inline float load1(const void* p, int dtype, i64 i) {
  if (dtype == 0) return ((const float*)p)[i];
  if (dtype == 1) return from_bf16(((const u16*)p)[i]);
  if (dtype == 2) return from_half(((const u16*)p)[i]);
  return (float)((const double*)p)[i];
}
__device__ inline void store1(void* p, int dtype, i64 i, float v, bool mark) {
  if (dtype == 0) ((float*)p)[i] = (is_mark(v) && !mark) ? 0.0f : v;
  else if (dtype == 1) ((u16*)p)[i] = clean16(to_bf16(v), mark);
  else if (dtype == 2) ((u16*)p)[i] = clean16(to_half(v), mark);
  else ((double*)p)[i] = (is_mark(v) && !mark) ? 0.0 : (double)v;
}
__device__ inline void load8(const void* p, int dtype, i64 i, float* out) {
  if (dtype == 0) {
    const float4* q = (const float4*)((const float*)p + i);
    float4 a = q[0], b = q[1];
    out[0] = a.x; out[1] = a.y; out[2] = a.z; out[3] = a.w; out[4] = b.x; out[5] = b.y; out[6] = b.z; out[7] = b.w;
  } else if (dtype == 3) {
    for (int k = 0; k < 8; ++k) out[k] = (float)((const double*)p)[i + k];
  } else {
    uint4 v = *(const uint4*)((const u16*)p + i);
    u32 w[4] = {v.x, v.y, v.z, v.w};
    for (int k = 0; k < 4; ++k) {
      u16 lo = (u16)(w[k] & 0xffffu), hi = (u16)(w[k] >> 16);
      out[2 * k] = dtype == 1 ? from_bf16(lo) : from_half(lo);
      out[2 * k + 1] = dtype == 1 ? from_bf16(hi) : from_half(hi);
    }
  }
}
// `marks`: called where something would become -0, which is rare; bit k: v[k] may.
template <class Marks>
__device__ inline void store8(void* p, int dtype, i64 i, const float* v, Marks marks) {
  if (dtype == 0) {
    float c[8];
    bool any = false;
    for (int k = 0; k < 8; ++k) { c[k] = v[k]; any |= is_mark(v[k]); }
    if (any) {
      u32 may = marks();
      for (int k = 0; k < 8; ++k) if (is_mark(c[k]) && !((may >> k) & 1u)) c[k] = 0.0f;
    }
    float4* q = (float4*)((float*)p + i);
    q[0] = make_float4(c[0], c[1], c[2], c[3]);
    q[1] = make_float4(c[4], c[5], c[6], c[7]);
  } else if (dtype == 3) {
    u32 may = marks();
    for (int k = 0; k < 8; ++k) store1(p, 3, i + k, v[k], (may >> k) & 1u);
  } else {
    u32 w[4];
    bool any = false;
    for (int k = 0; k < 4; ++k) {
      w[k] = pack2(v[2 * k], v[2 * k + 1], dtype);
      any |= has_mark16(w[k]);
    }
    if (any) {
      u32 may = marks();
      for (int k = 0; k < 4; ++k)
        w[k] = (u32)clean16((u16)w[k], (may >> (2 * k)) & 1u) | ((u32)clean16((u16)(w[k] >> 16), (may >> (2 * k + 1)) & 1u) << 16);
    }
    *(uint4*)((u16*)p + i) = make_uint4(w[0], w[1], w[2], w[3]);
  }
}
__device__ inline int element_size(int dtype) { return dtype == 0 ? 4 : dtype == 3 ? 8 : 2; }
__device__ inline bool aligned8(const void* p) { return ((unsigned long long)p & 15ull) == 0; }

// `inverse`: of a divisor that is a power of two, so that multiplying gives the same bits; else 0.
__device__ inline float divided(float v, float divisor, float inverse) { return inverse != 0.0f ? v * inverse : v / divisor; }

extern "C" __global__ void fsdp_scaled_sum(void* d, int dd, const void* s, int sd, i64 n, float divisor, float inverse,
                                           int overwrite) {
  i64 stride = (i64)gridDim.x * blockDim.x * 8;
  bool fast = aligned8(d) && aligned8(s);
  for (i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * 8; i < n; i += stride) {
    if (fast && i + 8 <= n) {
      float a[8], b[8], r[8];
      load8(s, sd, i, a);
      if (!overwrite) load8(d, dd, i, b);
      for (int k = 0; k < 8; ++k) {
        float v = divided(a[k], divisor, inverse);
        r[k] = overwrite ? v : b[k] + v;
      }
      store8(d, dd, i, r, [&] {
        u32 marks = 0;
        for (int k = 0; k < 8; ++k) if (is_mark(a[k]) && (overwrite || is_mark(b[k]))) marks |= 1u << k;
        return marks;
      });
    } else {
      for (i64 j = i; j < n && j < i + 8; ++j) {
        float a = load1(s, sd, j), b = overwrite ? 0.0f : load1(d, dd, j);
        bool mark = is_mark(a) && (overwrite || is_mark(b));
        float v = divided(a, divisor, inverse);
        store1(d, dd, j, overwrite ? v : b + v, mark);
      }
    }
  }
}

// The value that storing as `dtype` and loading again would give.
__device__ inline float rounded(float v, int dtype) {
  return dtype == 0 ? v : dtype == 1 ? from_bf16(to_bf16(v)) : from_half(to_half(v));
}
__device__ inline void round8(float* v, int dtype) {
  if (dtype == 0) return;
  for (int k = 0; k < 4; ++k) {
    u32 w = pack2(v[2 * k], v[2 * k + 1], dtype);
    v[2 * k] = dtype == 1 ? __uint_as_float(w << 16) : from_half((u16)w);
    v[2 * k + 1] = dtype == 1 ? __uint_as_float(w & 0xffff0000u) : from_half((u16)(w >> 16));
  }
}

extern "C" __global__ void fsdp_sum_of_parts(void* d, int dd, const void* own, const void* others, int dtype, i64 n, int parts,
                                             int own_part, float divisor, float inverse, int overwrite) {
  i64 stride = (i64)gridDim.x * blockDim.x * 8;
  bool fast = aligned8(d) && aligned8(own) && aligned8(others) && n % 8 == 0;
  for (i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * 8; i < n; i += stride) {
    if (fast) {
      float a[8], b[8], r[8];
      if (own_part == 0) load8(own, dtype, i, a);
      else load8(others, dtype, i, a);
      for (int p = 1; p < parts; ++p) {
        if (p == own_part) load8(own, dtype, i, b);
        else load8(others, dtype, (p < own_part ? p : p - 1) * n + i, b);
        for (int k = 0; k < 8; ++k) a[k] += b[k];
      }
      if (!overwrite) load8(d, dd, i, b);
      for (int k = 0; k < 8; ++k) r[k] = a[k];
      round8(r, dtype);
      for (int k = 0; k < 8; ++k) {
        float v = divided(r[k], divisor, inverse);
        r[k] = overwrite ? v : b[k] + v;
      }
      store8(d, dd, i, r, [&] {
        u32 marks = 0;
        for (int k = 0; k < 8; ++k) if (is_mark(a[k]) && (overwrite || is_mark(b[k]))) marks |= 1u << k;
        return marks;
      });
    } else {
      for (i64 j = i; j < n && j < i + 8; ++j) {
        float a = own_part == 0 ? load1(own, dtype, j) : load1(others, dtype, j);
        for (int p = 1; p < parts; ++p)
          a += p == own_part ? load1(own, dtype, j) : load1(others, dtype, (p < own_part ? p : p - 1) * n + j);
        float v = divided(rounded(a, dtype), divisor, inverse), b = overwrite ? 0.0f : load1(d, dd, j);
        store1(d, dd, j, overwrite ? v : b + v, is_mark(a) && (overwrite || is_mark(b)));
      }
    }
  }
}

struct Meeting { u32* count; u32* own_flags; u32* peer_flags[32]; int rank; int size; };

// One block of a thread a rank. What others wrote before they came is read after it: their writes, a fence of the
// system, their flag.
extern "C" __global__ void fsdp_meet(const __grid_constant__ Meeting m) {
  __shared__ u32 number;
  int peer = threadIdx.x;
  if (peer == 0) number = ++*m.count;
  __syncthreads();
  if (peer >= m.size || peer == m.rank) return;
  __threadfence_system();
  asm volatile("st.release.sys.u32 [%0], %1;" :: "l"(m.peer_flags[peer] + m.rank), "r"(number) : "memory");
  u32 seen;
  do {
    asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(seen) : "l"(m.own_flags + peer) : "memory");
  } while ((int)(seen - number) < 0);
}

__device__ inline double load_double(const void* p, int dtype, i64 i) {
  return dtype == 3 ? ((const double*)p)[i] : (double)load1(p, dtype, i);
}
__device__ inline bool is_mark_double(double v) { return __double_as_longlong(v) == (i64)0x8000000000000000ull; }

extern "C" __global__ void fsdp_scaled_sum_double(void* d, int dd, const void* s, int sd, i64 n, double divisor, int overwrite) {
  i64 stride = (i64)gridDim.x * blockDim.x;
  for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride) {
    double a = load_double(s, sd, i), b = overwrite ? 0.0 : load_double(d, dd, i);
    bool mark = is_mark_double(a) && (overwrite || is_mark_double(b));
    double v = overwrite ? a / divisor : b + a / divisor;
    if (dd == 3) ((double*)d)[i] = (is_mark_double(v) && !mark) ? 0.0 : v;
    else store1(d, dd, i, (float)v, mark);
  }
}

struct PackEntry { const void* from; void* to; i64 count; i64 first_edge; i64 edge_distance; int from_dtype; int action; };
struct PackArguments { PackEntry entry[64]; };

extern "C" __global__ void fsdp_pack(const __grid_constant__ PackArguments arguments, int dtype) {
  const PackEntry& e = arguments.entry[blockIdx.y];
  i64 n = e.count;
  if (e.action == 2) {  // mark_used
    for (i64 t = (i64)blockIdx.x * blockDim.x + threadIdx.x;; t += (i64)gridDim.x * blockDim.x) {
      i64 i = t == 0 ? 0 : e.first_edge + (t - 1) * e.edge_distance;
      if (i >= n) return;
      if (dtype == 3) {
        double* p = (double*)e.to + i;
        if (is_mark_double(*p)) *p = 0.0;
      } else {
        float v = load1(e.to, dtype, i);
        if (is_mark(v)) store1(e.to, dtype, i, 0.0f, false);
      }
    }
  }
  i64 stride = (i64)gridDim.x * blockDim.x * 8;
  bool reads = e.action <= 1;
  bool wide = dtype == 3 || (reads && e.from_dtype == 3);
  bool fast = !wide && aligned8(e.to) && (!reads || aligned8(e.from));
  for (i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * 8; i < n; i += stride) {
    if (fast && i + 8 <= n) {
      float a[8], b[8];
      if (reads) load8(e.from, e.from_dtype, i, a);
      if (e.action == 1) load8(e.to, dtype, i, b);
      for (int k = 0; k < 8; ++k) {
        if (e.action == 1) a[k] += b[k];
        if (e.action == 3) a[k] = -0.0f;
        if (e.action == 4) a[k] = 0.0f;
      }
      store8(e.to, dtype, i, a, [&] { return e.action == 3 ? 0xffu : 0u; });
    } else {
      for (i64 j = i; j < n && j < i + 8; ++j) {
        if (wide) {
          double v = e.action == 3 ? -0.0 : 0.0;
          if (reads) v = load_double(e.from, e.from_dtype, j) + (e.action == 1 ? load_double(e.to, dtype, j) : 0.0);
          if (dtype == 3) ((double*)e.to)[j] = v; else store1(e.to, dtype, j, (float)v, e.action == 3);
        } else {
          float v = e.action == 3 ? -0.0f : 0.0f;
          if (reads) v = load1(e.from, e.from_dtype, j);
          if (e.action == 1) v += load1(e.to, dtype, j);
          store1(e.to, dtype, j, v, e.action == 3);
        }
      }
    }
  }
}

// One block a row: maximum and sum of exponentials in one pass over the logits.
extern "C" __global__ void fsdp_cross_entropy_forward(const void* logits, int dtype, i64 columns, const i64* targets,
                                                      float* log_sums, float* losses) {
  i64 row = blockIdx.x;
  const char* base = (const char*)logits + row * columns * element_size(dtype);
  bool fast = aligned8(base) && dtype != 3;
  float most = -1e30f, sum = 0.0f;
  for (i64 i = (i64)threadIdx.x * 8; i < columns; i += (i64)blockDim.x * 8) {
    float v[8];
    int count = columns - i < 8 ? (int)(columns - i) : 8;
    if (fast && count == 8) load8(base, dtype, i, v);
    else for (int k = 0; k < count; ++k) v[k] = load1(base, dtype, i + k);
    float here = most;
    for (int k = 0; k < 8; ++k) if (k < count) here = fmaxf(here, v[k]);
    if (here > most) { sum *= __expf(most - here); most = here; }
    for (int k = 0; k < 8; ++k) if (k < count) sum += __expf(v[k] - most);
  }
  __shared__ float mosts[32], sums[32];
  for (int offset = 16; offset > 0; offset >>= 1) {
    float other = __shfl_down_sync(0xffffffffu, most, offset), other_sum = __shfl_down_sync(0xffffffffu, sum, offset);
    float both = fmaxf(most, other);
    sum = sum * __expf(most - both) + other_sum * __expf(other - both);
    most = both;
  }
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  if (lane == 0) { mosts[warp] = most; sums[warp] = sum; }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < (int)(blockDim.x >> 5); ++w) {
      float both = fmaxf(most, mosts[w]);
      sum = sum * __expf(most - both) + sums[w] * __expf(mosts[w] - both);
      most = both;
    }
    float log_sum = most + __logf(sum);
    i64 target = targets[row];
    log_sums[row] = log_sum;
    losses[row] = target < 0 ? 0.0f : log_sum - load1(base, dtype, target);
  }
}

extern "C" __global__ void fsdp_cross_entropy_backward(void* logits, int dtype, i64 columns, const i64* targets,
                                                       const float* log_sums, const float* scale) {
  i64 row = blockIdx.y;
  char* base = (char*)logits + row * columns * element_size(dtype);
  i64 target = targets[row];
  float log_sum = log_sums[row], factor = target < 0 ? 0.0f : *scale;
  bool fast = aligned8(base) && dtype != 3;
  i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * 8;
  if (i >= columns) return;
  float v[8];
  int count = columns - i < 8 ? (int)(columns - i) : 8;
  bool whole = fast && count == 8;
  if (whole) load8(base, dtype, i, v);
  else for (int k = 0; k < count; ++k) v[k] = load1(base, dtype, i + k);
  for (int k = 0; k < 8; ++k) {
    if (k >= count) break;
    float p = __expf(v[k] - log_sum);
    v[k] = (i + k == target ? p - 1.0f : p) * factor;
  }
  if (whole) store8(base, dtype, i, v, [] { return 0xffu; });
  else for (int k = 0; k < count; ++k) store1(base, dtype, i + k, v[k], true);
}

extern "C" __global__ void fsdp_spin(i64 nanoseconds) {
  i64 start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do {
    __nanosleep(200);
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - start < nanoseconds);
}
)cuda";

}  // namespace fsdp::cuda
