// y = activation(norm(x) Wᵀ + bias) + residual for so few rows of x that weights are all the time there is: they go
// from global memory to registers, are decoded there and multiplied (mma.sync, Yᵀ = W Xᵀ); only x lies in shared
// memory.
#pragma once

#include "cuda/any/linear/epilogue.cuh"
#include "cuda/any/linear/row_norm.cuh"
#include "cuda/common/ptx/once.cuh"
#include "cuda/sm80/linear_gemv/config.h"
#include "cuda/sm80/linear_gemv/source.cuh"

namespace heddle::cuda::sm80::linear_gemv {

using cuda::linear::Epilogue, cuda::linear::NormedRow, cuda::linear::packed_piece, cuda::linear::kPiece,
    cuda::linear::this_cta, cuda::linear::this_thread;

// Rows of x, normed, into shared memory, and zeros behind their columns.
template <class C>
__device__ inline void stage_x(const Params& p, std::uint32_t to, std::uint32_t pitch) {
  using T = typename C::Element;
  const int pieces = p.k / kPiece, all = p.k_blocks * (C::Source::kBlockColumns / kPiece);
  const auto put = [&](int i, const float(&x)[kPiece]) { ptx::store_shared_16(to + i * 16, packed_piece<T>(x)); };
#pragma unroll 1
  for (int m = 0; m < p.out.m; ++m, to += pitch) {
    const T* const row = static_cast<const T*>(p.x) + m * p.x_stride;
    int copied = 0;  // pieces
    if (p.norm.kind != Norm::none) {
      NormedRow<T, C::kThreads, 1>(p.norm, row, p.k).for_each(put);
      copied = pieces;
    }
#pragma unroll 1
    for (int i = copied + static_cast<int>(threadIdx.x); i < all; i += C::kThreads) {
      ptx::copy_async_16(to + i * 16, row + i * kPiece, i < pieces);
    }
  }
  ptx::copy_async_commit();
  ptx::copy_async_wait<0>();
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kResident) gemv_kernel(const __grid_constant__ Params p) {
  using S = typename C::Source;
  using T = typename C::Element;
  extern __shared__ __align__(1024) std::byte memory[];
  auto& shared = *reinterpret_cast<SharedMemory<C>*>(memory);
  const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32, slab_of_cta = warp % C::kSlabs, group = warp / C::kSlabs;
  constexpr int kSlabsOfBlock = kBlockRows / kSlabRows;
  // Behind the last rows these once more, for nothing.
  const int slab = min(static_cast<int>(blockIdx.x) * C::kSlabs + slab_of_cta, p.row_blocks * kSlabsOfBlock - 1);

  const S source(slab % kSlabsOfBlock * 32 + lane);
  const std::byte* next =
      source.begin(p.weights + (static_cast<std::int64_t>(slab / kSlabsOfBlock) * p.k_blocks + group) * S::kBlockBytes);
  typename S::Registers ring[C::kAhead];
#pragma unroll
  for (int i = 0; i < C::kAhead; ++i, next += C::kGroups * S::kBlockBytes) {
    if (group + i * C::kGroups < p.k_blocks) ring[i] = source.load(next);
  }
  if (threadIdx.x == 0) {  // what the epilogue reads
    const int first = static_cast<int>(blockIdx.x) * (C::kSlabs * kSlabRows);
    ptx::prefetch(p.out.row_scales + first);
    if (p.out.bias != nullptr && first < p.out.n) ptx::prefetch(static_cast<const T*>(p.out.bias) + first);
  }
  const std::uint32_t x = ptx::shared_address(memory + sizeof(SharedMemory<C>));
  const auto pitch = static_cast<std::uint32_t>(x_pitch(p.k_blocks, S::kBlockColumns));
  stage_x<C>(p, x, pitch);
  __syncthreads();

  // Lanes 8 i to 8 i + 7 name the rows of matrix i, 8 tokens by 8 columns. Tokens that are not there have the last
  // one's x.
  constexpr std::uint32_t kBlock = S::kBlockColumns * 2;
  std::uint32_t from = x + min(lane % 8, p.out.m - 1) * pitch + group * kBlock + lane / 8 * 16;
  float sums[2][4] = {};
#pragma unroll 1
  for (int block = group; block < p.k_blocks;) {
#pragma unroll
    for (int i = 0; i < C::kAhead; ++i) {
      const auto multiply = [&]<int kPair>() {
        std::uint32_t b[4], a[2][4];
        ptx::load_matrix_x4(b, from + kPair * 64);
        S::template decode<kPair>(ring[i], a);
        ptx::mma_16816<T>(sums[0], a[0], b[0], b[1]);
        ptx::mma_16816<T>(sums[1], a[1], b[2], b[3]);
      };
      [&]<int... kPair>(std::integer_sequence<int, kPair...>) { (multiply.template operator()<kPair>(), ...); }
      (std::make_integer_sequence<int, S::kPairs>{});
      if (block + C::kAhead * C::kGroups < p.k_blocks) ring[i] = source.load(next);
      next += C::kGroups * S::kBlockBytes;
      from += C::kGroups * kBlock;
      block += C::kGroups;
      if (block >= p.k_blocks) break;
    }
  }

  // In the order of the groups.
  float all[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) all[i] = sums[0][i] + sums[1][i];
  if (group > 0) shared.sums[group][slab_of_cta][this_thread() % 32] = make_float4(all[0], all[1], all[2], all[3]);
  __syncthreads();
  // Computed again: in the loop there are no registers to keep them.
  const int own_slab = this_cta() * C::kSlabs + slab_of_cta;
  if (group > 0 || own_slab >= p.row_blocks * kSlabsOfBlock) return;
#pragma unroll
  for (int i = 1; i < C::kGroups; ++i) {
    const float4 other = shared.sums[i][slab_of_cta][this_thread() % 32];
    all[0] += other.x, all[1] += other.y, all[2] += other.z, all[3] += other.w;
  }
  Epilogue<C>(p.out, own_slab * kSlabRows, shared.staging[slab_of_cta]).store(0, p.out.m, all);
}

}  // namespace heddle::cuda::sm80::linear_gemv
