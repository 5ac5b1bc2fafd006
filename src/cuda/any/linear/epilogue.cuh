// From sums to y: scale, bias, activation, residual, one rounding.
#pragma once

#include "cuda/any/linear/schedule.cuh"
#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/common/ptx/matrix.cuh"
#include "cuda/common/ptx/shared.cuh"

namespace heddle::cuda::linear {

template <class Function>
__device__ inline void for_each(float (&x)[8], Function function) {
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = function(x[i]);
}

__device__ inline float silu(float x) { return x / (1.0f + __expf(-x)); }

// x: of two blocks of tokens two rows, two tokens each.
__device__ inline void activate(Activation activation, float (&x)[8]) {
  constexpr float kRootOfHalf = 0.70710678f, kTwoRootsOfTwoByPi = 1.59576912f;
  if (activation == Activation::relu) {
    for_each(x, [](float y) { return y < 0.0f ? 0.0f : y; });  // NaN stays
  } else if (activation == Activation::gelu_erf) {
    for_each(x, [](float y) { return 0.5f * y * (1.0f + erff(y * kRootOfHalf)); });
  } else if (activation == Activation::gelu_tanh) {
    for_each(x, [](float y) { return y / (1.0f + __expf(-kTwoRootsOfTwoByPi * (y + 0.044715f * y * y * y))); });
  } else if (activation == Activation::silu) {
    for_each(x, silu);
  } else if (activation == Activation::swiglu) {
#pragma unroll
    for (int block = 0; block < 2; ++block) {
#pragma unroll
      for (int n = 4 * block; n < 4 * block + 2; ++n) x[n] = x[n + 2] = silu(x[n]) * x[n + 2];  // of both rows the same
    }
  }
}

// What a thread adds to the sums of its two rows.
template <class T>
__device__ inline float2 biases_of(const Output& out, int row) {
  if (out.bias == nullptr) return make_float2(0.0f, 0.0f);
  const T* const from = static_cast<const T*>(out.bias);
  const bool gated = out.activation == Activation::swiglu;
  const int first = gated ? row / 16 * 16 + 2 * (row % 16) : row, second = gated ? first + 1 : row + 8;
  const int rows = gated ? 2 * out.n : out.n;
  return make_float2(first < rows ? static_cast<float>(from[first]) : 0.0f,
                     second < rows ? static_cast<float>(from[second]) : 0.0f);
}

// Of a block of 64 rows, of which each warp of a warpgroup has 16.
__device__ inline int first_row_of_warp(int row_block) { return row_block * kBlockRows + this_thread() / 32 * 16; }

// A warp's 16 tokens and 16 rows on their way out.
template <class T>
using Staging = T[16][16];

// Four matrices of 8 rows and 8 tokens into a Staging: `row` is where lane 8 i + j has token j of matrix i.
__device__ inline void put_transposed(std::uint32_t row, const std::uint32_t (&matrices)[4]) {
#if __CUDA_ARCH__ >= 900
  ptx::store_matrix_x4_transposed(row, matrices);
#else
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    // Lane 4 j + c now has tokens' outputs 2 c and 2 c + 1 of token j.
    const std::uint32_t to = __shfl_sync(0xffffffff, row, 8 * i + lane / 4);
    ptx::store_shared_4(to + lane % 4 * 4, ptx::transposed(matrices[i]));
  }
#endif
}

// Of a warp's 16 rows, from `row` on.
template <class C>
class Epilogue {
 public:
  using T = typename C::Output;

  // staging: this warp's.
  __device__ Epilogue(const Output& output, int row, Staging<T>& memory)
      : out(output),
        staging(memory),
        lane(this_thread() % 32),
        first_row(row),
        scale{out.row_scales[first_row + lane / 4] * C::kFactor, out.row_scales[first_row + lane / 4 + 8] * C::kFactor},
        biases(biases_of<T>(out, first_row + lane / 4)) {}

  // sums: of 16 tokens from `token` on, or of 8; those from `end` on are not there. False: all after these, too.
  template <int kSums>
  __device__ __forceinline__ bool store(int token, int end, const float (&sums)[kSums]) const {
    if (token >= end) return false;  // one answer in the warp
    const bool gated = out.activation == Activation::swiglu;
    // Each lane copies 8 outputs of a token.
    const int token_of_lane = lane / 2, output = (gated ? first_row / 2 : first_row) + lane % 2 * 8;
    const bool mine = output < out.n && !(gated && lane % 2 == 1) && token + token_of_lane < end;
    // Lanes 0-7 and 16-23 name the tokens of the first 8 outputs, the others those of the next 8.
    const std::uint32_t matrix = ptx::shared_address(&staging[lane / 16 * 8 + lane % 8][lane / 8 % 2 * 8]);
    auto* const piece = reinterpret_cast<uint4*>(&staging[token_of_lane][lane % 2 * 8]);
    std::uint32_t residual[4] = {0, 0, 0, 0};
    if (out.residual != nullptr) {
      const T* const from =
          static_cast<const T*>(out.residual) + (token + token_of_lane) * out.residual_stride + output;
      *piece = mine ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
      __syncwarp();
      ptx::load_matrix_x4_transposed(residual, matrix);
      __syncwarp();
    }
    // Of two blocks of 8 tokens, two rows, two tokens each.
    float y[8] = {};
#pragma unroll
    for (int j = 0; j < kSums / 4; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float of_token = 1.0f;
        if constexpr (C::kTokenScales) {
          const int number = token + 8 * j + 2 * (lane % 4) + c;
          of_token = number < end ? out.token_scales[number] : 0.0f;
        }
        const float* const x = sums + 4 * j + c;
        y[4 * j + c] = fmaf(x[0] * of_token, scale[0], biases.x);
        y[4 * j + 2 + c] = fmaf(x[2] * of_token, scale[1], biases.y);
      }
    }
    activate(out.activation, y);
    std::uint32_t pairs[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float2 more = ptx::unpack2<T>(residual[n]);
      pairs[n] = ptx::pack2<T>(y[2 * n] + more.x, y[2 * n + 1] + more.y);
    }
    put_transposed(matrix, pairs);
    __syncwarp();
    if (mine) {
      *reinterpret_cast<uint4*>(static_cast<T*>(out.y) + (token + token_of_lane) * out.y_stride + output) = *piece;
    }
    __syncwarp();
    return true;
  }

 private:
  const Output& out;
  Staging<T>& staging;
  const int lane, first_row;
  const float scale[2];
  const float2 biases;
};

// Whether finish() has one copy of the epilogue's code, which takes moves: for kernels that are compiled many times.
template <class C>
constexpr bool kOneEpilogue = requires {
  requires C::kOneEpilogue;
};

// What a warpgroup does with the sums of part `n`: all of a tile's, or some that others have more of.
template <class C, class Shared>
__device__ __forceinline__ void finish(const Output& out, const Schedule& s, Shared& shared, int n, int group,
                                       const Sums<C>& sums) {
  if (n < shared_parts(s, this_cta())) {
    leave_partials<C>(s, n, group, sums);
    return;
  }
  auto& staging = shared.staging[group * 4 + this_thread() / 32];
  const Part part = part_of<C>(s, recomputed(n));
  const int end = min(out.m, part.token + C::kTokens);
  if constexpr (kOneEpilogue<C>) {
    // One copy of the code: the sums move down, instead of an index up.
    constexpr int kOf = kSliceSums<C>, kAll = C::kRowBlocks * C::kAccumulators;
    float all[kAll];
#pragma unroll
    for (int i = 0; i < kAll; ++i) all[i] = sums[i / C::kAccumulators][i % C::kAccumulators];
#pragma unroll 1
    for (int i = 0; i < C::kRowBlocks * kSlices<C>; ++i) {
      const int row_block = part.row_block + group * C::kRowBlocks + i / kSlices<C>;
      if (row_block >= s.row_blocks) return;
      float x[kOf];
#pragma unroll
      for (int j = 0; j < kOf; ++j) x[j] = all[j];
      Epilogue<C>(out, first_row_of_warp(row_block), staging).store(part.token + 16 * (i % kSlices<C>), end, x);
#pragma unroll
      for (int j = 0; j + kOf < kAll; ++j) all[j] = all[j + kOf];
    }
  } else {
#pragma unroll
    for (int block = 0; block < C::kRowBlocks; ++block) {
      const int row_block = part.row_block + group * C::kRowBlocks + block;
      if (row_block >= s.row_blocks) return;
      const Epilogue<C> epilogue(out, first_row_of_warp(row_block), staging);
#pragma unroll
      for (int slice = 0; slice < kSlices<C>; ++slice) {
        float x[kSliceSums<C>];
#pragma unroll
        for (int i = 0; i < kSliceSums<C>; ++i) x[i] = sums[block][kSliceSums<C> * slice + i];
        if (!epilogue.store(part.token + 16 * slice, end, x)) break;
      }
    }
  }
}

// After all parts, when what others have left is long there.
template <class C, class Shared>
__device__ __forceinline__ void finish_shared(const Output& out, const Schedule& s, Shared& shared, int group) {
  if (s.shared_tiles == 0) return;
  auto& staging = shared.staging[group * 4 + this_thread() / 32];
  finish_shares<C>(s, group, [&](int tile, int block, int slice, const float(&x)[kSliceSums<C>]) {
    const int row_block = tile % s.row_tiles * C::kTileBlocks + group * C::kRowBlocks + block;
    if (row_block >= s.row_blocks) return;
    const int token = tile / s.row_tiles * C::kTokens;
    Epilogue<C>(out, first_row_of_warp(row_block), staging)
        .store(token + 16 * slice, min(out.m, token + C::kTokens), x);
  });
}

}  // namespace heddle::cuda::linear
