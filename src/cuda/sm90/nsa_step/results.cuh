// What warps found becomes a CTA's, and what CTAs found a row of the result.
#pragma once

#include "cuda/common/attention/rows.cuh"
#include "cuda/common/ptx/arithmetic.cuh"
#include "cuda/sm90/nsa_step/work.cuh"

namespace heddle::cuda::sm90::nsa_step {

// What a warp found: its O where its ring was, and its statistics.
template <int kHead, class Walk>
__device__ __forceinline__ void leave_result(SharedMemory<kHead>& shared, const Walk& walk) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  float4* const mine = shared.warp_o(warp);
#pragma unroll
  for (int n = 0; n < kHead / 8; ++n) {
    mine[n * kWarp + lane] = make_float4(walk.o[n][0], walk.o[n][1], walk.o[n][2], walk.o[n][3]);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = sum_of_quad(walk.state.sum[r]);
    if (lane % 4 == 0) {
      shared.top[warp][lane / 4 + 8 * r] = walk.state.max[r];
      shared.sum[warp][lane / 4 + 8 * r] = sum;
    }
  }
}

// The results of warps [first, end) become the CTA's of a branch; of no warps it is zeros. A thread has two rows, and
// the same of each piece of columns.
template <int kHead>
__device__ void join_warps(SharedMemory<kHead>& shared, int branch, int first, int end) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp_of_thread = static_cast<int>(threadIdx.x) / kWarp;
  float weight[2][kWarps];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = lane / 4 + 8 * r;
    float top = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      const float x = shared.top[warp][row];
      weight[r][warp] = first <= warp && warp < end ? x : -INFINITY;
      top = fmaxf(top, weight[r][warp]);
    }
    const float base = top == -INFINITY ? 0.0f : top;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      const float x = shared.sum[warp][row];
      weight[r][warp] = ptx::exp2_approx(weight[r][warp] - base);
      sum = fmaf(first <= warp && warp < end ? x : 0.0f, weight[r][warp], sum);
    }
    if (warp_of_thread == 0 && lane % 4 == 0) shared.statistics[branch][row] = make_float2(top, sum);
  }
#pragma unroll
  for (int piece = 0; piece < kHead / 8; piece += kWarps) {
    const int n = (piece + warp_of_thread) * kWarp + lane;
    float4 o = {};
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      const bool has = first <= warp && warp < end;  // what others left there may be no number
      const float4 x = has ? shared.warp_o(warp)[n] : float4{};
      o.x = fmaf(x.x, weight[0][warp], o.x);
      o.y = fmaf(x.y, weight[0][warp], o.y);
      o.z = fmaf(x.z, weight[1][warp], o.z);
      o.w = fmaf(x.w, weight[1][warp], o.w);
    }
    const int column = n / kWarp * 8 + lane % 4 * 2;
    *reinterpret_cast<float2*>(shared.partial_row(branch, lane / 4) + column) = make_float2(o.x, o.y);
    *reinterpret_cast<float2*>(shared.partial_row(branch, lane / 4 + 8) + column) = make_float2(o.z, o.w);
  }
}

// The log-sum-exp, log2, of a row of the compressed branch over the cluster.
template <int kHead>
__device__ float lse_of(const Work& w, const SharedMemory<kHead>& shared, int row) {
  float2 statistics[kMostCluster];
  float top = -INFINITY, sum = 0.0f;
#pragma unroll
  for (int of = 0; of < kMostCluster; ++of) {
    statistics[of] = {-INFINITY, 0.0f};
    if (of < w.ctas) statistics[of] = ptx::load_remote_float2(w.at(&shared.statistics[kCmp][row], of));
    top = fmaxf(top, statistics[of].x);
  }
  const float base = top == -INFINITY ? 0.0f : top;
#pragma unroll
  for (int of = 0; of < kMostCluster; ++of) {
    sum = fmaf(statistics[of].y, ptx::exp2_approx(statistics[of].x - base), sum);
  }
  return base + ptx::log2_approx(sum);
}

// Each CTA has a part of the columns of all branches, and reads those of all CTAs: four columns of a row a thread, or
// of two.
template <int kHead>
struct Result {
  static constexpr int kItems = kRows * kHead / 4 / kThreads;
  static_assert(kItems > 0);
  float4 total[kItems] = {};
  int row[kItems], column[kItems];  // row < 0: there is no such item

  __device__ Result(const NsaStepProblem& problem, const Work& w) {
    const int quads = static_cast<int>(problem.Dv) / 4, items = static_cast<int>(problem.G) * quads;
    const int each = divided_up(items, w.ctas), end = min((w.rank + 1) * each, items);
#pragma unroll
    for (int n = 0; n < kItems; ++n) {
      const int item = w.rank * each + static_cast<int>(threadIdx.x) + n * kThreads;
      row[n] = item < end ? item / quads : -1;
      column[n] = (item - row[n] * quads) * 4;
    }
  }

  // Branches [begin, end), each times its gate; what all CTAs have of them is there.
  __device__ __forceinline__ void add(const NsaStepProblem& problem, const Work& w, SharedMemory<kHead>& shared,
                                      int begin, int end) {
#pragma unroll 1
    for (int branch = begin; branch < end; ++branch) {
      if (!gate_of(problem, branch).given) continue;
      switch (w.ctas) {
        case 8:
          add_of<8>(shared, branch);
          break;
        case 4:
          add_of<4>(shared, branch);
          break;
        case 2:
          add_of<2>(shared, branch);
          break;
        default:
          add_of<1>(shared, branch);
      }
    }
  }

  template <class T>
  __device__ __forceinline__ void write(const Params& p, const Work& w) const {
    const NsaStepProblem& problem = p.problem;
#pragma unroll
    for (int n = 0; n < kItems; ++n) {
      if (row[n] < 0) continue;
      const uint2 words = {ptx::pack2<T>(total[n].x, total[n].y), ptx::pack2<T>(total[n].z, total[n].w)};
      auto* const to = reinterpret_cast<std::uint16_t*>(problem.out.at(w.b, 0, w.h * problem.G + row[n]));
      if (p.wide_out) {
        *reinterpret_cast<uint2*>(to + column[n]) = words;
        continue;
      }
      const std::uint32_t pairs[2] = {words.x, words.y};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        to[(column[n] + e) * problem.out.stride_d] = static_cast<std::uint16_t>(pairs[e / 2] >> (e % 2 * 16));
      }
    }
  }

 private:
  // Of a cluster of kCtas, so that no branch stands between loads.
  template <int kCtas>
  __device__ __forceinline__ void add_of(SharedMemory<kHead>& shared, int branch) {
    const auto at = [](const void* here, int of) {
      const std::uint32_t address = ptx::shared_address(here);
      return kCtas > 1 ? ptx::remote_address(address, of) : address;
    };
#pragma unroll
    for (int n = 0; n < kItems; ++n) {
      if (row[n] < 0) continue;
      float2 statistics[kCtas];
      float4 part[kCtas];
      float top = -INFINITY, sum = 0.0f;
#pragma unroll
      for (int of = 0; of < kCtas; ++of) {
        statistics[of] = ptx::load_remote_float2(at(&shared.statistics[branch][row[n]], of));
        part[of] = ptx::load_remote_float4(at(shared.partial_row(branch, row[n]) + column[n], of));
      }
#pragma unroll
      for (int of = 0; of < kCtas; ++of) top = fmaxf(top, statistics[of].x);
      const float base = top == -INFINITY ? 0.0f : top;
      float4 o = {};
#pragma unroll
      for (int of = 0; of < kCtas; ++of) {
        const float weight = ptx::exp2_approx(statistics[of].x - base);
        sum = fmaf(statistics[of].y, weight, sum);
        o.x = fmaf(part[of].x, weight, o.x);
        o.y = fmaf(part[of].y, weight, o.y);
        o.z = fmaf(part[of].z, weight, o.z);
        o.w = fmaf(part[of].w, weight, o.w);
      }
      const float factor = sum == 0.0f ? 0.0f : 1.0f / sum, gate = shared.gate[branch][row[n]];
      total[n].x = fmaf(gate, o.x * factor, total[n].x);
      total[n].y = fmaf(gate, o.y * factor, total[n].y);
      total[n].z = fmaf(gate, o.z * factor, total[n].z);
      total[n].w = fmaf(gate, o.w * factor, total[n].w);
    }
  }
};

}  // namespace heddle::cuda::sm90::nsa_step
