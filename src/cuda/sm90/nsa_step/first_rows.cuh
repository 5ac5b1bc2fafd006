// What a step begins with: its rows, gates, and the means of a block that its key ends.
#pragma once

#include "cuda/common/elements.cuh"
#include "cuda/sm90/nsa_step/work.cuh"

namespace heddle::cuda::sm90::nsa_step {

template <class Element>
__device__ __forceinline__ float element_at(const Plane& plane, std::int64_t at) {
  return static_cast<float>(reinterpret_cast<const Element*>(plane.data)[at]);
}
__device__ __forceinline__ float gate_at(const Plane& plane, std::int64_t b, std::int64_t h) {
  const std::int64_t at = plane.offset(b, h, 0);
  return plane.dtype == DType::f32   ? element_at<float>(plane, at)
         : plane.dtype == DType::f16 ? element_at<__half>(plane, at)
                                     : element_at<__nv_bfloat16>(plane, at);
}

// The gate that this thread fetches, of the last ones, which have least to do.
struct GateAt {
  int branch, row;
  bool there;

  __device__ explicit GateAt(const NsaStepProblem& problem) {
    const int n = static_cast<int>(threadIdx.x) - (kThreads - kBranches * kRows);
    there = n >= 0;
    branch = n / kRows;
    row = n % kRows;
  }
  __device__ float load(const NsaStepProblem& problem, const Work& w) const {
    if (!there || row >= problem.G) return 0.0f;
    const Plane& gate = gate_of(problem, branch);
    return gate.given ? gate_at(gate, w.b, w.h * problem.G + row) : 0.0f;
  }
};

// A chunk of a row of `size` elements on its way to shared memory, zeros behind its end, and where there is no row
// (null). Rows that do not lie in 16 bytes are read by elements, and wait.
__device__ __forceinline__ void copy_chunk(void* to, const std::byte* row, std::int64_t stride_d, int chunk,
                                           std::int64_t size, const Params& p) {
  const bool there = row != nullptr && chunk * 8 < size;
  if (p.wide_in) {
    ptx::copy_async_16(ptx::shared_address(to), there ? row + 16 * chunk : p.problem.q.data, there);
  } else {
    *static_cast<uint4*>(to) = there ? load_chunk(row, stride_d, chunk, size, false) : uint4{};
  }
}

// The group's rows of q, and the step's key and value, from where every tile takes them that has them.
template <int kHead>
__device__ void copy_rows(const Params& p, const Work& w, SharedMemory<kHead>& shared) {
  const NsaStepProblem& problem = p.problem;
  using Tile = Tile<kHead>;
#pragma unroll 1
  for (int n = static_cast<int>(threadIdx.x); n < kRows * Tile::kChunks; n += kThreads) {
    const int row = n / Tile::kChunks, chunk = n % Tile::kChunks;
    copy_chunk(shared.q.bytes + Tile::offset(row, chunk),
               row < problem.G ? problem.q.at(w.b, 0, w.h * problem.G + row) : nullptr, problem.q.stride_d, chunk,
               problem.D, p);
  }
  const int thread = static_cast<int>(threadIdx.x);
  if (thread >= 2 * Tile::kChunks) return;
  const bool of_v = thread >= Tile::kChunks;
  const int chunk = thread % Tile::kChunks;
  const Operand& from = of_v ? problem.v_new : problem.k_new;
  copy_chunk(&shared.new_key[of_v][chunk], from.at(w.b, 0, w.h), from.stride_d, chunk, of_v ? problem.Dv : problem.D,
             p);
}

// The step's key and value into the cache, by one CTA. Nobody reads them there before the next launch.
template <int kHead>
__device__ void append(const Params& p, const Work& w, const SharedMemory<kHead>& shared) {
  const NsaStepProblem& problem = p.problem;
  constexpr int kChunks = Tile<kHead>::kChunks;
  const int thread = static_cast<int>(threadIdx.x);
  if (!w.step.appends || w.rank != 0 || thread >= 2 * kChunks) return;
  const bool of_v = thread >= kChunks;
  const int chunk = thread % kChunks;
  const Operand& to = of_v ? problem.v : problem.k;
  const auto [batch, row] = p.place(w.b, w.keys - 1, p.by_page);
  if (chunk * 8 >= (of_v ? problem.Dv : problem.D)) return;
  *reinterpret_cast<uint4*>(to.at(batch, row, w.h) + 16 * chunk) = shared.new_key[of_v][chunk];
}

// The rows of the block that the step's key ends, on their way to the rings' last stages, a tile to a warp: Walk::begin
// leaves those free. cache: without the step's own row.
template <int kHead, bool kPaged>
__device__ void copy_ended_block(const Params& p, const Work& w, const Source<kPaged>& cache,
                                 SharedMemory<kHead>& shared) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp, first = w.keys - (1 << p.block_log2) + warp * kTileKeys;
  if (w.pools() && first < w.keys) {
    load_tile<kHead>(p.problem, cache, first, shared.ring[warp][SharedMemory<kHead>::kStages - 1]);
  }
}

// Their means, two columns a thread: sums in the order of keys, as pool_keys has them. Into shared memory for the tile
// that has them, and among the pooled keys for later launches.
template <class T, int kHead>
__device__ void pool(const Params& p, const Work& w, SharedMemory<kHead>& shared) {
  const NsaStepProblem& problem = p.problem;
  using Tile = Tile<kHead>;
  constexpr int kPairs = kHead / 2, kPerChunk = 4;
  if (const int thread = static_cast<int>(threadIdx.x); thread < 2 * kPairs) {
    const bool of_v = thread >= kPairs;
    const int pair = thread % kPairs, chunk = pair / kPerChunk, word = pair % kPerChunk;
    const auto pair_of = [&](const void* at) { return static_cast<const std::uint32_t*>(at)[word]; };
    const auto add = [](float2& sum, std::uint32_t two) {
      const float2 x = ptx::unpack2<T>(two);
      sum.x += x.x;
      sum.y += x.y;
    };
    float2 sum = {};
    const int last = (1 << p.block_log2) - 1;
#pragma unroll 1
    for (int first = 0; first < last; first += kTileKeys) {
      const auto& stage = shared.ring[first / kTileKeys][SharedMemory<kHead>::kStages - 1];
      const Tile& tile = of_v ? stage.v : stage.k;
#pragma unroll
      for (int row = 0; row < kTileKeys; ++row) {
        if (first + row < last) add(sum, pair_of(tile.bytes + Tile::offset(row, chunk)));
      }
    }
    add(sum, pair_of(&shared.new_key[of_v][chunk]));
    const auto keys = static_cast<float>(last + 1);
    const bool there = 2 * pair < (of_v ? problem.Dv : problem.D);
    const std::uint32_t mean = there ? ptx::pack2<T>(sum.x / keys, sum.y / keys) : 0;
    reinterpret_cast<std::uint32_t*>(&shared.new_pooled[of_v][chunk])[word] = mean;
    const Operand& to = of_v ? problem.v_pooled : problem.k_pooled;
    const auto [batch, row] = p.place(w.b, w.complete - 1, p.by_pooled_page);
    if (there) reinterpret_cast<std::uint32_t*>(to.at(batch, row, w.h))[pair] = mean;
  }
}

}  // namespace heddle::cuda::sm90::nsa_step
