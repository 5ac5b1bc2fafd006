// Packed weights of a layer on a GPU.
#pragma once

#include <cstddef>

#include "heddle/linear.h"
#include "kit/device_mirror.h"
#include "kit/linear_layer.h"

namespace heddle::kit {

// Packed weights on the GPU, with a copy in 16 bits if `kept`, or that copy alone if `dense` too.
class DeviceWeights {
 public:
  DeviceWeights(const LinearLayer& layer, bool kept, bool dense = false)
      : weights_(layer.packed.weights()), data_(static_cast<std::size_t>(weights_.data.shape[0])) {
    data_.write(0, weights_.data.data, data_.bytes());
    weights_.data.data = data_.data();
    weights_.device = weights_.data.device = Device::cuda;
    if (!kept) return;
    kept_ = DeviceTensor(HostTensor::input(layer.given().dtype, {weights_.rows, weights_.columns}));
    const DeviceStream stream;
    Runtime runtime;
    runtime.stream = stream.get();
    unpack_weights(weights_, kept_.view(), {}, runtime);
    stream.synchronize();
    weights_.kept = kept_.view();
    if (dense) weights_ = dense_weights(kept_.view(), weights_.gated);
  }
  const PackedWeights& operator*() const { return weights_; }

 private:
  PackedWeights weights_;
  DeviceMemory data_;
  DeviceTensor kept_;
};

}  // namespace heddle::kit
