// The launches of the steps between the products of the encoder and the Transformer block.
#include "cuda/any/model/kernel.cuh"
#include "cuda/common/launch.cuh"

namespace heddle::cuda {
namespace {

using namespace any::model;

unsigned blocks(std::int64_t count, std::int64_t each) { return static_cast<unsigned>((count + each - 1) / each); }

// Calls run(__half or __nv_bfloat16) for the dtype.
template <class Run>
void with_type(DType dtype, const Run& run) {
  dtype == DType::f16 ? run(__half{}) : run(__nv_bfloat16{});
}

}  // namespace

void norm_rows(const void* x, const NormRows& norm, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  // Of a wide row a warp's lanes would have many pieces one after the other, and few rows leave a GPU empty.
  const bool wide = norm.columns > 8 * 32 * kPiece;
  with_type(norm.dtype, [&]<class T>(T) {
    const StoredRows<T> rows{static_cast<const T*>(x), norm.columns};
    if (wide) {
      start("norm_rows", norm_kernel<T, kThreads, StoredRows<T>>, {blocks(norm.rows, 1), kThreads}, on, rows, norm);
    } else {
      start("norm_rows", norm_kernel<T, 32, StoredRows<T>>, {blocks(norm.rows, kWarps), kThreads}, on, rows, norm);
    }
  });
}

void norm_embeddings(const EmbeddingRows& embeddings, const NormRows& norm, void* stream) {
  with_type(norm.dtype, [&]<class T>(T) {
    const EmbeddedRows<T> rows{embeddings, norm.columns};
    start("encode", norm_kernel<T, 32, EmbeddedRows<T>>, {blocks(norm.rows, kWarps), kThreads},
          static_cast<cudaStream_t>(stream), rows, norm);
  });
}

void pool_rows(const PooledRows& rows, void* stream) {
  with_type(rows.dtype, [&]<class T>(T) {
    start("encode", pool_kernel<T>, {static_cast<unsigned>(rows.sequences), kThreads},
          static_cast<cudaStream_t>(stream), rows);
  });
}

void widen(const void* x, DType dtype, std::int64_t count, float* y, void* stream) {
  const std::int64_t pieces = count / kPiece;
  with_type(dtype, [&]<class T>(T) {
    start("encode", widen_kernel<T>, {blocks(pieces, kThreads), kThreads}, static_cast<cudaStream_t>(stream), x, pieces,
          y);
  });
}

}  // namespace heddle::cuda
