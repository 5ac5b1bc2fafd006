// The GPU's side of src/model, the encoder and the Transformer block: memory that weights stay in, and the steps
// between products. In a build without CUDA all of it throws (src/stubs/cuda.cc).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "heddle/linear.h"
#include "heddle/tensor.h"

namespace heddle::cuda {

// The current GPU's number. Throws RuntimeError "[operation] device is cuda: ..." where there is none.
int current_gpu(std::string_view operation);

// Memory of the current GPU with a copy of `bytes` bytes; waits for it.
std::byte* copied_to_gpu(const void* from, std::size_t bytes);
void free_on_gpu(std::byte* data) noexcept;
// From the host's memory, on the stream: that memory may change once this returns, unless it is page-locked.
void copy_to_gpu(void* to, const void* from, std::size_t bytes, void* stream);

// Activations are f16 or bf16 ("dtype"), with a multiple of 8 columns and rows at multiples of 16 bytes, contiguous but
// for what has a stride. Sums are f32, and a row's bits do not depend on the others.
struct NormRows {
  DType dtype;
  Norm kind = Norm::layer_norm;  // or rms_norm
  std::int64_t rows, columns;
  const float *weight, *bias;  // [columns]; no bias: null
  float epsilon;
  void* y;  // [rows, columns], `y_stride` elements apart
  std::int64_t y_stride;
};
// Row i of the packed sequences: token ids[i] at its position, of token type 0.
struct EmbeddingRows {
  const std::int32_t *ids, *offsets;  // [rows], [sequences + 1]
  std::int64_t sequences;
  const void *word, *position, *token_type;  // [n, columns], of dtype
};
// y = norm(x), or of the sum of a token's three embeddings. x may be y.
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
