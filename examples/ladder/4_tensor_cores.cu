// Rung 4: both products on tensor cores. Tiles stay in bfloat16; a warp owns 32 rows from the first product to the last
// store, so that P never leaves its registers. Loads still wait for the products, and products for the loads.
#include "mma_rows.cuh"

namespace ladder {
namespace {

struct alignas(16) SharedMemory {
  Tile<kRows> q;
  Tile<kKeys> k, v;
};

// from: this thread's first 16 bytes of the tile.
template <int kTileRows>
__device__ void load_tile(const bf16* from, Tile<kTileRows>& tile) {
  bf16* const to = &tile.row[thread_row()][thread_column()];
#pragma unroll
  for (int n = 0; n < kTileRows; n += kPassRows) {
    *reinterpret_cast<uint4*>(to + n * (kPitch / 2)) = *reinterpret_cast<const uint4*>(from + n * kStride);
  }
}

__global__ void __launch_bounds__(kThreads, 2) tensor_cores(const __grid_constant__ Problem p) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<SharedMemory*>(memory);
  const int first_row = static_cast<int>(gridDim.x - 1 - blockIdx.x) * kRows, keys = p.keys(first_row + kRows - 1);
  const std::int64_t head = p.head(blockIdx.z, blockIdx.y), thread = head + thread_row() * kStride + thread_column();
  const bf16 *k = p.k + thread, *v = p.v + thread;
  load_tile(p.q + thread + first_row * kStride, shared.q);
  MmaRows rows(p, first_row);
#pragma unroll 1
  for (int first_key = 0; first_key < keys; first_key += kKeys, k += kKeys * kStride, v += kKeys * kStride) {
    load_tile(k, shared.k);
    load_tile(v, shared.v);
    __syncthreads();
    rows.step(shared.q, shared.k, shared.v, first_key);
    __syncthreads();
  }
  rows.store(head);
}

void launch(const Problem& p) {
  start(tensor_cores, dim3(p.length / kRows, kHeads, p.batch), kThreads, sizeof(SharedMemory), p);
}

}  // namespace
}  // namespace ladder

int main(int argc, char** argv) { return ladder::run("4_tensor_cores", argc, argv, ladder::launch); }
