// Putting results of parts of the keys together: those of the warps that shared a block, then those of the CTAs that
// shared a unit, always in the same order.
//
// CTAs of a cluster read each other's shared memory. Others leave partial results in the workspace, as 16-byte words
// {two floats, kTag}. A word is written and read at once, so a reader that finds the tag has the floats: no fence, no
// counter, nothing to be set before the launch. Every word has one reader, who erases it, so that no tag is left for
// the next launch.
#pragma once

#include "cuda/common/attention/exponents.cuh"
#include "cuda/common/attention/merge.cuh"
#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/common/ptx/barrier.cuh"
#include "cuda/common/ptx/memory.cuh"
#include "cuda/common/recomputed.cuh"
#include "cuda/sm90/attention_decode/address.cuh"
#include "cuda/sm90/attention_decode/config.h"

namespace heddle::cuda::sm90::attention_decode {

using Partial = PartialRow<false>;

constexpr std::uint32_t kTagLow = 0x8D3A61C7, kTagHigh = 0xB52F9E04;  // 64 bits that memory does not hold by chance

// All consumer warps have come here.
__device__ inline void consumers_meet() { ptx::barrier_sync<1, kConsumerThreads>(); }

template <class C>
class Merger {
 public:
  __device__ Merger(const Params& params, SharedMemory<C> memory)
      : p(params), shared(memory), control(memory.control()) {}

  // From the merge buffer: 8 rows of each warp (those from `row` on of its row tiles), kPassColumns columns from
  // `column` on.
  __device__ void join_warps(const Piece& piece, int row, int column) {
    const int thread = thread_index(), quads = quad_count();
    constexpr int kQuads = C::kPassColumns / 4;
    constexpr int kUnroll = C::kManyRegisters ? 1 : 8;  // O is still in the registers
    const int splits = p.plan.key_splits, items = p.plan.heads * p.plan.row_groups * 8 * kQuads;
#pragma unroll 1
    for (int n = thread; n < items; n += kConsumerThreads) {
      const int quad = n % kQuads, in_tile = n / kQuads % 8, group = n / (8 * kQuads);
      const int head = group >> p.plan.row_shift;
      const int unit_row = (group & (p.plan.row_groups - 1)) * (kRowTile * C::kRowTiles) + row + in_tile;
      if (unit_row >= p.plan.rows || column / 4 + quad >= quads) continue;
      const int first = group * splits;  // warp
      Partial x;
#pragma unroll kUnroll
      for (int s = 0; s < splits; ++s) x.max = fmaxf(x.max, control.max[first + s][row + in_tile]);
#pragma unroll kUnroll
      for (int s = 0; s < splits; ++s) {
        const float factor =
            x.max == -INFINITY ? 0.0f : exp_of_difference(control.max[first + s][row + in_tile], x.max);
        const float4 part = *reinterpret_cast<const float4*>(shared.merge() + (first + s) * C::kMergeWords +
                                                             in_tile * C::kMergePitch + 4 * quad);
        x.sum += factor * control.sum[first + s][row + in_tile];
        x.o.x += factor * part.x;
        x.o.y += factor * part.y;
        x.o.z += factor * part.z;
        x.o.w += factor * part.w;
      }
      const int r = head * p.plan.rows + unit_row, q = column / 4 + quad;
      if (p.plan.cluster > 1) {
        *reinterpret_cast<float4*>(cluster_quad(r, q)) = x.o;
        if (q == 0) *reinterpret_cast<float2*>(shared.partial() + 2 * r) = make_float2(x.max, x.sum);
      } else if (piece.slot < 0) {
        store(piece, r, q, x);
      } else {
        put(piece.slot, r, q, x);
      }
    }
  }

  // All partial results of the unit that ends with this piece, which lie in the workspace.
  __device__ void merge(const Piece& piece) {
    if (C::kManyRegisters) {
      merge_parts<1, 2>(piece);
    } else if (piece.merge_count <= 2 && p.plan.merge_shift == 0) {
      merge_parts<4, 2>(piece);
    } else {
      merge_parts<1, 8>(piece);
    }
    consumers_meet();  // nothing waits for it; but without it the kernels of wide heads spill registers
  }

  // The partial results of this cluster's CTAs. Each CTA has a part of the elements, and a lane of it one CTA's share.
  __device__ void gather(const Piece& piece) {
    const int thread = thread_index(), rows = row_count(), quads = quad_count();
    const int ctas = p.plan.cluster, shift = p.plan.lane_shift, items = rows * quads, each = p.plan.cluster_items;
    const int from = ptx::cluster_rank() * each, to = min(from + each, items), other = thread & ((1 << shift) - 1);
    ptx::cluster_meet();
#pragma unroll 1
    for (int begin = from; begin < to; begin += kConsumerThreads >> shift) {
      const int item = begin + (thread >> shift), n = min(item, to - 1);
      const int row = p.plan.by_quads.quotient(n), quad = n - row * quads;
      Partial x;
      if (other < ctas) {
        const auto remote = [&](const float* at) { return ptx::remote_address(ptx::shared_address(at), other); };
        const float2 statistics = ptx::load_remote_float2(remote(shared.partial() + 2 * row));
        x = {statistics.x, statistics.y, ptx::load_remote_float4(remote(cluster_quad(row, quad)))};
      }
      x.join_lanes(1 << shift);
      if (item < to && other == 0) store(piece, row, quad, x);
    }
    ptx::cluster_meet();  // nobody ends while others read its memory
  }

 private:
  // Computed anew where they are wanted: registers are scarce.
  __device__ static int thread_index() { return recomputed(static_cast<int>(threadIdx.x)) - kServiceThreads; }
  __device__ int row_count() const { return p.plan.heads * p.plan.rows; }           // of all heads of a unit
  __device__ int quad_count() const { return static_cast<int>(p.problem.Dv) / 4; }  // pieces of four columns in one

  // Where in partial() a quad of a row lies: the quads of all rows stand behind the rows' statistics.
  __device__ float* cluster_quad(int row, int quad) const {
    return shared.partial() + (2 * row_count() + 3) / 4 * 4 + 4 * (row * quad_count() + quad);
  }

  // The first of three words: {max, sum}, then two columns each, a distance of word_step() from one to the next, so
  // that neighbouring lanes read neighbouring words. row: among the rows of all heads of the unit.
  __device__ uint4* slot_quad(int slot, int row, int quad) const {
    return p.slots + static_cast<unsigned>(slot * p.plan.slot_words + row * quad_count() + quad);
  }
  __device__ int word_step() const { return row_count() * quad_count(); }

  __device__ void put(int slot, int row, int quad, const Partial& x) const {
    uint4* to = slot_quad(slot, row, quad);
    const auto word = [](float a, float b) {
      return make_uint4(__float_as_uint(a), __float_as_uint(b), kTagLow, kTagHigh);
    };
    ptx::store_relaxed_16(to, word(x.max, x.sum));
    ptx::store_relaxed_16(to + word_step(), word(x.o.x, x.o.y));
    ptx::store_relaxed_16(to + 2 * word_step(), word(x.o.z, x.o.w));
  }

  // A thread has loads of kParts parts of each of kItems items on their way at once. More than there are cost time:
  // those that do not exist are loaded too, from the last one's place.
  template <int kItems, int kParts>
  __device__ void merge_parts(const Piece& piece) const {
    const int thread = thread_index(), quads = quad_count(), items = row_count() * quads, count = piece.merge_count;
    const int shift = p.plan.merge_shift, ways = 1 << shift, way = thread & (ways - 1);
    constexpr int kApart = kConsumerThreads;  // items of a thread that has several, and then shares none
#pragma unroll 1
    for (int begin = 0; begin < items; begin += kItems * (kConsumerThreads >> shift)) {
      const int item = begin + (thread >> shift);
      Partial x[kItems];
#pragma unroll 1
      for (int first = item < items ? way : count; first < count; first += kParts * ways) {
        uint4 words[kItems][kParts][3];
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          const int n = min(item + i * kApart, items - 1), row = p.plan.by_quads.quotient(n);
#pragma unroll
          for (int k = 0; k < kParts; ++k) {
            const uint4* from = slot_quad(merge_slot(piece, min(first + k * ways, count - 1)), row, n - row * quads);
#pragma unroll
            for (int w = 0; w < 3; ++w) words[i][k][w] = ptx::load_relaxed_16(from + w * word_step());
          }
        }
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          const int n = item + i * kApart, row = p.plan.by_quads.quotient(n);
#pragma unroll
          for (int k = 0; k < kParts; ++k) {
            if (n >= items || first + k * ways >= count) continue;
            uint4* from = slot_quad(merge_slot(piece, first + k * ways), row, n - row * quads);
#pragma unroll
            for (int w = 0; w < 3; ++w) {
              await(words[i][k][w], from + w * word_step());
              from[w * word_step()] = make_uint4(0, 0, 0, 0);
            }
            const auto value = [](std::uint32_t bits) { return __uint_as_float(bits); };
            x[i].join({value(words[i][k][0].x), value(words[i][k][0].y),
                       make_float4(value(words[i][k][1].x), value(words[i][k][1].y), value(words[i][k][2].x),
                                   value(words[i][k][2].y))});
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const int n = item + i * kApart, row = p.plan.by_quads.quotient(n);
        x[i].join_lanes(ways);
        if (n < items && way == 0) store(piece, row, n - row * quads, x[i]);
      }
    }
  }

  static __device__ void await(uint4& word, const uint4* from) {
    while (word.z != kTagLow || word.w != kTagHigh) word = ptx::load_relaxed_16(from);
  }

  // Writes four columns of a finished row, normalised and with its sink; and, beside the first, its lse.
  __device__ void store(const Piece& piece, int unit_row, int quad, Partial x) const {
    const AttentionProblem& problem = p.problem;
    const QueryRow at(p, piece, unit_row);
    if (at.i >= piece.q_rows) return;
    if (at.i >= piece.sq) x.o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);  // whatever its q was
    const bool used = at.i < piece.sq && x.sum > 0.0f;
    float inverse = used ? __fdividef(1.0f, x.sum) : 0.0f;
    float lse = used ? x.max + __logf(x.sum) : -INFINITY;
    if (problem.sink.data != nullptr && at.i < piece.sq) {
      // The sink joins the sum; the common factor is the larger of both, so that nothing overflows.
      const float sink = reinterpret_cast<const float*>(problem.sink.data)[at.h * problem.sink.stride_h];
      const float top = fmaxf(x.max, sink);
      if (top > -INFINITY) {
        const float factor = exp_of_difference(x.max, top), all = x.sum * factor + exp_of_difference(sink, top);
        inverse = __fdividef(factor, all);
        lse = top + __logf(all);
      }
    }
    if (C::kE4m3 && !C::kKeyScales) inverse *= problem.v_scale.at(piece.cache_row, 0, at.kv_head);
    const int row = piece.q_begin + at.i;
    std::byte* const to = problem.o.at(piece.sequence, row, at.h);
    if (problem.o.dtype == DType::f32) {
      reinterpret_cast<float4*>(to)[quad] =
          make_float4(x.o.x * inverse, x.o.y * inverse, x.o.z * inverse, x.o.w * inverse);
    } else if (problem.o.dtype == DType::bf16) {
      reinterpret_cast<uint2*>(to)[quad] = make_uint2(ptx::pack2<__nv_bfloat16>(x.o.x * inverse, x.o.y * inverse),
                                                      ptx::pack2<__nv_bfloat16>(x.o.z * inverse, x.o.w * inverse));
    } else {
      reinterpret_cast<uint2*>(to)[quad] = make_uint2(ptx::pack2<__half>(x.o.x * inverse, x.o.y * inverse),
                                                      ptx::pack2<__half>(x.o.z * inverse, x.o.w * inverse));
    }
    if (quad == 0 && problem.lse.data != nullptr) {
      reinterpret_cast<float*>(problem.lse.data)[piece.sequence * problem.lse.stride_b + at.h * problem.lse.stride_h +
                                                 row * problem.lse.stride_i] = lse;
    }
  }

  const Params& p;
  const SharedMemory<C> shared;
  Control& control;
};

}  // namespace heddle::cuda::sm90::attention_decode
