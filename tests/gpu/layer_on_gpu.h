// A linear layer on a GPU, held to the double-precision reference.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/check.h"
#include "heddle/linear.h"
#include "kit/device_mirror.h"
#include "kit/linear_layer.h"

namespace heddle::kit {

// A candidate, and a format that has a kernel of its own in it.
struct Way {
  const char *candidate, *format;
  WeightOrder order = WeightOrder::fragments16;
  bool int8_x = false;

  // The case in that format, its K a multiple of the format's group.
  LinearCase filled(LinearCase c) const {
    c.format = format;
    c.order = order;
    c.int8_x = int8_x;
    const std::int64_t group = std::max<std::int64_t>(lowbit::format_named(c.format).group, 1);
    c.K = (c.K + group - 1) / group * group;
    return c;
  }
};

// A layer's tensors on the GPU. What the workspace held before must not matter.
class LayerOnGpu {
 public:
  // force: a candidate's name.
  explicit LayerOnGpu(const LinearLayer& layer, const char* force = "")
      : y_(layer.output()),
        x(layer.x),
        bias(layer.bias),
        residual(layer.residual),
        norm_weight(layer.norm_weight),
        norm_bias(layer.norm_bias),
        y(y_),
        weights(layer.packed.weights()),
        memory_(static_cast<std::size_t>(weights.data.shape[0])),
        layer_(layer),
        force_(force) {
    memory_.write(0, weights.data.data, memory_.bytes());
    weights.data.data = memory_.data();
    weights.device = weights.data.device = Device::cuda;
  }

  LinearOptions options(bool in_place = false) const {
    LinearOptions options = layer_.options();
    options.force = force_;
    if (options.bias.given()) options.bias = bias.view();
    if (options.residual.given()) options.residual = in_place ? y.view() : residual.view();
    if (options.norm_weight.given()) options.norm_weight = norm_weight.view();
    if (options.norm_bias.given()) options.norm_bias = norm_bias.view();
    return options;
  }

  std::size_t workspace(const LinearOptions& options) const {
    return linear_forward_workspace(x.view(), weights, options);
  }
  void launch(const LinearOptions& options, const DeviceStream& stream, const DeviceMemory& scratch) const {
    Runtime runtime;
    runtime.stream = stream.get();
    runtime.workspace = {scratch.data(), scratch.bytes()};
    linear_forward(x.view(), weights, y.view(), options, runtime);
  }
  void run(const LinearOptions& options) {
    const DeviceStream stream;
    const DeviceMemory scratch(workspace(options), 0xFF);
    launch(options, stream, scratch);
    stream.synchronize();
    y.read(y_);
  }
  Comparison compare() const { return layer_.compare(y_); }
  std::vector<double> values() const { return y_.values(); }

 private:
  HostTensor y_;

 public:
  const DeviceTensor x, bias, residual, norm_weight, norm_bias;
  DeviceTensor y;
  PackedWeights weights;

 private:
  DeviceMemory memory_;
  const LinearLayer& layer_;
  const char* const force_;
};

inline void expect_right(const LinearLayer& layer, const Comparison& result) {
  EXPECT_EQ(layer.blind_spots(), "");
  EXPECT_TRUE(result.passed) << result.worst;
}

inline void check(const LinearCase& c, const char* force) {
  SCOPED_TRACE(text(force, ": ", c.format, " ", c.rows[0], " x ", c.N, " x ", c.K, " ", name_of(c.dtype), " ",
                    name_of(c.activation), c.bias ? " bias" : "", c.residual ? " residual" : ""));
  const LinearLayer layer(c);
  LayerOnGpu gpu(layer, force);
  gpu.run(gpu.options(c.in_place));
  expect_right(layer, gpu.compare());
}

}  // namespace heddle::kit
