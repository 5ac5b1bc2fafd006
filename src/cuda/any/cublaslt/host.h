// What the candidates over cuBLASLt have in common on the host: parts of a product, and what they cost.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "cuda/any/cublaslt/passes.h"
#include "cuda/any/cublaslt/product.h"
#include "cuda/cost.h"
#include "problem/linear.h"

namespace heddle::cuda::cublaslt {

constexpr std::int64_t round_up(std::int64_t n, std::int64_t step) { return (n + step - 1) / step * step; }
constexpr std::size_t aligned(std::int64_t bytes) { return static_cast<std::size_t>(round_up(bytes, 256)); }

// Memory of a call, given out from the front.
class Arena {
 public:
  explicit Arena(void* memory) : memory_(static_cast<std::byte*>(memory)) {}
  template <class T = std::byte>
  T* take(std::int64_t bytes) {
    auto* const here = memory_ == nullptr ? nullptr : memory_ + taken_;
    taken_ += aligned(bytes);
    return reinterpret_cast<T*>(here);
  }
  std::size_t taken() const { return taken_; }

 private:
  std::byte* memory_;
  std::size_t taken_ = 0;
};

// Sums that our own kernel finishes, and W where it is decoded, are made a part at a time, which a GPU's L2 cache
// holds: `rows` rows of x by `columns` rows of W.
struct Part {
  std::int64_t rows = 0, columns = 0;
};
// weight_bytes: of a row of W as decoded, 0 where it is there.
Part part_of(std::int64_t M, std::int64_t N, bool sums, std::int64_t weight_bytes);

// Where `elements` of 16 bits behind `data` lie; null if there are none.
inline std::byte* shifted(const std::byte* data, std::int64_t elements) {
  return data == nullptr ? nullptr : const_cast<std::byte*>(data) + 2 * elements;
}

constexpr cudaDataType_t type_of(DType dtype) { return dtype == DType::bf16 ? CUDA_R_16BF : CUDA_R_16F; }

// f16 or bf16, from Ampere on, rows one stride apart, and nothing that only others promise.
std::string refuse(const LinearProblem& problem);
// What a pass over rows of x needs beside that.
std::string refuse_pass(const LinearProblem& problem);

bool has_kept(const LinearProblem& problem);

// Rates of this GPU: as the lines of costs say, if they were measured on it; on Hopper as on an H200, by the number of
// multiprocessors; else as data sheets have them, times as much of it as is reached on an H200.
// Seconds of a product without its launch, whose operands have `bytes` bytes an element; line: its name and rate.
double product_seconds(const LinearProblem& problem, double bytes, const NamedCost& line);
// Of moving that many bytes through memory.
double memory_seconds(double bytes);
constexpr double kLaunchSeconds = 2.5e-6;

// Of 16-bit products.
inline constexpr CostLine<LinearProblem> kCosts[] = {
    {"cublaslt", {3.0e-6, 805e12, 0}, {"", WeightOrder::dense, DType::bf16, 4096, 8192, 8192}},
    {"cublaslt few rows", {3.0e-6, 0, 4.2e12}, {"", WeightOrder::dense, DType::bf16, 16, 28672, 8192}},
};

}  // namespace heddle::cuda::cublaslt
