// Rung 1: the four steps in their plain form. One block takes one query row and 128 keys at a time, a key a thread;
// then a column of o a thread. Every key and value comes from global memory, two bytes at a time, again for each row.
#include "ladder.cuh"

namespace ladder {
namespace {

constexpr int kThreads = kSize;  // keys in a block of keys, and columns of o

struct SharedMemory {
  float q[kSize], score[kThreads], probability[kThreads];
};

// 1. Scores of 128 keys and their maximum.
__device__ float compute_scores_and_maximum(const Problem& p, const bf16* k, int first, int keys,
                                            SharedMemory& shared) {
  const int j = first + static_cast<int>(threadIdx.x);
  float score = -INFINITY;
  if (j < keys) {
    score = 0.0f;
    for (int d = 0; d < kSize; ++d) score += shared.q[d] * __bfloat162float(k[j * kStride + d]);
    score *= kScaleLog2;
  }
  shared.score[threadIdx.x] = score;
  __syncthreads();
  float maximum = -INFINITY;
  for (int n = 0; n < kThreads; ++n) maximum = fmaxf(maximum, shared.score[n]);
  return maximum;
}

// 2. Softmax of the block, and the values weighted with it.
__device__ float compute_softmax_and_weighted_values(const Problem& p, const bf16* v, int first, int keys,
                                                     float maximum, SharedMemory& shared, float& sum) {
  shared.probability[threadIdx.x] = exp2f(shared.score[threadIdx.x] - maximum);
  __syncthreads();
  float o = 0.0f;
  sum = 0.0f;
  for (int n = 0; n < kThreads && first + n < keys; ++n) {
    sum += shared.probability[n];
    o += shared.probability[n] * __bfloat162float(v[(first + n) * kStride + threadIdx.x]);
  }
  return o;
}

// 3. The online softmax: both parts relative to the larger maximum.
struct Statistics {
  float maximum = -INFINITY, sum = 0.0f, o = 0.0f;
  __device__ void merge(float block_maximum, float block_sum, float block_o) {
    const float top = fmaxf(maximum, block_maximum);
    const float keep = exp2f(maximum - top), add = exp2f(block_maximum - top);
    maximum = top;
    sum = sum * keep + block_sum * add;
    o = o * keep + block_o * add;
  }
};

__global__ void __launch_bounds__(kThreads) naive(Problem p) {
  __shared__ SharedMemory shared;
  const int i = static_cast<int>(blockIdx.x), keys = p.keys(i);
  const std::int64_t head = p.head(blockIdx.z, blockIdx.y), row = head + i * kStride + threadIdx.x;
  shared.q[threadIdx.x] = __bfloat162float(p.q[row]);
  __syncthreads();
  Statistics all;
  for (int first = 0; first < keys; first += kThreads) {
    const float maximum = compute_scores_and_maximum(p, p.k + head, first, keys, shared);
    float sum;
    const float o = compute_softmax_and_weighted_values(p, p.v + head, first, keys, maximum, shared, sum);
    all.merge(maximum, sum, o);
    __syncthreads();
  }
  // 4. Division by the sum.
  p.o[row] = __float2bfloat16(all.o / all.sum);
}

void launch(const Problem& p) { start(naive, dim3(p.length, kHeads, p.batch), kThreads, 0, p); }

}  // namespace
}  // namespace ladder

int main(int argc, char** argv) { return ladder::run("1_naive", argc, argv, ladder::launch); }
