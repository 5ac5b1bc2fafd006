// Copies of weights and x into the stages. Every thread brings a part, and every column group its own blocks.
#pragma once

#include "cuda/any/linear/schedule.cuh"
#include "cuda/common/ptx/memory.cuh"
#include "cuda/common/ptx/shared.cuh"
#include "cuda/sm80/linear/config.h"

namespace heddle::cuda::sm80::linear {

using cuda::linear::Part, cuda::linear::part_of;

// The units of this CTA, one after the other; of each the block of columns that this column group has, if there is one.
template <class C>
class Loader {
  using D = typename C::Decoder;
  using T = typename C::Element;
  static constexpr int kPieces = D::kBlockColumns / 8;  // of 16 bytes in a row of x
  static constexpr int kTokensAtOnce = C::kSharers / kPieces, kRounds = C::kTokens / kTokensAtOnce;
  static constexpr int kCodes = sizeof(lowbit::FragmentCodes), kRow = C::kColumnGroups * D::kBlockBytes;
  static_assert(kRounds * kTokensAtOnce == C::kTokens && kTokensAtOnce % 8 == 0 && C::kRowBlocks <= 2);

 public:
  __device__ Loader(const Params& params, int row_group, int column_group)
      : p(params), row(row_group), column(column_group) {
    const std::uint32_t own = threadIdx.x % 128, thread = row * 128 + own;
    token = static_cast<int>(ptx::pinned(thread / kPieces));
    piece = static_cast<int>(ptx::pinned(thread % kPieces));
    weights_to =
        ptx::pinned(offsetof(Stage<C>, weights) + row * C::kRowBlocks * kRow + column * D::kBlockBytes + own * 16);
    x_to = ptx::pinned(column * (C::kPanels * C::kPanelBytes) + piece / 8 * C::kPanelBytes + token * 128 +
                       ((piece ^ token) % 8) * 16);
    rest = static_cast<int>(own) * 16 < p.block_bytes - kCodes;
    enter();
  }

  __device__ bool done() const { return part.begin == part.end; }

  // stage: its address in shared memory.
  __device__ __forceinline__ void weights(std::uint32_t stage) const {
    if (block >= p.schedule.k_blocks) return;
    std::uint32_t to = stage + weights_to;
#pragma unroll
    for (int r = 0; r < C::kRowBlocks; ++r, to += kRow) {
      const std::byte* const from = weights_at + r * row_step;
      ptx::copy_async_16(to, from, true);
      ptx::copy_async_16(to + 128 * 16, from + 128 * 16, true);
      if (rest) ptx::copy_async_16(to + kCodes, from + kCodes, true);
    }
  }

  __device__ __forceinline__ void x(std::uint32_t stage) const {
    if (block >= p.schedule.k_blocks) return;
    const bool column_exists = block * D::kBlockColumns + piece * 8 < p.k;
    const std::uint32_t to = stage + x_to;
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int first = i * kTokensAtOnce;
      if (first >= C::kTokens / 2 && live <= C::kTokens / 2) break;  // nobody reads them
      ptx::copy_async_16(to + first * 128, x_at + first * p.x_stride, column_exists && token + first < live);
    }
  }

  __device__ __forceinline__ void next() {
    block += C::kColumnGroups;
    weights_at += C::kColumnGroups * p.block_bytes;
    x_at += C::kColumnGroups * D::kBlockColumns;
    if (++part.begin < part.end) return;
    ++number;
    enter();
  }

 private:
  __device__ void enter() {
    const Schedule& s = p.schedule;
    part = part_of<C>(s, number);
    block = part.begin * C::kUnitBlocks + column;
    // Behind the last rows these once more, for nothing.
    const int row_block = min(part.row_block + row * C::kRowBlocks, s.row_blocks - 1);
    row_step = row_block + 1 < s.row_blocks ? s.k_blocks * p.block_bytes : 0;
    weights_at = p.weights + (static_cast<std::int64_t>(row_block) * s.k_blocks + block) * p.block_bytes +
                 threadIdx.x % 128 * 16;
    x_at = static_cast<const T*>(p.x) + (part.token + token) * p.x_stride + block * D::kBlockColumns + piece * 8;
    live = p.out.m - part.token;
  }

  const Params& p;
  const int row, column;
  int token, piece;                // of x, that this thread copies first
  std::uint32_t weights_to, x_to;  // where this thread's copies go in a stage
  bool rest;                       // whether it copies a piece of what lies behind the codes
  int number = 0, block, row_step, live;
  Part part;  // what is left of it
  const std::byte* weights_at;
  const T* x_at;
};

// Until all copies but those of the last `stages - 2` commits have landed.
__device__ inline void wait_for_stage(int stages) {
  if (stages == 6) {
    ptx::copy_async_wait<4>();
  } else if (stages == 4) {
    ptx::copy_async_wait<2>();
  } else if (stages == 3) {
    ptx::copy_async_wait<1>();
  } else {
    ptx::copy_async_wait<0>();
  }
}

}  // namespace heddle::cuda::sm80::linear
