// Rung 3: register tiles. A thread owns 8 rows x 4 keys of S and 8 rows x 8 columns of O, so that what it reads from
// shared memory serves several products; 16 lanes share a row, and find its maximum and sum by shuffles.
#include "ladder.cuh"

namespace ladder {
namespace {

constexpr int kRows = 64, kKeys = 64, kThreads = 128;
constexpr int kRowsEach = 8, kKeysEach = 4;  // a thread's rows y + 8 i, keys x + 16 j, columns 4 x + 64 c

struct alignas(16) SharedMemory {
  float q[kRows][kSize + 4];  // rows start in different banks
  float k[kKeys][kSize + 4];  // and the values, after the scores are done
  float probability[kRows][kKeys + 4];
};

template <int kTileRows>
__device__ void load_tile(const bf16* x, int first, float (&tile)[kTileRows][kSize + 4]) {
#pragma unroll
  for (int n = static_cast<int>(threadIdx.x); n < kTileRows * kSize / 8; n += kThreads) {
    const int row = n / (kSize / 8), column = n % (kSize / 8) * 8;
    const uint4 words = *reinterpret_cast<const uint4*>(x + (first + row) * kStride + column);
    float4* to = reinterpret_cast<float4*>(&tile[row][column]);
    to[0] = make_float4(__uint_as_float(words.x << 16), __uint_as_float(words.x & 0xffff0000u),
                        __uint_as_float(words.y << 16), __uint_as_float(words.y & 0xffff0000u));
    to[1] = make_float4(__uint_as_float(words.z << 16), __uint_as_float(words.z & 0xffff0000u),
                        __uint_as_float(words.w << 16), __uint_as_float(words.w & 0xffff0000u));
  }
}

__device__ float4 four(const float* x) { return *reinterpret_cast<const float4*>(x); }

__global__ void __launch_bounds__(kThreads, 2) register_tiles(Problem p) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<SharedMemory*>(memory);
  const int x = static_cast<int>(threadIdx.x) % 16, y = static_cast<int>(threadIdx.x) / 16;
  const int first_row = static_cast<int>(gridDim.x - 1 - blockIdx.x) * kRows;
  const std::int64_t head = p.head(blockIdx.z, blockIdx.y);
  load_tile(p.q + head, first_row, shared.q);
  float o[kRowsEach][8] = {}, maximum[kRowsEach], sum[kRowsEach] = {};
#pragma unroll
  for (float& m : maximum) m = -INFINITY;

#pragma unroll 1
  for (int first = 0; first < p.keys(first_row + kRows - 1); first += kKeys) {
    __syncthreads();
    load_tile(p.k + head, first, shared.k);
    __syncthreads();
    float s[kRowsEach][kKeysEach] = {};
#pragma unroll 2
    for (int d = 0; d < kSize; d += 4) {
      float4 k[kKeysEach];
#pragma unroll
      for (int j = 0; j < kKeysEach; ++j) k[j] = four(&shared.k[x + 16 * j][d]);
#pragma unroll
      for (int i = 0; i < kRowsEach; ++i) {
        const float4 q = four(&shared.q[y + 8 * i][d]);
#pragma unroll
        for (int j = 0; j < kKeysEach; ++j) s[i][j] += q.x * k[j].x + q.y * k[j].y + q.z * k[j].z + q.w * k[j].w;
      }
    }
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {
      float top = maximum[i];
#pragma unroll
      for (int j = 0; j < kKeysEach; ++j) {
        s[i][j] = first + x + 16 * j < p.keys(first_row + y + 8 * i) ? s[i][j] * kScaleLog2 : -INFINITY;
        top = fmaxf(top, s[i][j]);
      }
      for (int lanes = 8; lanes > 0; lanes /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, lanes));
      const float keep = exp2f(maximum[i] - top);
      maximum[i] = top;
      sum[i] *= keep;
#pragma unroll
      for (int j = 0; j < kKeysEach; ++j) {
        const float probability = exp2f(s[i][j] - top);
        sum[i] += probability;  // of this lane's keys; the lanes' sums are added at the end
        shared.probability[y + 8 * i][x + 16 * j] = probability;
      }
#pragma unroll
      for (float& element : o[i]) element *= keep;
    }
    __syncthreads();
    load_tile(p.v + head, first, shared.k);
    __syncthreads();
#pragma unroll 1
    for (int j = 0; j < kKeys; j += 4) {
      float4 weight[kRowsEach];
#pragma unroll
      for (int i = 0; i < kRowsEach; ++i) weight[i] = four(&shared.probability[y + 8 * i][j]);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float4 left = four(&shared.k[j + n][4 * x]), right = four(&shared.k[j + n][4 * x + 64]);
#pragma unroll
        for (int i = 0; i < kRowsEach; ++i) {
          const float w = n == 0 ? weight[i].x : n == 1 ? weight[i].y : n == 2 ? weight[i].z : weight[i].w;
          o[i][0] += w * left.x, o[i][1] += w * left.y, o[i][2] += w * left.z, o[i][3] += w * left.w;
          o[i][4] += w * right.x, o[i][5] += w * right.y, o[i][6] += w * right.z, o[i][7] += w * right.w;
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    for (int lanes = 8; lanes > 0; lanes /= 2) sum[i] += __shfl_xor_sync(0xffffffff, sum[i], lanes);
    bf16* row = p.o + head + (first_row + y + 8 * i) * kStride + 4 * x;
#pragma unroll
    for (int c = 0; c < 8; c += 2) {
      *reinterpret_cast<__nv_bfloat162*>(row + c / 4 * 64 + c % 4) =
          __floats2bfloat162_rn(o[i][c] / sum[i], o[i][c + 1] / sum[i]);
    }
  }
}

void launch(const Problem& p) {
  start(register_tiles, dim3(p.length / kRows, kHeads, p.batch), kThreads, sizeof(SharedMemory), p);
}

}  // namespace
}  // namespace ladder

int main(int argc, char** argv) { return ladder::run("3_register_tiles", argc, argv, ladder::launch); }
