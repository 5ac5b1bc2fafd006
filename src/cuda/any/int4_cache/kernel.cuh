// append_int4_cache on any GPU, in two launches: blocks that became full, then rings, whose slots those blocks had.
#pragma once

#include "cuda/common/rotary.cuh"
#include "problem/int4_append.h"

namespace heddle::cuda::any::int4_cache {

constexpr int kThreads = 256, kWarps = kThreads / 32, kKeys = static_cast<int>(kInt4Keys), kMaxHeadSize = 256;

// The keys (values) of a block.
template <class T>
using Rows = T[kKeys][kMaxHeadSize];

// A kv head of a sequence, before and after the append. Nobody has checked lengths, rows and pages here.
struct Head {
  const Int4AppendProblem& p;
  std::int64_t b, h, row, before, after;
  bool valid;

  __device__ Head(const Int4AppendProblem& problem, std::int64_t sequence, std::int64_t kv_head)
      : p(problem), b(sequence), h(kv_head), row(p.row(b)), before(p.seqlens[b]), after(before + p.S) {
    valid = row >= 0 && row < p.rows && before >= 0 && after <= p.capacity;
  }
};

// Element d of new key (value) j, rotated, as the ring stores it.
template <class T>
__device__ T new_element(const Head& head, bool of_values, std::int64_t j, int d) {
  const Operand& x = of_values ? head.p.v_new : head.p.k_new;
  const T* from =
      reinterpret_cast<const T*>(x.data) + (head.b * x.stride_b + (j - head.before) * x.stride_s + head.h * x.stride_h);
  const RotaryTables& tables = head.p.rotary;
  if (of_values || d >= tables.dims) return from[d * x.stride_d];
  const int half = static_cast<int>(tables.dims / 2);
  const bool first = tables.interleaved ? d % 2 == 0 : d < half;
  const int pair = tables.interleaved ? d / 2 : first ? d : d - half;
  const int other = tables.interleaved ? d ^ 1 : first ? d + half : pair;
  const float mine = to_float(from[d * x.stride_d]), its = to_float(from[other * x.stride_d]);
  float a = first ? mine : its, b = first ? its : mine;
  angle_at<T>(tables, clamped(j, 0, tables.positions - 1), pair).turn(a, b);
  return static_cast<T>(first ? a : b);  // to nearest even
}

// Keys from `first` on, which are behind the blocks: from the ring, or new.
template <class T>
__device__ void gather(const Head& head, bool of_values, std::int64_t first, Rows<T>& rows) {
  const Operand& x = of_values ? head.p.v_tail : head.p.k_tail;
  const int width = static_cast<int>(of_values ? head.p.Dv : head.p.D);
#pragma unroll 8
  for (int n = static_cast<int>(threadIdx.x); n < kKeys * width; n += kThreads) {
    const int key = n / width, d = n % width;
    const std::int64_t j = first + key;
    rows[key][d] =
        j >= head.before
            ? new_element<T>(head, of_values, j, d)
            : reinterpret_cast<const T*>(
                  x.data)[head.row * x.stride_b + j % kInt4Tail * x.stride_s + head.h * x.stride_h + d * x.stride_d];
  }
  __syncthreads();
}

// As Int4Range and Int4Scale of lowbit/int4_codes.h have it, step by step.
struct Group {
  float low = 65504.0f, high = -65504.0f;
  bool finite = true;

  __device__ void add(float x) {
    finite &= fabsf(x) < INFINITY;  // false for NaN
    low = x < low ? x : low;
    high = x > high ? x : high;
  }
  __device__ void join_lanes() {
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      low = fminf(low, __shfl_xor_sync(0xffffffff, low, lanes));
      high = fmaxf(high, __shfl_xor_sync(0xffffffff, high, lanes));
    }
    finite = __all_sync(0xffffffff, finite);
  }
};

struct Scale {
  __half zero_bits, scale_bits;
  float zero, scale;

  __device__ explicit Scale(const Group& group) {
    zero_bits = group.finite ? __float2half_rn(fmaxf(group.low, -65504.0f)) : __ushort_as_half(0x7e00);
    zero = __half2float(zero_bits);
    const float high = fminf(group.high, 65504.0f);
    scale_bits = __float2half_rn(high > zero ? __fdiv_rn(high - zero, 15.0f) : 0.0f);
    scale = __half2float(scale_bits);
  }
  __device__ int code(float x) const {
    if (!(scale > 0)) return 0;
    const float nearest = rintf(__fdiv_rn(x - zero, scale));
    return nearest >= 15.0f ? 15 : nearest > 0.0f ? static_cast<int>(nearest) : 0;
  }
};

// A thread takes channels, and all keys of each; two lanes write a byte.
template <class T>
__device__ void encode_keys(const Rows<T>& rows, const Int4Block& format, std::byte* block) {
#pragma unroll 1
  for (int d = static_cast<int>(threadIdx.x); d < format.D; d += kThreads) {  // whole warps: D is a multiple of 64
    Group group;
#pragma unroll 4
    for (int j = 0; j < kKeys; ++j) group.add(to_float(rows[j][d]));
    const Scale scale(group);
    reinterpret_cast<__half*>(block + format.k_scales())[d] = scale.scale_bits;
    reinterpret_cast<__half*>(block + format.k_zeros())[d] = scale.zero_bits;
#pragma unroll 4
    for (int j = 0; j < kKeys; ++j) {
      const int code = scale.code(to_float(rows[j][d]));
      const int next = __shfl_down_sync(0xffffffff, code, 1);
      if (d % 2 == 0) block[format.k_code(j, d)] = static_cast<std::byte>(code | next << 4);
    }
  }
}

// A warp takes the two keys that lie in one byte, eight apart, and 64 channels; a lane two of those.
template <class T>
__device__ void encode_values(const Rows<T>& rows, const Int4Block& format, std::byte* block) {
  const int lane = static_cast<int>(threadIdx.x) % 32, groups = static_cast<int>(format.v_groups());
#pragma unroll 1
  for (int task = static_cast<int>(threadIdx.x) / 32; task < kKeys / 2 * groups; task += kWarps) {
    const int key = task / groups / 8 * 16 + task / groups % 8, from = task % groups * 64;
    int codes[2] = {0, 0};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const T* const row = rows[key + 8 * n] + from + 2 * lane;
      const float x[2] = {to_float(row[0]), to_float(row[1])};
      Group group;
      group.add(x[0]);
      group.add(x[1]);
      group.join_lanes();
      const Scale scale(group);
      if (lane == 0) {
        const std::int64_t at = format.v_scale(key + 8 * n, from);
        *reinterpret_cast<__half*>(block + format.v_scales() + at) = scale.scale_bits;
        *reinterpret_cast<__half*>(block + format.v_zeros() + at) = scale.zero_bits;
      }
#pragma unroll
      for (int c = 0; c < 2; ++c) codes[c] |= scale.code(x[c]) << Int4Block::v_bit(key + 8 * n, 0);
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) block[format.v_code(key, from + 2 * lane + c)] = static_cast<std::byte>(codes[c]);
  }
}

// A CTA takes one of the `filled` blocks of a head that an append may fill after another.
template <class T>
__global__ void __launch_bounds__(kThreads)
    encode_kernel(const __grid_constant__ Int4AppendProblem p, std::int64_t filled) {
  __shared__ Rows<T> rows;
#pragma unroll 1
  for (std::int64_t task = blockIdx.x; task < p.B * p.Hkv * filled; task += gridDim.x) {
    const Head head(p, task / filled / p.Hkv, task / filled % p.Hkv);
    const std::int64_t n = int4_blocks(head.before) + task % filled;
    if (!head.valid || n >= int4_blocks(head.after)) continue;
    const std::int64_t page = p.page(head.b, n);
    if (p.page_table != nullptr && (page < 0 || page >= p.blocks.pages)) continue;
    std::byte* const block = p.block(head.b, page, head.h);
    const Int4Block format{p.D, p.Dv};
    gather<T>(head, false, n * kInt4Keys, rows);
    encode_keys<T>(rows, format, block);
    __syncthreads();
    gather<T>(head, true, n * kInt4Keys, rows);
    encode_values<T>(rows, format, block);
    __syncthreads();
  }
}

// A CTA writes all heads of one of the `rows` new rows, at most, that a ring keeps after another.
template <class T>
__global__ void __launch_bounds__(kThreads)
    ring_kernel(const __grid_constant__ Int4AppendProblem p, std::int64_t rows) {
#pragma unroll 1
  for (std::int64_t task = blockIdx.x; task < p.B * rows; task += gridDim.x) {
    const Head first(p, task / rows, 0);
    const std::int64_t kept = int4_blocks(first.after) * kInt4Keys;
    const std::int64_t j = (first.before > kept ? first.before : kept) + task % rows;
    if (!first.valid || j >= first.after) continue;
    const auto write = [&](bool of_values, const Operand& tail, int width) {
#pragma unroll 1
      for (int n = static_cast<int>(threadIdx.x); n < p.Hkv * width; n += kThreads) {
        Head head = first;
        head.h = n / width;
        const int d = n % width;
        reinterpret_cast<T*>(tail.data)[first.row * tail.stride_b + j % kInt4Tail * tail.stride_s +
                                        head.h * tail.stride_h + d * tail.stride_d] =
            new_element<T>(head, of_values, j, d);
      }
    };
    write(false, p.k_tail, static_cast<int>(p.D));
    write(true, p.v_tail, static_cast<int>(p.Dv));
  }
}

}  // namespace heddle::cuda::any::int4_cache
