// Plain storage of a quantised matrix in a GPU's memory, each tensor in memory of exactly its size.
#pragma once

#include <utility>
#include <vector>

#include "kit/device_mirror.h"
#include "kit/lowbit_weights.h"

namespace heddle::kit {

class DeviceMatrix {
 public:
  DeviceMatrix(const lowbit::Format& format, std::int64_t rows, std::int64_t columns)
      : matrix_(lowbit::storage(format, rows, columns)) {
    for_each_view([&](TensorView& view) {
      memory_.emplace_back(bytes_of(view), 0xA5);
      view.data = memory_.back().data();
      view.device = Device::cuda;
    });
  }
  explicit DeviceMatrix(const lowbit::QuantizedMatrix& host) : DeviceMatrix(host.format, host.rows, host.columns) {
    const TensorView* from[] = {&host.codes, &host.scales, &host.zeros, &host.global_scale};
    std::size_t next = 0;
    for (const TensorView* view : from) {
      if (view->given()) memory_[next++].write(0, view->data, bytes_of(*view));
    }
  }

  const lowbit::QuantizedMatrix& matrix() const { return matrix_; }

  // Copied back.
  QuantizedMemory read() const {
    QuantizedMemory host(matrix_.format, matrix_.rows, matrix_.columns);
    const lowbit::QuantizedMatrix& to = host.matrix();
    const TensorView* into[] = {&to.codes, &to.scales, &to.zeros, &to.global_scale};
    std::size_t next = 0;
    for (const TensorView* view : into) {
      if (view->given()) memory_[next++].read(0, view->data, bytes_of(*view));
    }
    return host;
  }

 private:
  static std::size_t bytes_of(const TensorView& view) {
    return static_cast<std::size_t>(view.elements()) * size_of(view.dtype);
  }
  template <class Visit>
  void for_each_view(Visit visit) {
    for (TensorView* view : {&matrix_.codes, &matrix_.scales, &matrix_.zeros, &matrix_.global_scale}) {
      if (view->given()) visit(*view);
    }
  }

  std::vector<DeviceMemory> memory_;
  lowbit::QuantizedMatrix matrix_;
};

// quantize() on the GPU, with the workspace that it asks for.
inline void quantize_on_gpu(const TensorView& weights, const lowbit::QuantizeOptions& options,
                            const lowbit::QuantizedMatrix& out) {
  const DeviceStream stream;
  const DeviceMemory scratch(lowbit::quantize_workspace(weights, options, out), 0xFF);
  Runtime runtime;
  runtime.stream = stream.get();
  runtime.workspace = {scratch.data(), scratch.bytes()};
  lowbit::quantize(weights, options, out, runtime);
}

inline HostTensor dequantize_on_gpu(const lowbit::QuantizedMatrix& matrix, DType dtype,
                                    Layout layout = Layout::contiguous) {
  HostTensor out = HostTensor::output(dtype, {matrix.rows, matrix.columns}, layout);
  const DeviceTensor there(out);
  const DeviceStream stream;
  Runtime runtime;
  runtime.stream = stream.get();
  lowbit::dequantize(matrix, there.view(), {}, runtime);
  stream.synchronize();
  there.read(out);
  return out;
}

}  // namespace heddle::kit
