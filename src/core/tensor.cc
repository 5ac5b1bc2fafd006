#include "heddle/tensor.h"

#include <algorithm>

#include "core/check.h"

namespace heddle {

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "float32";
    case DType::f16:
      return "float16";
    case DType::bf16:
      return "bfloat16";
    case DType::i32:
      return "int32";
    case DType::f8e4m3:
      return "float8_e4m3fn";
    case DType::boolean:
      return "bool";
    case DType::u8:
      return "uint8";
    case DType::i8:
      return "int8";
  }
  return "unknown";
}

std::array<std::int64_t, kMaxRank> contiguous_strides(int rank, const std::array<std::int64_t, kMaxRank>& shape) {
  std::array<std::int64_t, kMaxRank> stride{};
  std::int64_t step = 1;
  for (int i = rank - 1; i >= 0; --i) {
    stride[i] = step;
    if (__builtin_mul_overflow(step, std::max<std::int64_t>(shape[i], 1), &step)) {
      throw Error("[tensor] the extents' product does not fit 63 bits");
    }
  }
  return stride;
}

TensorView::TensorView(const void* data_in, DType dtype_in, std::initializer_list<std::int64_t> shape_in)
    : data(const_cast<void*>(data_in)), dtype(dtype_in), rank(static_cast<int>(shape_in.size())) {
  if (rank > kMaxRank) throw Error(text("[tensor] ", rank, " dimensions: at most ", kMaxRank, " are supported"));
  std::copy(shape_in.begin(), shape_in.end(), shape.begin());
  for (int i = 0; i < rank; ++i) {
    if (shape[i] < 0) throw Error(text("[tensor] extent ", shape[i], " in dimension ", i, ": extents are at least 0"));
  }
  stride = contiguous_strides(rank, shape);
}

TensorView::TensorView(const void* data_in, DType dtype_in, std::initializer_list<std::int64_t> shape_in,
                       std::initializer_list<std::int64_t> stride_in)
    : TensorView(data_in, dtype_in, shape_in) {
  if (stride_in.size() != shape_in.size()) {
    throw Error(text("[tensor] ", stride_in.size(), " strides for ", shape_in.size(), " extents"));
  }
  std::copy(stride_in.begin(), stride_in.end(), stride.begin());
}

std::int64_t TensorView::elements() const {
  std::int64_t product = rank > 0 ? 1 : 0;
  for (int i = 0; i < rank; ++i) product *= shape[i];
  return product;
}

bool TensorView::contiguous() const {
  std::int64_t step = 1;
  for (int i = rank - 1; i >= 0; --i) {
    if (shape[i] > 1 && stride[i] != step) return false;
    step *= shape[i];
  }
  return true;
}

std::string TensorView::shape_text() const {
  std::string out = "[";
  for (int i = 0; i < rank; ++i) out += (i ? ", " : "") + std::to_string(shape[i]);
  return out + "]";
}

}  // namespace heddle
