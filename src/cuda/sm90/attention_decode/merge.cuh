// Putting results of parts of the keys together: those of the warps that shared a block, then those of the CTAs that
// shared a unit, always in the same order.
//
// Partial results travel through the workspace as 16-byte words {two floats, kTag}. A word is written and read at once,
// so a reader that finds the tag has the floats: no fence, no counter, nothing to be set before the launch. Readers
// erase what they have read, so that no tag is left for the next launch.
#pragma once

#include "cuda/sm90/attention_decode/address.cuh"
#include "cuda/sm90/attention_decode/config.h"

namespace heddle::cuda::sm90::attention_decode {

constexpr std::uint32_t kTagLow = 0x8D3A61C7, kTagHigh = 0xB52F9E04;  // 64 bits that memory does not hold by chance

// All consumer warps have come here.
__device__ inline void consumers_meet() { ptx::barrier_sync<1, kConsumers>(); }

template <class C>
class Merger {
 public:
  __device__ Merger(const Params& params, SharedMemory<C> memory)
      : p(params), shared(memory), control(memory.control()), thread(static_cast<int>(threadIdx.x) - kServiceThreads) {}

  // From the merge buffer: 8 rows of each warp (those from `row` on of its row tiles), kPassColumns columns from
  // `column` on.
  __device__ void join_warps(const Piece& piece, int row, int column) {
    constexpr int kQuads = C::kPassColumns / 4;
    constexpr int kUnroll = C::kManyRegisters ? 1 : 4;  // O is still in the registers
    const int splits = p.plan.key_splits, items = p.plan.heads * p.plan.row_groups * 8 * kQuads;
#pragma unroll 1
    for (int n = thread; n < items; n += kConsumers) {
      const int quad = n % kQuads, in_tile = n / kQuads % 8, group = n / (8 * kQuads);
      const int head = group / p.plan.row_groups;
      const int unit_row = group % p.plan.row_groups * (kRowTile * C::kRowTiles) + row + in_tile;
      if (unit_row >= p.plan.rows) continue;
      const int first = group * splits;  // warp
      float max = -INFINITY;
#pragma unroll kUnroll
      for (int s = 0; s < splits; ++s) max = fmaxf(max, control.max[first + s][row + in_tile]);
      float sum = 0.0f;
      float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll kUnroll
      for (int s = 0; s < splits; ++s) {
        const float factor = max == -INFINITY ? 0.0f : ptx::exp2_approx(control.max[first + s][row + in_tile] - max);
        const float4 part =
            *reinterpret_cast<const float4*>(shared.merge() + ((first + s) * 8 + in_tile) * C::kMergePitch + 4 * quad);
        sum += factor * control.sum[first + s][row + in_tile];
        o.x += factor * part.x;
        o.y += factor * part.y;
        o.z += factor * part.z;
        o.w += factor * part.w;
      }
      if (piece.slot < 0) {
        store(piece, head, unit_row, column + 4 * quad, max, sum, o);
      } else if (column + 4 * quad < p.problem.Dv) {
        uint4* words = slot_row(piece.slot, head * p.plan.rows + unit_row) + 1 + (column + 4 * quad) / 2;
        put(words, o.x, o.y);
        put(words + 1, o.z, o.w);
        if (column + quad == 0) put(words - 1, max, sum);
      }
    }
  }

  // All partial results of the unit that ends with this piece.
  __device__ void merge(const Piece& piece) {
    const int quads = static_cast<int>(p.problem.Dv) / 4, rows = p.plan.heads * p.plan.rows, items = rows * quads;
    const int count = piece.merge_count;
    constexpr int kBatch = C::kManyRegisters ? 2 : 8;  // on their way at once
#pragma unroll 1
    for (int n = thread; n < items; n += kConsumers) {
      const int quad = n % quads, row = n / quads;
      float max = -INFINITY, sum = 0.0f;
      float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
      for (int first = 0; first < count; first += kBatch) {
        uint4 words[kBatch][3];
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          const uint4* from = slot_row(merge_slot(piece, min(first + k, count - 1)), row);
          words[k][0] = ptx::load_relaxed_16(from);
          words[k][1] = ptx::load_relaxed_16(from + 1 + 2 * quad);
          words[k][2] = ptx::load_relaxed_16(from + 2 + 2 * quad);
        }
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          if (first + k < count) {
            uint4* from = slot_row(merge_slot(piece, first + k), row);
            await(words[k][0], from);
            await(words[k][1], from + 1 + 2 * quad);
            await(words[k][2], from + 2 + 2 * quad);
            const uint4 nothing = make_uint4(0, 0, 0, 0);
            from[1 + 2 * quad] = nothing;
            from[2 + 2 * quad] = nothing;
            const float part_max = __uint_as_float(words[k][0].x), now = fmaxf(max, part_max);
            const float before = now == -INFINITY ? 0.0f : ptx::exp2_approx(max - now);
            const float factor = now == -INFINITY ? 0.0f : ptx::exp2_approx(part_max - now);
            sum = sum * before + factor * __uint_as_float(words[k][0].y);
            o.x = o.x * before + factor * __uint_as_float(words[k][1].x);
            o.y = o.y * before + factor * __uint_as_float(words[k][1].y);
            o.z = o.z * before + factor * __uint_as_float(words[k][2].x);
            o.w = o.w * before + factor * __uint_as_float(words[k][2].y);
            max = now;
          }
        }
      }
      store(piece, row / p.plan.rows, row % p.plan.rows, 4 * quad, max, sum, o);
    }
    consumers_meet();  // all have read the maxima and sums
#pragma unroll 1
    for (int n = thread; n < rows * count; n += kConsumers) {
      *slot_row(merge_slot(piece, n / rows), n % rows) = make_uint4(0, 0, 0, 0);
    }
  }

 private:
  // A row's words: {max, sum}, then its columns in pairs. row: among the rows of all heads of the unit.
  __device__ uint4* slot_row(int slot, int row) const {
    const int words = static_cast<int>(p.problem.Dv) / 2 + 1;
    return p.slots + static_cast<unsigned>(slot * p.plan.slot_words + row * words);
  }

  static __device__ void put(uint4* to, float x, float y) {
    ptx::store_relaxed_16(to, make_uint4(__float_as_uint(x), __float_as_uint(y), kTagLow, kTagHigh));
  }

  static __device__ void await(uint4& word, const uint4* from) {
    while (word.z != kTagLow || word.w != kTagHigh) word = ptx::load_relaxed_16(from);
  }

  // Four columns of a finished row: normalised, with its sink, and lse beside the first.
  __device__ void store(const Piece& piece, int head, int row, int column, float max, float sum, float4 o) {
    constexpr float kLn2 = 0.693147180559945309f;
    const AttentionProblem& problem = p.problem;
    const int group = static_cast<int>(problem.G), n = piece.row + row, i = n / group;
    const int kv_head = piece.head + head, h = kv_head * group + n % group;
    if (i >= piece.q_rows || column >= problem.Dv) return;
    const bool used = i < piece.sq && sum > 0.0f;
    float inverse = used ? __fdividef(1.0f, sum) : 0.0f;
    float lse = used ? max * kLn2 + __logf(sum) : -INFINITY;
    if (problem.sink.data != nullptr && i < piece.sq) {
      // The sink joins the sum; the common factor is the larger of both, so that nothing overflows.
      const float sink = reinterpret_cast<const float*>(problem.sink.data)[h * problem.sink.stride_h] * kLog2e;
      const float top = fmaxf(max, sink);
      if (top > -INFINITY) {
        const float all = sum * ptx::exp2_approx(max - top) + ptx::exp2_approx(sink - top);
        inverse = __fdividef(ptx::exp2_approx(max - top), all);
        lse = top * kLn2 + __logf(all);
      }
    }
    if (C::kE4m3 && !p.scales_by_key) inverse *= problem.v_scale.at(piece.cache_row, 0, kv_head);
    std::byte* to = problem.o.at(piece.sequence, piece.q_begin + i, h) + 2 * column;
    uint2 words;
    if (problem.o.dtype == DType::bf16) {
      words.x = ptx::pack2<__nv_bfloat16>(o.x * inverse, o.y * inverse);
      words.y = ptx::pack2<__nv_bfloat16>(o.z * inverse, o.w * inverse);
    } else {
      words.x = ptx::pack2<__half>(o.x * inverse, o.y * inverse);
      words.y = ptx::pack2<__half>(o.z * inverse, o.w * inverse);
    }
    *reinterpret_cast<uint2*>(to) = words;
    if (column == 0 && problem.lse.data != nullptr) {
      reinterpret_cast<float*>(problem.lse.data)[piece.sequence * problem.lse.stride_b + h * problem.lse.stride_h +
                                                 (piece.q_begin + i) * problem.lse.stride_i] = lse;
    }
  }

  const Params& p;
  const SharedMemory<C> shared;
  Control& control;
  const int thread;
};

}  // namespace heddle::cuda::sm90::attention_decode
