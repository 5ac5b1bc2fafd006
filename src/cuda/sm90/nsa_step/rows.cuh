// A warp's way through its tiles of a branch: online softmax of the group's rows.
#pragma once

#include "cuda/common/attention/rows.cuh"
#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/common/ptx/matrix.cuh"
#include "cuda/sm90/nsa_step/memory.cuh"

namespace heddle::cuda::sm90::nsa_step {

// Where scores of a tile go, [G][pitch]; null: nowhere.
struct Scores {
  float* data = nullptr;
  int pitch = 0;
  int rows = 0;  // G
};

// A warp's tiles: `count` of them, the n-th from row first(n) on. begin() starts the first loads, and run() meets all:
// between the two nobody else may touch the warp's ring.
template <class T, int kHead, bool kPaged, class First>
struct Walk {
  using Memory = SharedMemory<kHead>;
  using Tile = Tile<kHead>;
  static constexpr int kStages = Memory::kStages;

  const NsaStepProblem& problem;
  typename Memory::Stage (&ring)[kStages];
  const Source<kPaged>& from;
  int count;
  First first;
  float o[kHead / 8][4] = {};
  RowState state;

  __device__ Walk(const NsaStepProblem& problem, typename Memory::Stage (&ring)[kStages], const Source<kPaged>& from,
                  int count, First first)
      : problem(problem), ring(ring), from(from), count(count), first(first) {}

  // One group of copies for each of the first tiles, empty where there is none, and for the first `loaded`, which were
  // begun before.
  __device__ __forceinline__ void begin(int loaded = 0) {
#pragma unroll 1
    for (int n = 0; n < kStages - 1; ++n) {
      if (loaded <= n && n < count) load_tile<kHead>(problem, from, first(n), ring[n]);
      ptx::copy_async_commit();
    }
  }

  __device__ __forceinline__ void run(const std::uint32_t (&q)[kHead / 16][4], float scale, const Scores& scores) {
    int stage = 0;
#pragma unroll 1
    for (int n = 0; n < count; ++n) {
      ptx::copy_async_wait<kStages - 2>();
      // All lanes' copies of tile n have landed, and all lanes have read tile n - 1, whose place the next takes.
      __syncwarp();
      const int next = n + kStages - 1;
      if (next < count) load_tile<kHead>(problem, from, first(next), ring[stage == 0 ? kStages - 1 : stage - 1]);
      ptx::copy_async_commit();
      add_fresh_row<kHead>(from, first(n), ring[stage]);
      meet(q, ring[stage], first(n), scale, scores);
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    ptx::copy_async_wait<0>();
    __syncwarp();  // all lanes have read the last tile: the ring is the warp's to write
  }

 private:
  __device__ __forceinline__ void meet(const std::uint32_t (&q)[kHead / 16][4], const typename Memory::Stage& tile,
                                       int at, float scale, const Scores& scores) {
    const unsigned lane = threadIdx.x % kWarp;
    float s[2][4] = {}, odd[2][4] = {};  // of even and odd steps: two shorter chains of sums
    const std::uint32_t k_at = ptx::shared_address(&tile.k);
#pragma unroll
    for (int step = 0; step < kHead / 16; ++step) {
      std::uint32_t k[4];  // columns 0-7 and 8-15 of keys 0-7, then of keys 8-15
      ptx::load_matrix_x4(k, k_at + Tile::offset(lane % 8 + lane / 16 * 8, 2 * step + lane / 8 % 2));
      float(&sums)[2][4] = step % 2 == 0 ? s : odd;
      ptx::mma_16816<T>(sums[0], q[step], k[0], k[1]);
      ptx::mma_16816<T>(sums[1], q[step], k[2], k[3]);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int key = at + 8 * n + 2 * static_cast<int>(lane % 4);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[n][e] = key + e % 2 < from.end ? (s[n][e] + odd[n][e]) * scale : -INFINITY;
      }
      if (scores.data != nullptr) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int row = static_cast<int>(lane / 4) + 8 * r;
          if (row < scores.rows) {
            *reinterpret_cast<float2*>(scores.data + static_cast<std::int64_t>(row) * scores.pitch + key) =
                make_float2(s[n][2 * r], s[n][2 * r + 1]);
          }
        }
      }
    }
    float correction[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = fmaxf(fmaxf(s[0][2 * r], s[0][2 * r + 1]), fmaxf(s[1][2 * r], s[1][2 * r + 1]));
      top = fmaxf(state.max[r], largest_of_quad(top));
      const float base = top == -INFINITY ? 0.0f : top;
      correction[r] = ptx::exp2_approx(state.max[r] - base);
      state.max[r] = top;
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = s[n][2 * r + c];
          x = ptx::exp2_approx(x - base);
          sum += x;
        }
      }
      state.sum[r] = state.sum[r] * correction[r] + sum;
    }
    if (from.v == nullptr) return;
    if (__any_sync(kAll, correction[0] != 1.0f || correction[1] != 1.0f)) {
#pragma unroll
      for (auto& x : o) {
#pragma unroll
        for (int e = 0; e < 4; ++e) x[e] *= correction[e / 2];
      }
    }
    const std::uint32_t weights[4] = {ptx::pack2<T>(s[0][0], s[0][1]), ptx::pack2<T>(s[0][2], s[0][3]),
                                      ptx::pack2<T>(s[1][0], s[1][1]), ptx::pack2<T>(s[1][2], s[1][3])};
    const std::uint32_t v_at = ptx::shared_address(&tile.v);
#pragma unroll
    for (int n = 0; n < kHead / 16; ++n) {
      std::uint32_t v[4];  // keys 0-7 and 8-15 of 8 columns, then of the next 8; zeros for keys that are not there
      ptx::load_matrix_x4_transposed(v, v_at + Tile::offset(lane % 16, 2 * n + lane / 16));
      ptx::mma_16816<T>(o[2 * n], weights, v[0], v[1]);
      ptx::mma_16816<T>(o[2 * n + 1], weights, v[2], v[3]);
    }
  }
};

}  // namespace heddle::cuda::sm90::nsa_step
