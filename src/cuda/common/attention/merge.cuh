// What attention over some of the keys gives, and how two such results become one.
#pragma once

#include <cfloat>

#include "cuda/common/attention/exponents.cuh"

namespace heddle::cuda {

// Four columns of a row's O over some of its keys, not normalised, with the row's largest logit and its sum of
// exponentials there. kFinite: a row without keys has the lowest finite number as its maximum; else -inf, which must
// not be subtracted from itself.
template <bool kFinite>
struct PartialRow {
  float max = kFinite ? -FLT_MAX : -INFINITY, sum = 0.0f;
  float4 o = {0.0f, 0.0f, 0.0f, 0.0f};

  __device__ void join(const PartialRow& other) {
    const float top = fmaxf(max, other.max), mine = factor(max, top), its = factor(other.max, top);
    sum = sum * mine + other.sum * its;
    o.x = o.x * mine + other.o.x * its;
    o.y = o.y * mine + other.o.y * its;
    o.z = o.z * mine + other.o.z * its;
    o.w = o.w * mine + other.o.w * its;
    max = top;
  }

  // With those of `count` neighbouring lanes, a power of two. The whole warp.
  __device__ void join_lanes(int count) {
#pragma unroll 1
    for (int step = 1; step < count; step *= 2) {
      const auto from = [step](float x) { return __shfl_xor_sync(0xffffffff, x, step); };
      join({from(max), from(sum), make_float4(from(o.x), from(o.y), from(o.z), from(o.w))});
    }
  }

 private:
  __device__ static float factor(float largest, float top) {
    return !kFinite && top == -INFINITY ? 0.0f : exp_of_difference(largest, top);
  }
};

}  // namespace heddle::cuda
