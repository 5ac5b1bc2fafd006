#include "cuda/common/tensor_map.h"

#include <cudaTypedefs.h>

#include <algorithm>

#include "core/check.h"
#include "cuda/common/device.h"

namespace heddle::cuda {
namespace {

// Through the runtime, so that the library needs no libcuda where there is no GPU.
PFN_cuTensorMapEncodeTiled_v12000 encoder() {
  static const auto function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result),
          "tensor map");
    if (result != cudaDriverEntryPointSuccess) {
      throw RuntimeError("[tensor map] the NVIDIA driver is too old: Hopper kernels need one for CUDA 12 or later");
    }
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found);
  }();
  return function;
}

template <std::size_t kRank>
CUtensorMap encode(const void* data, DType dtype, const TensorMapShape<kRank>& shape) {
  const auto bytes = static_cast<std::int64_t>(size_of(dtype));
  std::array<cuuint64_t, kRank> extents;
  std::array<cuuint64_t, kRank - 1> strides;
  std::array<cuuint32_t, kRank> box, steps;
  for (std::size_t i = 0; i < kRank; ++i) {
    extents[i] = static_cast<cuuint64_t>(std::max<std::int64_t>(shape.extent[i], 1));
    box[i] = static_cast<cuuint32_t>(shape.box[i]);
    steps[i] = 1;
    // A dimension of one element has no stride to speak of; whatever the caller's view says there, 16 bytes will do.
    if (i > 0) strides[i - 1] = extents[i] == 1 ? 16 : static_cast<cuuint64_t>(shape.stride[i - 1] * bytes);
  }
  const auto type = dtype == DType::bf16     ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                    : dtype == DType::f8e4m3 ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                             : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const auto promotion = shape.streamed ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
  CUtensorMap map;
  const auto ask = [&] {
    return encoder()(&map, type, kRank, const_cast<void*>(data), extents.data(), strides.data(), box.data(),
                     steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, promotion,
                     CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult status = ask();
  if (status == CUDA_ERROR_INVALID_CONTEXT) {  // a thread in which the runtime has not been at work yet
    int device = 0;
    check(cudaGetDevice(&device), "tensor map");
    check(cudaSetDevice(device), "tensor map");
    status = ask();
  }
  if (status != CUDA_SUCCESS) {
    throw RuntimeError(text("[tensor map] the driver refuses it (CUresult ", static_cast<int>(status), ")"));
  }
  return map;
}

}  // namespace

CUtensorMap make_tensor_map(const void* data, DType dtype, const TensorMapShape<4>& shape) {
  return encode(data, dtype, shape);
}
CUtensorMap make_tensor_map(const void* data, DType dtype, const TensorMapShape<5>& shape) {
  return encode(data, dtype, shape);
}

}  // namespace heddle::cuda
