// The warps that bring q to shared memory, rotated and in the products' type, and write new keys into the cache.
#pragma once

#include "core/dtypes.h"
#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/common/ptx/barrier.cuh"
#include "cuda/common/ptx/tma.cuh"
#include "cuda/common/ring.cuh"
#include "cuda/sm90/attention_decode/address.cuh"
#include "cuda/sm90/attention_decode/config.h"

namespace heddle::cuda::sm90::attention_decode {

// Element n of a row at `position`, rotated.
__device__ inline float load_rotated(const std::byte* row, DType dtype, int n, const RotaryTables& tables,
                                     std::int64_t position) {
  const float x = load_value(row, dtype, n);
  const int half = static_cast<int>(tables.dims) / 2;
  if (n >= 2 * half) return x;
  const bool second = tables.interleaved ? n % 2 == 1 : n >= half;
  const int pair = tables.interleaved ? n / 2 : second ? n - half : n;
  const int partner = tables.interleaved ? n ^ 1 : second ? n - half : n + half;
  const std::int64_t at = clamped(position, 0, tables.positions - 1);
  const float y = load_value(row, dtype, partner);
  const float c = load_value(tables.cos, tables.dtype, at * tables.cos_row + pair * tables.cos_column);
  const float s = load_value(tables.sin, tables.dtype, at * tables.sin_row + pair * tables.sin_column);
  return second ? x * c + y * s : x * c - y * s;
}

template <class C>
class QueryWarp {
 public:
  __device__ QueryWarp(const Params& params, SharedMemory<C> memory, int number)
      : p(params), shared(memory), control(memory.control()), warp(number), lane(static_cast<int>(threadIdx.x) % 32) {}

  // Before start(): columns behind the head's size, which copies of q leave out, become zeros.
  __device__ void clear_columns() {
    const int size = static_cast<int>(p.problem.D);
#pragma unroll 1
    for (int row = warp; row < p.plan.heads * p.plan.rows; row += kQueryWarps) {
#pragma unroll 1
      for (int n = size + 2 * lane; n < C::kSize; n += 64) {
        *reinterpret_cast<std::uint32_t*>(shared.q() + row * C::kQPitch + 2 * n) = 0;
      }
    }
  }

  __device__ void run() {
    const bool rotates = p.problem.append.rotary.dims > 0;
    std::uint32_t phase = 0;
    for (RingPosition<kPieces> slot;; slot.next(), phase ^= 1) {
      ptx::barrier_wait(control.piece_ready[slot.index], slot.phase);
      const Piece& piece = control.pieces[slot.index];
      if (piece.sequence < 0) return;
      ptx::barrier_wait(control.q_free, phase ^ 1);
      const int rows = p.plan.heads * p.plan.rows;
      if (rotates) {
#pragma unroll 1
        for (int row = warp; row < rows; row += kQueryWarps) load_rotated_row(piece, row);
        arrive(control.q_requested);
      } else {
#pragma unroll 1
        for (int row = warp; row < rows || row == warp; row += kBatch * kQueryWarps) {
          Words words[kBatch];
          request_rows(piece, row, rows, words);
          if (row == warp) arrive(control.q_requested);
          place_rows(piece, row, rows, words);
        }
      }
      if constexpr (C::kQSwizzled) ptx::fence_async_shared();  // products read what was written
      ptx::barrier_arrive(control.q_ready);
      if (p.problem.append.k_new.data != nullptr) {
        append(piece);
        ptx::fence_async();  // the copy engine reads what was written
        arrive(control.appended);
      }
      arrive(control.piece_free[slot.index]);
    }
  }

 private:
  using T = typename C::Element;
  static constexpr int kEach = C::kSize / 32;  // elements of a row that a lane moves, side by side
  static constexpr int kBatch = 32 / kEach;    // rows on their way at once
  using Words = std::uint32_t[kEach / 2];      // what a lane moves, as it is stored

  __device__ void arrive(ptx::Barrier& barrier) {
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(barrier);
  }

  // Where an element of q lies in its row in shared memory. With e4m3 keys a lane reads 16 of their elements at once
  // and takes them in that order for the products' columns; q follows.
  static __device__ int column(int d) {
    if (!C::kE4m3) return d;
    return d / 64 * 64 + d % 16 / 4 * 16 + d % 4 / 2 * 8 + d % 64 / 16 * 2 + d % 2;
  }

  // Loads that nothing waits for yet.
  __device__ void request_rows(const Piece& piece, int first_row, int rows, Words (&words)[kBatch]) {
#pragma unroll
    for (int n = 0; n < kBatch; ++n) {
      const int row = first_row + n * kQueryWarps;
      if (row < rows) request_row(piece, row, words[n]);
    }
  }

  __device__ void place_rows(const Piece& piece, int first_row, int rows, const Words (&words)[kBatch]) {
#pragma unroll
    for (int n = 0; n < kBatch; ++n) {
      const int row = first_row + n * kQueryWarps;
      if (row >= rows) continue;
      float x[kEach];
      unpack(words[n], x);
      write_row(piece, row, x);
    }
  }

  __device__ void load_rotated_row(const Piece& piece, int row) {
    const AttentionProblem& problem = p.problem;
    const QueryRow at(p, piece, row);
    const std::byte* from = at.address(p, piece);
    const std::int64_t position = problem.seqused_k[piece.sequence] + (problem.append.by_row ? at.i : 0);
    const int first = lane * kEach;
    float x[kEach] = {};
    const bool exists = at.i < piece.sq;
#pragma unroll 1
    for (int n = 0; n < kEach; ++n) {
      const float value = exists && first + n < problem.D
                              ? load_rotated(from, problem.q.dtype, first + n, problem.append.rotary, position)
                              : 0.0f;
#pragma unroll
      for (int m = 0; m < kEach; ++m) x[m] = m == n ? value : x[m];
    }
    write_row(piece, row, x);
  }

  // Rows that do not exist, and what lies behind the head's size, become zeros. Rows lie at multiples of 16 bytes, and
  // sizes are multiples of 8 elements (e4m3: 16).
  __device__ void request_row(const Piece& piece, int row, Words& words) {
    const AttentionProblem& problem = p.problem;
    const QueryRow at(p, piece, row);
    const int first = lane * kEach;
#pragma unroll
    for (std::uint32_t& word : words) word = 0;
    if (at.i >= piece.sq || first >= static_cast<int>(problem.D)) return;
    const std::byte* from = at.address(p, piece);
    if (problem.q.dtype != DType::f8e4m3) {
      const auto* place = reinterpret_cast<const volatile std::uint32_t*>(from) + first / 2;
#pragma unroll
      for (int n = 0; n < kEach / 2; ++n) words[n] = place[n];
    } else if constexpr (kEach == 2) {
      words[0] = reinterpret_cast<const volatile std::uint16_t*>(from)[first / 2];
    } else {
      const auto* place = reinterpret_cast<const volatile std::uint32_t*>(from) + first / 4;
#pragma unroll
      for (int n = 0; n < kEach / 4; ++n) words[n] = place[n];
    }
  }

  __device__ void unpack(const Words& words, float (&x)[kEach]) const {
    const DType dtype = p.problem.q.dtype;
#pragma unroll
    for (int n = 0; n < kEach / 2; ++n) {
      const std::uint32_t narrow = words[n / 2] >> 16 * (n % 2);
      const float2 pair = dtype == DType::bf16  ? ptx::unpack2<__nv_bfloat16>(words[n])
                          : dtype == DType::f16 ? ptx::unpack2<__half>(words[n])
                                                : ptx::unpack2<__half>(ptx::e4m3x2_to_f16x2(narrow));
      x[2 * n] = pair.x;
      x[2 * n + 1] = pair.y;
    }
  }

  __device__ void write_row(const Piece& piece, int row, float (&x)[kEach]) {
    const AttentionProblem& problem = p.problem;
    const int first = lane * kEach;
    float factor = p.problem.scale;
    if constexpr (C::kE4m3) {
      const QueryRow at(p, piece, row);
      // A power of two brings the row's largest element to [1, 2): any bfloat16 row then fits float16.
      float largest = 0.0f;
#pragma unroll
      for (int n = 0; n < kEach; ++n) largest = fmaxf(largest, fabsf(x[n]));
#pragma unroll
      for (int step = 1; step < 32; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, step));
      const bool usual = largest > 1e-30f && largest < 1e30f;  // else it stays as it is
      const std::uint32_t exponent = usual ? __float_as_uint(largest) & 0x7F800000u : 0x3F800000u;
      const float shrink = __uint_as_float(0x7F000000u - exponent);
#pragma unroll
      for (int n = 0; n < kEach; ++n) x[n] *= shrink;
      factor *= __uint_as_float(exponent) * problem.q_scale.at(piece.sequence, piece.q_begin + at.i, at.h);
      if (!C::kKeyScales) factor *= problem.k_scale.at(piece.cache_row, 0, at.kv_head);
    }
    if (lane == 0) control.row_factor[row] = factor;
    if constexpr (C::kQSwizzled) {
      static_assert(kEach == 8);  // one 16-byte chunk of a panel's row
      const int panel = lane / 8;
      auto* to = reinterpret_cast<uint4*>(shared.q() + (panel * kGroupRows + row) * kPanel) + (lane % 8 ^ row % 8);
      *to = make_uint4(ptx::pack2<T>(x[0], x[1]), ptx::pack2<T>(x[2], x[3]), ptx::pack2<T>(x[4], x[5]),
                       ptx::pack2<T>(x[6], x[7]));
    } else {
      auto* to = reinterpret_cast<T*>(shared.q() + row * C::kQPitch);
#pragma unroll
      for (int n = 0; n < kEach; n += 2) {
        *reinterpret_cast<std::uint32_t*>(to + column(first + n)) = ptx::pack2<T>(x[n], x[n + 1]);
      }
    }
  }

  // Whether the page or cache row of a new key exists. What is read there is the nearest one's, clamped, but that is
  // another sequence's to write.
  __device__ bool has_place(const Piece& piece, int slot) const {
    const AttentionProblem& problem = p.problem;
    const std::int32_t* const at =
        problem.page_table.data != nullptr ? problem.page_table.data + piece.sequence * problem.page_table_stride +
                                                 static_cast<unsigned>(slot) / static_cast<unsigned>(problem.page_size)
        : problem.cache_batch_idx.data != nullptr ? problem.cache_batch_idx.data + piece.sequence
                                                  : nullptr;
    return at == nullptr || static_cast<unsigned>(*at) < static_cast<unsigned>(problem.k_batches);
  }

  // Writes those new keys and values that lie in this piece's blocks.
  __device__ void append(const Piece& piece) {
    const AttentionProblem& problem = p.problem;
    if (piece.row != 0) return;
    const int count = static_cast<int>(problem.k_appended);
    // seqused_k may say anything. What it puts beyond these limits has no place in the cache, and is dropped.
    const int length = min(max(problem.seqused_k[piece.sequence], -count), piece.end_slot);
    const int from = max(max(length, piece.first_slot), 0);
    const int to = min(min(length + count, piece.first_slot + piece.blocks * p.plan.block), piece.end_slot);
    const int rows = max(to - from, 0) * p.plan.heads;
#pragma unroll 1
    for (int n = warp; n < rows; n += kQueryWarps) {
      const int slot = from + n / p.plan.heads, h = piece.head + n % p.plan.heads;
      if (!has_place(piece, slot)) continue;
      const AttentionProblem::Slot at = problem.key_slot(piece.sequence, Sequence{}, slot);
      store_row(problem.append.k_new.at(piece.sequence, slot - length, h), problem.append.k_new.dtype,
                problem.k.at(at.batch, at.row, h), static_cast<int>(problem.D), problem.append.rotary, slot,
                problem.k_scale.data ? problem.k_scale.place(at.batch, at.row, h) : nullptr,
                problem.append.finds_k_scale);
      store_row(problem.append.v_new.at(piece.sequence, slot - length, h), problem.append.v_new.dtype,
                problem.v.at(at.batch, at.row, h), static_cast<int>(problem.Dv), RotaryTables{}, slot,
                problem.v_scale.data ? problem.v_scale.place(at.batch, at.row, h) : nullptr,
                problem.append.finds_v_scale);
    }
  }

  // place: of an e4m3 row's scale, where it is read (null: 1) or, if it is to be found, written.
  __device__ void store_row(const std::byte* from, DType dtype, std::byte* to, int size, const RotaryTables& tables,
                            int position, float* place, bool finds) {
    float scale = 1.0f;
    if constexpr (C::kE4m3) {
      if (C::kKeyScales && finds) {
        float largest = 0.0f;
#pragma unroll 1
        for (int n = lane; n < size; n += 32) {
          largest = fmaxf(largest, fabsf(load_rotated(from, dtype, n, tables, position)));
        }
#pragma unroll
        for (int step = 1; step < 32; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, step));
        scale = row_scale(largest);
        if (lane == 0) *place = scale;
      } else if (place != nullptr) {
        scale = *place;
      }
    }
#pragma unroll 1
    for (int n = lane; n < size; n += 32) {
      const float x = load_rotated(from, dtype, n, tables, position);
      if constexpr (C::kE4m3) {
        reinterpret_cast<std::uint8_t*>(to)[n] = ptx::float_to_e4m3(x / scale);
      } else {
        reinterpret_cast<T*>(to)[n] = static_cast<T>(x);
      }
    }
  }

  const Params& p;
  const SharedMemory<C> shared;
  Control& control;
  const int warp, lane;
};

}  // namespace heddle::cuda::sm90::attention_decode
