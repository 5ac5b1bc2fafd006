// What becomes of sums in registers: dQ is added up in global memory, dK and dV are rounded and written.
#pragma once

#include "cuda/common/shared_sums.cuh"
#include "cuda/sm80/attention_bwd/scores.cuh"

namespace heddle::cuda::sm80::attention_bwd {

// This warp's share of a query tile's sums of dQ: fragments of 128 floats, so that additions are whole lines.
template <class C>
__device__ inline float* dq_sums_of(const Params& p, std::int64_t stored_row, int h, int tile) {
  const std::int64_t row = h * p.rows_per_head + stored_row + std::int64_t{tile} * C::kTileQ;
  const unsigned warp = threadIdx.x / 32;
  constexpr int kOfWarp = C::Rows::kGroups * C::Rows::kBlocks * 128;
  return p.dq_sums + (row * C::kHeadSize + warp * kOfWarp);
}

// Calls visit(fragment, sums of it) for the blocks of a warp's share from `first` on.
template <class C, int kBlocks, class Visit>
__device__ inline void for_each_fragment(float* share, int first, float (&sums)[C::Rows::kGroups][kBlocks][4],
                                         Visit visit) {
#pragma unroll
  for (int g = 0; g < C::Rows::kGroups; ++g) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) visit(share + (g * C::Rows::kBlocks + first + n) * 128, sums[g][n]);
  }
}

// The first `count` elements of a piece, one by one.
template <class T>
__device__ inline void store_elements(T* to, std::int64_t stride, uint4 piece, int count) {
#pragma unroll 1
  for (int n = 0; n < count; ++n, to += stride) {
    *reinterpret_cast<std::uint16_t*>(to) = static_cast<std::uint16_t>(piece.x);
    piece.x = __funnelshift_r(piece.x, piece.y, 16);
    piece.y = __funnelshift_r(piece.y, piece.z, 16);
    piece.z = __funnelshift_r(piece.z, piece.w, 16);
    piece.w >>= 16;
  }
}

// Neighbouring columns of a row whose sums a lane has.
template <class C>
struct alignas(Float32<C> ? 16 : 8) Run {
  static constexpr int kColumns = Float32<C> ? 4 : 2;
  float x[kColumns];

  __device__ void add(const Run& other) {
#pragma unroll
    for (int n = 0; n < kColumns; ++n) x[n] += other.x[n];
  }
};

// The rows below `rows` and the columns below `size` of an f32 output.
struct FloatRows {
  float* row0;
  std::int64_t stride_s, stride_d;
  bool in_runs;  // may be read and written so
  int rows, size;

  template <class C>
  __device__ Run<C> load(int row, int column) const {
    Run<C> run{};
    visit<C>(row, column, run, [](auto& x, const auto& at) { x = at; });
    return run;
  }
  template <class C>
  __device__ void store(int row, int column, Run<C> run) const {
    visit<C>(row, column, run, [](const auto& x, auto& at) { at = x; });
  }

 private:
  template <class C, class Move>
  __device__ void visit(int row, int column, Run<C>& run, Move move) const {
    if (row >= rows || column >= size) return;
    float* const at = row0 + row * stride_s + column * stride_d;
    if (in_runs) {
      move(run, *reinterpret_cast<Run<C>*>(at));
    } else {
#pragma unroll
      for (int n = 0; n < Run<C>::kColumns; ++n) {
        if (column + n < size) move(run.x[n], at[n * stride_d]);
      }
    }
  }
};

// Four blocks of sums of a group, times `scale`, to rows `row` and `row` + 8 of f32 and columns from `column` on, both
// those of the blocks' first element. A row leaves in runs of 32 bytes from four lanes, of 128 where the operands are
// f32 too. What is added to gets the sum as it is rounded, so no FMA. kRows: of the two, those whose elements are on
// their way together, in as many registers; kLoops: both by one code, which takes fewest.
template <class C, int kRows, bool kLoops = false>
__device__ inline void store_floats(const float (*sums)[4], float scale, bool accumulate, const FloatRows& to, int row,
                                    int column) {
  constexpr int kRuns = 8 / Run<C>::kColumns;  // of a lane in a row
  const int lane = static_cast<int>(threadIdx.x) % 32;
  row += lane / 4;
  column += Run<C>::kColumns * kRuns / (Float32<C> ? 1 : 4) * (lane % 4);
  constexpr int kNext = Float32<C> ? 4 : 8;  // columns from a run of the lane to its next
#pragma unroll(kLoops ? 1 : 2)
  for (int from = 0; from < 2; from += kRows) {
    Run<C> before[kRows][kRuns];
    if (accumulate) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int n = 0; n < kRuns; ++n) before[r][n] = to.load<C>(row + 8 * (from + r), column + kNext * n);
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int n = 0; n < kRuns; ++n) {
        Run<C> run;
#pragma unroll
        for (int i = 0; i < Run<C>::kColumns; ++i) {
          const float* const block = sums[Float32<C> ? i : n];
          const int at = Float32<C> ? n : i;
          run.x[i] = __fmul_rn(from + r == 0 ? block[at] : block[2 + at], scale);
        }
        if (accumulate) run.add(before[r][n]);
        to.store<C>(row + 8 * (from + r), column + kNext * n, run);
      }
    }
  }
}

// store_sums() to 16 bits: a row leaves in runs of 64 bytes from four lanes.
template <class C, class ShareOfWarp>
requires(!Float32<C>) __device__
    inline void store_rounded(const Params& p, const typename ShareOfWarp::Sums& sums, float scale, const Operand& x,
                              std::byte* row0, int rows, std::int64_t size) {
  using T = typename C::Element;
  constexpr int kPiece = 8;
  const unsigned warp = threadIdx.x / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int first_column = static_cast<int>(ShareOfWarp::first_column(warp)) + kPiece * (lane % 4);
#pragma unroll
  for (int g = 0; g < ShareOfWarp::kGroups; ++g) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = static_cast<int>(ShareOfWarp::first_row(warp)) + kGroupRows * g + 8 * r + lane / 4;
      T* const to = reinterpret_cast<T*>(row0) + row * x.stride_s;
#pragma unroll
      for (int n = 0; n < ShareOfWarp::kBlocks; n += 4) {
        const uint4 piece = piece_of<C>(sums[g], n, 2 * r, lane, scale);
        const int column = first_column + 8 * n;
        if (row >= rows || column >= size) continue;
        if (p.out_pieces) {
          *reinterpret_cast<uint4*>(to + column) = piece;
        } else {
          store_elements(to + column * x.stride_d, x.stride_d, piece, min(static_cast<int>(size) - column, kPiece));
        }
      }
    }
  }
}

// Rows and columns of an output's head as far as they exist, if it is f32. row0: its row 0.
__device__ inline FloatRows float_rows(const Params& p, const Operand& x, std::byte* row0, int rows,
                                       std::int64_t size) {
  return {reinterpret_cast<float*>(row0), x.stride_s, x.stride_d, p.out_pieces, rows, static_cast<int>(size)};
}

// A warp's share of sums, times `scale`, to the rows below `rows` of an output's head with `size` columns. row0: its
// row 0. kRows: of store_floats().
template <class C, class ShareOfWarp, int kRows>
__device__ inline void store_sums(const Params& p, const typename ShareOfWarp::Sums& sums, float scale,
                                  const Operand& x, std::byte* row0, int rows, std::int64_t size) {
  static_assert(ShareOfWarp::kBlocks % 4 == 0);
  if constexpr (!Float32<C>) {
    if (x.dtype != DType::f32) {
      store_rounded<C, ShareOfWarp>(p, sums, scale, x, row0, rows, size);
      return;
    }
  }
  const FloatRows to = float_rows(p, x, row0, rows, size);
  const unsigned warp = threadIdx.x / 32;
#pragma unroll
  for (int g = 0; g < ShareOfWarp::kGroups; ++g) {
#pragma unroll
    for (int n = 0; n < ShareOfWarp::kBlocks; n += 4) {
      store_floats<C, kRows>(&sums[g][n], scale, p.accumulate, to,
                             static_cast<int>(ShareOfWarp::first_row(warp)) + kGroupRows * g,
                             static_cast<int>(ShareOfWarp::first_column(warp)) + 8 * n);
    }
  }
}

// A split's sums of dK (which = 0) or dV (1) of a tile of keys: of each warp fragments of 128 floats.
template <class C>
__device__ inline float* key_sums_of(const Params& p, int unit, int first_key, int which) {
  const std::int64_t tile = std::int64_t{unit} * p.k_tiles + first_key / C::kTileK;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  return p.key_sums + (2 * tile + which) * (C::kTileK * C::kHeadSize) +
         warp * (C::Keys::kGroups * C::Keys::kBlocks * 128);
}

template <class C>
__device__ inline void store_key_sums(const typename C::Keys::Sums& sums, float* share) {
  float4* const to = reinterpret_cast<float4*>(share) + threadIdx.x % 32;
#pragma unroll
  for (int g = 0; g < C::Keys::kGroups; ++g) {
#pragma unroll
    for (int n = 0; n < C::Keys::kBlocks; ++n) {
      to[32 * (g * C::Keys::kBlocks + n)] = {sums[g][n][0], sums[g][n][1], sums[g][n][2], sums[g][n][3]};
    }
  }
}

template <class C>
__device__ inline void add_key_sums(typename C::Keys::Sums& sums, const float* share) {
  const float4* const from = reinterpret_cast<const float4*>(share) + threadIdx.x % 32;
#pragma unroll
  for (int g = 0; g < C::Keys::kGroups; ++g) {
#pragma unroll
    for (int n = 0; n < C::Keys::kBlocks; ++n) {
      const float4 x = from[32 * (g * C::Keys::kBlocks + n)];
      sums[g][n][0] += x.x;
      sums[g][n][1] += x.y;
      sums[g][n][2] += x.z;
      sums[g][n][3] += x.w;
    }
  }
}

// dK or dV of the CTA's keys.
template <class C, int kRows>
__device__ inline void store_keys(const Params& p, const Work& w, const typename C::Keys::Sums& sums, float scale,
                                  const Operand& x, std::int64_t size) {
  if (x.data == nullptr) return;
  store_sums<C, typename C::Keys, kRows>(p, sums, scale, x, x.at(w.scores.b, w.scores.k_slot + w.first_key, w.kv_head),
                                         w.k_rows - w.first_key, size);
}

}  // namespace heddle::cuda::sm80::attention_bwd
