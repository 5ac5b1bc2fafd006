// Rung 6: Hopper's own instructions. One thread copies tiles by the tensor memory accelerator; two warpgroups multiply
// by wgmma, whose operands are in shared memory, and which runs while the warpgroup goes on: the softmax of one tile
// beside P V of the one before. Registers move from the warpgroup that copies to those that compute.
#include "cuda/common/hand_over.cuh"
#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/common/ptx/barrier.cuh"
#include "cuda/common/ptx/tma.cuh"
#include "cuda/common/tensor_map.h"
#include "wgmma_rows.cuh"

namespace ladder {
namespace {

struct Maps {
  CUtensorMap q, k, v;
};

__device__ void copy_tile(Tile& tile, const CUtensorMap& map, ptx::Barrier& ready, int row) {
  ptx::barrier_arrive_expect(ready, sizeof(Tile));
  for (int panel = 0; panel < 2; ++panel) {
    ptx::tma_load_4d(tile.panel[panel], map, ready, 64 * panel, row, blockIdx.y, blockIdx.z, ptx::L2::evict_last);
  }
}

__device__ void produce(const Maps& maps, SharedMemory& shared, int first_row, int tiles) {
  copy_tile(shared.q, maps.q, shared.q_ready, first_row);
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    const int stage = tile % kStages, round = tile / kStages;
    ptx::barrier_wait(shared.k_free[stage], round % 2 ^ 1);
    copy_tile(shared.k[stage], maps.k, shared.k_ready[stage], tile * kKeys);
    ptx::barrier_wait(shared.v_free[stage], round % 2 ^ 1);
    copy_tile(shared.v[stage], maps.v, shared.v_ready[stage], tile * kKeys);
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    warp_specialised(const __grid_constant__ Problem p, const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<SharedMemory*>(memory);
  const int first_row = static_cast<int>(gridDim.x - 1 - blockIdx.x) * kRows;
  const int tiles = p.keys(first_row + kRows - 1) / kKeys;
  if (threadIdx.x == 0) {
    ptx::barrier_init(shared.q_ready, 1);
    for (int n = 0; n < kStages; ++n) {
      ptx::barrier_init(shared.k_ready[n], 1), ptx::barrier_init(shared.v_ready[n], 1);
      ptx::barrier_init(shared.k_free[n], 8), ptx::barrier_init(shared.v_free[n], 8);  // consumer warps
    }
    ptx::fence_barrier_init();
  }
  __syncthreads();
  // Through a shuffle, so that the compiler knows it to be uniform.
  const int warpgroup = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup == 0) {
    ptx::registers_decrease<24>();
    if (threadIdx.x == 0) produce(maps, shared, first_row, tiles);
    return;
  }
  ptx::registers_increase<240>();
  const int thread = static_cast<int>(threadIdx.x) - 128, lane = thread % 32;
  Consumer rows{shared, thread / 32 * 16 + lane / 4};
#pragma unroll
  for (float& element : rows.o) element = 0.0f;
  // A row's last key, seen from this lane's first column.
  const int last_key = p.keys(first_row + rows.row) - 1 - lane % 4 * 2;

  ptx::barrier_wait(shared.q_ready, 0);
  rows.issue_scores(0);
  heddle::cuda::wgmma_wait<0>();
  heddle::cuda::keep(rows.s);
  heddle::cuda::release_after_products(shared.k_free[0]);
  rows.softmax(0, last_key, p.causal && tiles == 1);
  rows.round_probabilities();
#pragma unroll 1
  for (int tile = 1; tile < tiles; ++tile) {
    rows.issue_scores(tile);
    rows.issue_output(tile - 1);
    heddle::cuda::wgmma_wait<1>();
    heddle::cuda::keep(rows.s);
    heddle::cuda::release_after_products(shared.k_free[tile % kStages]);
    rows.softmax(tile * kKeys, last_key, p.causal && tile == tiles - 1);
    heddle::cuda::wgmma_wait<0>();
    heddle::cuda::keep(rows.o);
    heddle::cuda::release_after_products(shared.v_free[(tile - 1) % kStages]);
#pragma unroll
    for (int i = 0; i < 64; ++i) rows.o[i] *= rows.keep[i / 2 % 2];
    rows.round_probabilities();
  }
  rows.issue_output(tiles - 1);
  heddle::cuda::wgmma_wait<0>();
  heddle::cuda::keep(rows.o);

  for (int r = 0; r < 2; ++r) {
    float all = rows.sum[r] + __shfl_xor_sync(0xffffffff, rows.sum[r], 1);
    all = 1.0f / (all + __shfl_xor_sync(0xffffffff, all, 2));
    const std::int64_t row = p.head(blockIdx.z, blockIdx.y) + (first_row + rows.row + 8 * r) * kStride;
    auto* to = reinterpret_cast<std::uint32_t*>(p.o + row + lane % 4 * 2);
#pragma unroll
    for (int j = 0; j < 16; ++j)
      to[4 * j] = ptx::pack2<bf16>(rows.o[4 * j + 2 * r] * all, rows.o[4 * j + 2 * r + 1] * all);
  }
}

void launch(const Problem& p) {
  const auto map = [&](const bf16* x) {
    return heddle::cuda::make_tensor_map(x, heddle::DType::bf16,
                                         heddle::cuda::TensorMapShape<4>{.extent = {kSize, p.length, kHeads, p.batch},
                                                                         .stride = {kStride, kSize, p.length * kStride},
                                                                         .box = {64, 128, 1, 1}});
  };
  start(warp_specialised, dim3(p.length / kRows, kHeads, p.batch), kThreads, sizeof(SharedMemory), p,
        Maps{map(p.q), map(p.k), map(p.v)});
}

}  // namespace
}  // namespace ladder

int main(int argc, char** argv) { return ladder::run("6_warp_specialised", argc, argv, ladder::launch); }
