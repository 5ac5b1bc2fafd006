// What the tensor cores do for a consumer warp, 16 keys of one kv head at a time: S = Q K^T and O += P V, with rows in
// M as they come and keys in N.
#pragma once

#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/common/ptx/matrix.cuh"
#include "cuda/common/ptx/memory.cuh"
#include "cuda/sm90/attention_decode/fragments.cuh"
#include "cuda/sm90/attention_decode/tile.cuh"

namespace heddle::cuda::sm90::attention_decode {

template <class C>
class Products : protected Fragments<C> {
 protected:
  using Base = Fragments<C>;
  using Base::kSteps, Base::kTiles, Base::o, Base::p, Base::q;
  using typename Base::T;
  using ScoreTile = float[kKeyTile / 8][4];

  using Base::Base;

  // S of 16 keys from `key` on.
  __device__ void score(std::uint32_t tile, const KeyRows& rows, int key, ScoreTile (&s)[kTiles]) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int n = 0; n < 8; ++n) s[m][n / 4][n % 4] = 0.0f;
    }
    // Two sums, so that products wait for each other half as long.
    constexpr bool kTwo = C::kQInRegisters;
    ScoreTile second[kTiles] = {};
    if constexpr (C::kE4m3) {
      // A lane reads 16 columns of keys lane / 4 and lane / 4 + 8 at once: four steps' worth.
      const int lane = Base::lane(), row0 = rows.row(key + lane / 4), row1 = rows.row(key + lane / 4 + 8);
#pragma unroll C::kQInRegisters ? kSteps / 4 : 1
      for (int chunk = 0; chunk < kSteps / 4; ++chunk) {
        const std::uint32_t panel = tile + chunk / 2 * p.plan.panel_bytes;
        const int c = chunk % 2 * 4 + lane % 4;
        const uint4 k0 = ptx::load_shared_16(chunk_address(panel, row0, c));
        const uint4 k1 = ptx::load_shared_16(chunk_address(panel, row1, c));
        const std::uint32_t words0[4] = {k0.x, k0.y, k0.z, k0.w}, words1[4] = {k1.x, k1.y, k1.z, k1.w};
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const std::uint32_t b[4] = {ptx::e4m3x2_to_f16x2(words0[n]), ptx::e4m3x2_to_f16x2(words0[n] >> 16),
                                      ptx::e4m3x2_to_f16x2(words1[n]), ptx::e4m3x2_to_f16x2(words1[n] >> 16)};
          multiply(4 * chunk + n, b, kTwo && n % 2 == 1 ? second : s);
        }
      }
    } else {
      // Lanes 0-7 and 8-15 name keys 0-7, columns 0-7 and 8-15 of a step; 16-31 keys 8-15.
      const int lane = Base::lane(), row = rows.row(key + lane / 16 * 8 + lane % 8);
#pragma unroll C::kQInRegisters ? kSteps : 4
      for (int step = 0; step < kSteps; ++step) {
        std::uint32_t b[4];
        ptx::load_matrix_x4(b, chunk_address(tile + step / 4 * p.plan.panel_bytes, row, step % 4 * 2 + lane / 8 % 2));
        multiply(step, b, kTwo && step % 2 == 1 ? second : s);
      }
    }
    if constexpr (kTwo) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int n = 0; n < 8; ++n) s[m][n / 4][n % 4] += second[m][n / 4][n % 4];
      }
    }
  }

  // O += P V for 16 values from `key` on. kMasked: values that nobody attends count as zeros, whatever they are: P is
  // zero there, but zero times NaN is not.
  template <bool kMasked>
  __device__ void add_values(std::uint32_t tile, const KeyRows& rows, int key,
                             const std::uint32_t (&probabilities)[kTiles][4], const std::uint32_t (&kept)[2]) {
    // Lanes 0-7 and 8-15 name keys 0-7 and 8-15 of one 16-byte chunk; 16-31 of the next.
    const int lane = Base::lane(), row = rows.row(key + lane % 16);
    constexpr int kChunks = C::kSize * C::kKeyBytes / 16;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; chunk += 2) {
      std::uint32_t v[4];
      ptx::load_matrix_x4_transposed(v,
                                     chunk_address(tile + chunk / 8 * p.plan.panel_bytes, row, chunk % 8 + lane / 16));
      if constexpr (C::kE4m3) {
        // A word holds two columns of each of two keys: the even one's pair of keys, and the odd one's.
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const std::uint32_t low = __byte_perm(v[2 * c], 0, 0x3120), high = __byte_perm(v[2 * c + 1], 0, 0x3120);
          add<kMasked>(2 * (chunk + c), ptx::e4m3x2_to_f16x2(low), ptx::e4m3x2_to_f16x2(high), probabilities, kept);
          add<kMasked>(2 * (chunk + c) + 1, ptx::e4m3x2_to_f16x2(low >> 16), ptx::e4m3x2_to_f16x2(high >> 16),
                       probabilities, kept);
        }
      } else {
        add<kMasked>(chunk, v[0], v[1], probabilities, kept);
        add<kMasked>(chunk + 1, v[2], v[3], probabilities, kept);
      }
    }
  }

 private:
  __device__ void multiply(int step, const std::uint32_t (&b)[4], ScoreTile (&s)[kTiles]) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      if constexpr (!C::kQInRegisters) this->load_q(m, step);
      const auto& a = q[C::kQInRegisters ? step : 0];
      ptx::mma_16816<T>(s[m][0], a, b[0], b[1]);
      ptx::mma_16816<T>(s[m][1], a, b[2], b[3]);
    }
  }

  template <bool kMasked>
  __device__ void add(int column, std::uint32_t b0, std::uint32_t b1, const std::uint32_t (&probabilities)[kTiles][4],
                      const std::uint32_t (&kept)[2]) {
    if constexpr (kMasked) {
      b0 &= kept[0];
      b1 &= kept[1];
    }
#pragma unroll
    for (int m = 0; m < kTiles; ++m) ptx::mma_16816<T>(o[m][column], probabilities[m], b0, b1);
  }
};

}  // namespace heddle::cuda::sm90::attention_decode
