// Products by cuBLASLt.
#pragma once

#include <cuda_runtime_api.h>
#include <library_types.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace heddle::cuda::cublaslt {

// Why the library cannot be had; empty if it can. Loads it.
std::string refuse_library();

// d [n, m] = after(x [n, k] times w + bias [m] + c [n, m]); rows one stride apart, in elements. w is [m, k], or [k, m]
// if it is not `by_rows`. 8-bit products take w by rows, with strides and k in multiples of 16.
enum class After : std::uint8_t { nothing, relu, gelu_tanh };
struct Product {
  cudaDataType_t in = CUDA_R_16BF, out = CUDA_R_16BF;  // of w and x; of bias, c and d. CUDA_R_8I: out is CUDA_R_32I
  std::int64_t m = 0, n = 0, k = 0;
  const void* w = nullptr;
  std::int64_t w_stride = 0;
  bool by_rows = true;
  const void* x = nullptr;
  std::int64_t x_stride = 0;
  const void *bias = nullptr, *c = nullptr;  // or null
  std::int64_t c_stride = 0;
  void* d = nullptr;
  std::int64_t d_stride = 0;
  After after = After::nothing;
};

constexpr std::size_t kWorkspace = std::size_t{32} << 20;  // what NVIDIA asks for on Hopper

void multiply(const Product& product, void* workspace, cudaStream_t stream);

}  // namespace heddle::cuda::cublaslt
