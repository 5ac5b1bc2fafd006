// A warpgroup whose warps multiply each for itself (mma.sync): for few tokens, where a wgmma with weights from
// registers takes several times as long as its products.
#pragma once

#include "cuda/common/hand_over.cuh"
#include "cuda/common/ptx/matrix.cuh"
#include "cuda/common/ring.cuh"
#include "cuda/sm90/linear/producer.cuh"
#include "cuda/sm90/linear_w4a16/config.h"

namespace heddle::cuda::sm90::linear_w4a16 {

using cuda::linear::codes_at, cuda::linear::HalfBlock, cuda::linear::load_half, cuda::linear::scales_at;

template <class C>
class WarpConsumer {
 public:
  using Memory = SharedMemory<C>;

  __device__ WarpConsumer(SharedMemory<C>& memory, int row_group, int column_group, int x_rows)
      : panel_bytes(x_rows * linear::kPanelBytes) {
    const int thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32, token = lane % 8;
    const std::uint32_t block = ptx::shared_address(&memory.weights[0][row_group * C::kRowBlocks][column_group]);
    codes = ptx::pinned(block + codes_at(thread));
    scales = ptx::pinned(block + scales_at(thread));
    // Lanes 8 i to 8 i + 7 name the rows of matrix i, 8 tokens by 8 columns: in a row of the swizzle piece i for the
    // first two of four steps, and the one with a bit changed for the others.
    x = ptx::pinned(ptx::shared_address(memory.x[0]) + C::kBlockPanels * column_group * panel_bytes +
                    token * linear::kPanelBytes + ((lane / 8) ^ token) * 16);
    ready = ptx::pinned(ptx::shared_address(memory.ready));
    static_assert(sizeof(memory.ready) == C::kStages * sizeof(ptx::Barrier));  // and free lies behind it
  }

  // The next `units`. Where a unit has no block of columns for this warpgroup, x is zero and the weights are others.
  __device__ __forceinline__ void multiply(int units, linear::Sums<C>& sums) {
    linear::Sums<C> odd;  // of the second half of each block: half as many products wait for one another
    const auto for_each_sum = [](auto visit) {
#pragma unroll
      for (int r = 0; r < C::kRowBlocks; ++r) {
#pragma unroll
        for (int i = 0; i < C::kAccumulators; ++i) visit(r, i);
      }
    };
    for_each_sum([&](int r, int i) { sums[r][i] = odd[r][i] = 0.0f; });
#pragma unroll 1
    for (; units > 0; --units) {
      const std::uint32_t barrier = ready + stage.index * sizeof(ptx::Barrier);
      await_filled(barrier, stage.phase);
      const std::uint32_t free = barrier + C::kStages * sizeof(ptx::Barrier);
      const bool released = planted_release(Plant::late_key_reads, free);
      Half first, second;
      load(0, first);
      if constexpr (kRegistersForTwo) {
        load(1, second);
        multiply(first, sums);
        if (!released) release_after_reads(free);  // by now the loads have returned, and the fence waits for nothing
        multiply(second, odd);
      } else {
        multiply(first, sums);
        load(1, second);
        multiply(second, sums);
        if (!released) release_after_reads(free);
      }
      stage.next();
    }
    if constexpr (kRegistersForTwo) for_each_sum([&](int r, int i) { sums[r][i] += odd[r][i]; });
  }

 private:
  using T = typename C::Element;
  static constexpr bool kRegistersForTwo = C::kRowBlocks * C::kTokens <= 16;  // halves of blocks at once

  struct Half {
    HalfBlock weights[C::kRowBlocks];
    std::uint32_t x[2][C::kTokens / 8][4];  // of two steps each
  };

  __device__ __forceinline__ void load(int half, Half& to) const {
    constexpr int kStageWeights = C::kTileBlocks * C::kUnitBlocks * sizeof(typename C::WeightBlock);
    constexpr int kRowWeights = C::kUnitBlocks * sizeof(typename C::WeightBlock);
    constexpr int kStageX = sizeof(SharedMemory<C>::x[0]);
    const int weights = stage.index * kStageWeights;
#pragma unroll
    for (int r = 0; r < C::kRowBlocks; ++r) {
      to.weights[r] = load_half(codes + weights + r * kRowWeights, scales + weights + r * kRowWeights, half);
    }
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const std::uint32_t from = (x ^ pair * 64) + stage.index * kStageX + half * panel_bytes;
#pragma unroll
      for (int j = 0; j < C::kTokens / 8; ++j) ptx::load_matrix_x4(to.x[pair][j], from + j * 1024);
    }
  }

  __device__ __forceinline__ static void multiply(const Half& half, linear::Sums<C>& sums) {
    const auto steps = [&]<int kPair>() {
#pragma unroll
      for (int r = 0; r < C::kRowBlocks; ++r) {
        std::uint32_t a[2][4];
        decode<T, kPair>(half.weights[r], a);
#pragma unroll
        for (int step = 0; step < 2; ++step) {
#pragma unroll
          for (int j = 0; j < C::kTokens / 8; ++j) {
            const auto& b = half.x[kPair][j];
            ptx::mma_16816<T>(reinterpret_cast<float(&)[4]>(sums[r][4 * j]), a[step], b[2 * step], b[2 * step + 1]);
          }
        }
      }
    };
    steps.template operator()<0>();
    steps.template operator()<1>();
  }

  const int panel_bytes;                  // of x in a stage
  std::uint32_t codes, scales, x, ready;  // addresses in shared memory, of the first stage
  RingPosition<C::kStages> stage;
};

}  // namespace heddle::cuda::sm90::linear_w4a16
