// Rung 2: a block takes 64 query rows, and the keys and values that they meet come to shared memory once for all of
// them, in pieces of 16 bytes. Two threads own a row, with half of q and of o each, in registers.
#include "ladder.cuh"

namespace ladder {
namespace {

constexpr int kRows = 64, kKeys = 32, kThreads = 2 * kRows;

struct alignas(16) SharedMemory {
  float k[kKeys][kSize], v[kKeys][kSize];  // widened once, when they arrive
};

// Eight elements, widened.
__device__ void load_16_bytes(const bf16* from, float* to) {
  const uint4 words = *reinterpret_cast<const uint4*>(from);
  const auto pair = [&](unsigned word, int n) {  // a bfloat16 is the upper half of a float
    to[n] = __uint_as_float(word << 16);
    to[n + 1] = __uint_as_float(word & 0xffff0000u);
  };
  pair(words.x, 0), pair(words.y, 2), pair(words.z, 4), pair(words.w, 6);
}

__device__ void load_tile(const bf16* x, int first, float (&tile)[kKeys][kSize]) {
#pragma unroll
  for (int n = static_cast<int>(threadIdx.x); n < kKeys * kSize / 8; n += kThreads) {
    const int row = n / (kSize / 8), column = n % (kSize / 8) * 8;
    load_16_bytes(x + (first + row) * kStride + column, &tile[row][column]);
  }
}

// A thread's half of a row: pieces of four floats, the other half of the row has those between. Both lanes of a pair
// then read 32 neighbouring bytes of a key, and all pairs of the warp the same.
constexpr int kPieces = kSize / 8;
__device__ const float4& piece(const float (&row)[kSize], int n) {
  return reinterpret_cast<const float4*>(row)[2 * n + threadIdx.x % 2];
}

__global__ void __launch_bounds__(kThreads) shared_tiles(Problem p) {
  __shared__ SharedMemory shared;
  const int i = static_cast<int>((gridDim.x - 1 - blockIdx.x) * kRows + threadIdx.x / 2), keys = p.keys(i);
  const int block_keys = p.keys(static_cast<int>((gridDim.x - blockIdx.x) * kRows - 1));
  const std::int64_t head = p.head(blockIdx.z, blockIdx.y), row = head + i * kStride;
  float4 q[kPieces], o[kPieces];
#pragma unroll
  for (int n = 0; n < kPieces; ++n) {
    const bf16* from = p.q + row + 8 * n + threadIdx.x % 2 * 4;
    q[n] = make_float4(from[0], from[1], from[2], from[3]);
    o[n] = make_float4(0, 0, 0, 0);
  }
  float maximum = -INFINITY, sum = 0.0f;

  for (int first = 0; first < block_keys; first += kKeys) {
    __syncthreads();
    load_tile(p.k + head, first, shared.k);
    load_tile(p.v + head, first, shared.v);
    __syncthreads();
    float score[kKeys], top = maximum;
#pragma unroll
    for (int j = 0; j < kKeys; ++j) {
      float half = 0.0f;
#pragma unroll
      for (int n = 0; n < kPieces; ++n) {
        const float4 k = piece(shared.k[j], n);
        half += q[n].x * k.x + q[n].y * k.y + q[n].z * k.z + q[n].w * k.w;
      }
      score[j] = (half + __shfl_xor_sync(0xffffffff, half, 1)) * kScaleLog2;
      if (first + j >= keys) score[j] = -INFINITY;
      top = fmaxf(top, score[j]);
    }
    const float keep = exp2f(maximum - top);
    maximum = top;
    sum *= keep;
#pragma unroll
    for (int n = 0; n < kPieces; ++n) o[n] = make_float4(o[n].x * keep, o[n].y * keep, o[n].z * keep, o[n].w * keep);
#pragma unroll
    for (int j = 0; j < kKeys; ++j) {
      const float probability = exp2f(score[j] - maximum);
      sum += probability;
#pragma unroll
      for (int n = 0; n < kPieces; ++n) {
        const float4 v = piece(shared.v[j], n);
        o[n].x += probability * v.x, o[n].y += probability * v.y;
        o[n].z += probability * v.z, o[n].w += probability * v.w;
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kPieces; ++n) {
    auto* to = reinterpret_cast<__nv_bfloat162*>(p.o + row + 8 * n + threadIdx.x % 2 * 4);
    to[0] = __floats2bfloat162_rn(o[n].x / sum, o[n].y / sum);
    to[1] = __floats2bfloat162_rn(o[n].z / sum, o[n].w / sum);
  }
}

void launch(const Problem& p) { start(shared_tiles, dim3(p.length / kRows, kHeads, p.batch), kThreads, 0, p); }

}  // namespace
}  // namespace ladder

int main(int argc, char** argv) { return ladder::run("2_shared_tiles", argc, argv, ladder::launch); }
