// The GPU's side of the encoder (model/encoder_gpu.cc): memory that weights stay in, and the steps between its
// products. In a build without CUDA all of it throws (src/stubs/cuda.cc).
#pragma once

#include <cstddef>
#include <cstdint>

#include "heddle/tensor.h"

namespace heddle::cuda {

// The current GPU's number. Throws RuntimeError where there is none.
int current_gpu();

// Memory of the current GPU with a copy of `bytes` bytes; waits for it.
std::byte* copied_to_gpu(const void* from, std::size_t bytes);
void free_on_gpu(std::byte* data) noexcept;
// From the host's memory, on the stream: that memory may change once this returns, unless it is page-locked.
void copy_to_gpu(void* to, const void* from, std::size_t bytes, void* stream);

// Activations are f16 or bf16 ("dtype"), contiguous, with a multiple of 8 columns and rows at multiples of 16 bytes.
// Sums are f32.
struct NormRows {
  DType dtype;
  std::int64_t rows, columns;
  const float *gamma, *beta;  // [columns]
  float epsilon;
  void* y;  // [rows, columns]
};
// Row i of the packed sequences: token ids[i] at its position, of token type 0.
struct EmbeddingRows {
  const std::int32_t *ids, *offsets;  // [rows], [sequences + 1]
  std::int64_t sequences;
  const void *word, *position, *token_type;  // [n, columns], of dtype
};
// y = layer_norm(x), or of the sum of a token's three embeddings. x may be y.
void norm_rows(const void* x, const NormRows& norm, void* stream);
void norm_embeddings(const EmbeddingRows& embeddings, const NormRows& norm, void* stream);

// The mean of each sequence's rows, zeros where it has none; of unit length if `normalize`.
struct PooledRows {
  DType dtype;
  const void* x;                // [total, columns]
  const std::int32_t* offsets;  // [sequences + 1]
  std::int64_t sequences, columns;
  bool normalize;
  float* y;  // [sequences, columns]
};
void pool_rows(const PooledRows& rows, void* stream);

// y[i] = x[i], i < count, a multiple of 8.
void widen(const void* x, DType dtype, std::int64_t count, float* y, void* stream);

}  // namespace heddle::cuda
