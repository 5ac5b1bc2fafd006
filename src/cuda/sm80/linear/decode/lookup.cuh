// nf4 and fp4_bnb: values of a table, of rows whose groups have scales in float32.
#pragma once

#include "cuda/sm80/linear/decode/codes.cuh"

namespace heddle::cuda::sm80::linear {

// The table has what a byte of two codes stands for, two numbers in a word, as [256][copies]: with a copy for each lane
// no two of them want the same bank.
template <class T>
struct Lookup {
  using Element = T;
  using Piece = uint4;
  using Group = NoGroup;
  static constexpr int kBlockColumns = lowbit::kBlockColumns, kPiecePairs = 2;
  static constexpr int kBlockBytes = lowbit::block_layout({.element = lowbit::Element::nf4, .group = 32}).bytes;
  static constexpr bool kGroups = true;
  static constexpr float kFactor = 1;
  static constexpr bool kTable = true;

  __device__ Lookup(const Params& params, std::uint32_t table)
      : stride(params.lookup_copies * 4), own(table + threadIdx.x % params.lookup_copies * 4) {}

  __device__ static void write_table(const Params& p, std::uint32_t* table, int thread, int threads) {
    for (int i = thread; i < 256 * p.lookup_copies; i += threads) {
      const int pair = i / p.lookup_copies;
      table[i] = ptx::pack2<T>(p.lookup[pair % 16], p.lookup[pair / 16]);
    }
  }

  __device__ Piece load(std::uint32_t block, int n) const { return codes.load(block, n); }
  __device__ Group group(std::uint32_t, int) const { return {}; }
  __device__ float2 scales(std::uint32_t block, int n) const { return group_scales<float>(block, row, n); }

  __device__ void decode(const Piece& piece, Group, int pair, std::uint32_t (&a)[2][4]) const {
    look_up(pair == 0 ? piece.x : piece.z, a[0]);
    look_up(pair == 0 ? piece.y : piece.w, a[1]);
  }

 private:
  __device__ void look_up(std::uint32_t q, std::uint32_t (&a)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = ptx::load_shared_4(own + __byte_perm(q, 0, 0x4440 + i) * stride);
  }

  const Codes codes;
  const std::uint32_t stride, own, row = ptx::pinned(row_in_block());
};

}  // namespace heddle::cuda::sm80::linear
