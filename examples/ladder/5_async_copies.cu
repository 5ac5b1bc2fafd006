// Rung 5: the same products, but the next tile is on its way while this one is computed: cp.async from global to shared
// memory, past the registers, into the second of two buffers.
#include "cuda/common/ptx/memory.cuh"
#include "mma_rows.cuh"

namespace ladder {
namespace {

struct alignas(16) SharedMemory {
  Tile<kRows> q;
  Tile<kKeys> k[2], v[2];
};

// from: this thread's first 16 bytes of the tile.
template <int kTileRows>
__device__ void copy_tile(const bf16* from, Tile<kTileRows>& tile) {
  const std::uint32_t to = ptx::shared_address(&tile.row[thread_row()][thread_column()]);
#pragma unroll
  for (int n = 0; n < kTileRows; n += kPassRows) {
    ptx::copy_async_16(to + n * kPitch, from + n * kStride, true);
  }
}

__global__ void __launch_bounds__(kThreads, 2) async_copies(const __grid_constant__ Problem p) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<SharedMemory*>(memory);
  const int first_row = static_cast<int>(gridDim.x - 1 - blockIdx.x) * kRows, keys = p.keys(first_row + kRows - 1);
  const std::int64_t head = p.head(blockIdx.z, blockIdx.y), thread = head + thread_row() * kStride + thread_column();
  const bf16 *k = p.k + thread, *v = p.v + thread;
  copy_tile(p.q + thread + first_row * kStride, shared.q);
  copy_tile(k, shared.k[0]);
  copy_tile(v, shared.v[0]);
  ptx::copy_async_commit();
  MmaRows rows(p, first_row);
#pragma unroll 1
  for (int first_key = 0; first_key < keys; first_key += kKeys) {
    const int buffer = first_key / kKeys % 2;
    ptx::copy_async_wait<0>();
    __syncthreads();  // this tile is here, and all warps are done with the other buffer
    if (first_key + kKeys < keys) {
      copy_tile(k += kKeys * kStride, shared.k[buffer ^ 1]);
      copy_tile(v += kKeys * kStride, shared.v[buffer ^ 1]);
      ptx::copy_async_commit();
    }
    rows.step(shared.q, shared.k[buffer], shared.v[buffer], first_key);
  }
  rows.store(head);
}

void launch(const Problem& p) {
  start(async_copies, dim3(p.length / kRows, kHeads, p.batch), kThreads, sizeof(SharedMemory), p);
}

}  // namespace
}  // namespace ladder

int main(int argc, char** argv) { return ladder::run("5_async_copies", argc, argv, ladder::launch); }
