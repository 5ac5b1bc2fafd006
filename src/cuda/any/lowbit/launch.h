// The kernels of quantisation and of its undoing, for the host.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "problem/quantize.h"

namespace heddle::cuda::any::lowbit {

constexpr int kThreads = 256;

// What a quantisation leaves in the workspace.
struct Scratch {
  std::uint32_t largest;         // bits
  std::uint32_t bad_importance;  // the first such column
  std::uint64_t first_beyond;    // of first_beyond_kernel: row * K + column
};

// Whether pieces of rows may be moved 16 columns at a time.
struct Wide {
  bool weights, codes;
};

inline bool is_aligned(const void* data, std::int64_t row_bytes, std::int64_t to) {
  return reinterpret_cast<std::uintptr_t>(data) % static_cast<std::uintptr_t>(to) == 0 && row_bytes % to == 0;
}
// 16 columns of float32 are four pieces of 16 bytes, of 16 bits two; eight of 16 bits one.
inline bool is_wide(const heddle::lowbit::Weights& weights) {
  const auto size = static_cast<std::int64_t>(size_of(weights.dtype));
  return weights.stride_k == 1 && is_aligned(weights.data, weights.stride_n * size, 16);
}

struct EncodeKernels {
  void (*groups)(heddle::lowbit::QuantizeProblem, Scratch*, int team_bits, bool backwards);  // null: of rows alone
  void (*any)(heddle::lowbit::QuantizeProblem, Scratch*, int team, Wide wide);
};
using DecodeKernel = void (*)(heddle::lowbit::Matrix, heddle::lowbit::Weights to, int group_shift, Wide wide);

EncodeKernels encode_kernels(heddle::lowbit::Element element);
DecodeKernel decode_kernel(heddle::lowbit::Element element);

}  // namespace heddle::cuda::any::lowbit
