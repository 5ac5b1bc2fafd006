// Packed weights as floats on the GPU: all of them, and blocks as products and gradients take them.
#include <gtest/gtest.h>

#include <cmath>

#include "core/check.h"
#include "cuda/linear.h"
#include "gpu/device_weights.h"
#include "heddle/linear.h"
#include "kit/device_mirror.h"
#include "kit/linear_layer.h"
#include "ops/linear/arguments.h"

namespace heddle::kit {
namespace {

// Every order that is for GPUs decodes to what it stands for: to float32 within the rounding of scales that were moved.
TEST(GpuUnpackWeights, EveryOrder) {
  struct Order {
    WeightOrder order;
    const char* format;
  };
  std::vector<Order> orders = {{WeightOrder::fragments8, "nvfp4"},
                               {WeightOrder::fragments8, "mxfp4"},
                               {WeightOrder::fragments8, "e2m1_row"},
                               {WeightOrder::matrix8, "fp8_row"}};
  std::vector<std::string> names = lowbit::format_names();
  for (const char* name : {"nf4_b32", "nf4_b128", "fp4_bnb_b32", "nf4_b512"}) names.emplace_back(name);
  for (const std::string& name : names) {
    orders.push_back({WeightOrder::fragments16, name.c_str()});
    orders.push_back({WeightOrder::matrix, name.c_str()});
  }
  for (const auto& [order, format] : orders) {
    for (const bool gated : {false, true}) {
      const std::string name = format;
      const std::int64_t group = lowbit::format_named(name).group;
      LinearCase c{.format = name,
                   .rows = {1},
                   .N = 150,
                   .K = group == 0 ? 301 : (384 + group - 1) / group * group,
                   .dtype = DType::bf16};
      c.order = order;
      if (gated) c.activation = Activation::swiglu;
      SCOPED_TRACE(text(name, " ", name_of(order), gated ? " gated" : ""));
      const LinearLayer layer(c);
      const DeviceWeights weights(layer, false);
      HostTensor out = HostTensor::output(DType::f32, {c.N, c.K}, Layout::padded_rows);
      const DeviceTensor there(out);
      const DeviceStream stream;
      Runtime runtime;
      runtime.stream = stream.get();
      unpack_weights(*weights, there.view(), {}, runtime);
      stream.synchronize();
      there.read(out);
      EXPECT_EQ(out.damage(), "");
      for (std::int64_t i = 0; i < c.N * c.K; ++i) {
        const double wanted = layer.weights()[static_cast<std::size_t>(i)];
        ASSERT_LE(std::abs(out.get(i) - wanted), std::abs(wanted) * 0x1p-22) << i << ": " << out.get(i);
      }
    }
  }
}

// Blocks of W as a layer's parts ask for them, whose rows begin and end inside of what was packed.
TEST(GpuUnpackWeights, Blocks) {
  for (const char* const format : {"nvfp4", "int4_g64_zp", "int8_row"}) {
    for (const bool gated : {false, true}) {
      LinearCase c{.format = format, .rows = {1}, .N = 300, .K = 512, .dtype = DType::bf16};
      c.order = WeightOrder::fragments16;
      if (gated) c.activation = Activation::swiglu;
      const LinearLayer layer(c);
      const DeviceWeights weights(layer, false);
      const LayerWeights problem = layer_weights(*weights);
      for (const cuda::WeightBlock& block : {cuda::WeightBlock{256, 0, 44, 512}, cuda::WeightBlock{70, 128, 61, 200},
                                             cuda::WeightBlock{0, 384, 300, 128}, cuda::WeightBlock{299, 0, 1, 8}}) {
        HostTensor out = HostTensor::output(DType::f32, {block.rows, block.columns});
        const DeviceTensor there(out);
        const DeviceStream stream;
        cuda::decode_weights(problem, block,
                             {.data = static_cast<std::byte*>(there.view().data),
                              .dtype = DType::f32,
                              .stride_n = block.columns,
                              .stride_k = 1},
                             stream.get());
        stream.synchronize();
        there.read(out);
        for (std::int64_t i = 0; i < block.rows * block.columns; ++i) {
          const std::int64_t n = block.row + i / block.columns, k = block.column + i % block.columns;
          const double wanted = layer.weights()[static_cast<std::size_t>(n * c.K + k)];
          ASSERT_LE(std::abs(out.get(i) - wanted), std::abs(wanted) * 0x1p-22) << format << ": " << n << ", " << k;
        }
      }
    }
  }
}

}  // namespace
}  // namespace heddle::kit
