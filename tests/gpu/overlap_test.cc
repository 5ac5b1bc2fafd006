// Launches may overlap the grid before them (programmatic dependent launch): a call reads what that grid writes,
// however late, and keeps off what it still reads.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <string_view>
#include <utility>
#include <vector>

#include "core/check.h"
#include "gpu/device_backward.h"
#include "gpu/late_inputs.h"
#include "gpu/layer_on_gpu.h"
#include "gpu/nsa_step_on_gpu.h"

namespace heddle::kit {
namespace {

std::vector<Way> ways() {
  std::vector<Way> ways = {{"sm80_linear", "int4_g128"},
                           {"sm80_gemv", "nvfp4"},
                           {"cublaslt", "nvfp4", WeightOrder::matrix},
                           {"cublaslt_w8a8", "int8_row", WeightOrder::matrix, true}};
  if (current_gpu().major == 9) {
    ways.push_back({"sm90_w4a16", "nvfp4"});
    for (const char* format : {"nvfp4", "mxfp4"}) ways.push_back({"sm90_w4a8", format, WeightOrder::fragments8});
    ways.push_back({"cublaslt_w8a8", "fp8_row", WeightOrder::matrix8});
  }
  return ways;
}

// Runs an attention's call with its inputs late: the result is what it gave with them there.
template <class Case, class Call, class Outputs>
void expect_waits(Case& at, const Call& call, const LateInputs& late, const Outputs& expected) {
  const DeviceStream stream;
  const DeviceMemory memory(call.workspace(), 0xFF);
  at.poison();
  late.start(stream);
  call.launch(stream, memory);
  stream.synchronize();
  EXPECT_TRUE(same_bits(at.read(), expected));
}

TEST(GpuOverlap, LinearLayersWaitForInputs) {
  for (const Way& way : ways()) {
    for (const Norm norm : {Norm::none, Norm::rms_norm}) {
      for (const std::int64_t rows : {1, 40, 300}) {
        const bool few = std::string_view(way.candidate) == "sm80_gemv";
        if (few && (rows > 1 || norm != Norm::none)) continue;  // what it takes
        SCOPED_TRACE(text(way.candidate, " ", way.format, " ", rows, " rows ", name_of(norm)));
        LinearCase c{.rows = {rows}, .N = 512, .K = 512, .dtype = DType::bf16, .bias = true, .residual = true};
        c.norm = norm;
        const LinearLayer layer(way.filled(c));
        LayerOnGpu gpu(layer, way.candidate);
        const LinearOptions options = gpu.options();
        gpu.run(options);
        expect_right(layer, gpu.compare());
        const std::vector<double> expected = gpu.values();

        LateInputs late;
        for (const TensorView& x :
             {gpu.x.view(), options.bias, options.residual, options.norm_weight, options.norm_bias}) {
          late.add(x);
        }
        const DeviceStream stream;
        const DeviceMemory scratch(gpu.workspace(options), 0xFF);
        late.start(stream);
        gpu.launch(options, stream, scratch);
        stream.synchronize();
        HostTensor y = layer.output();
        gpu.y.read(y);
        EXPECT_EQ(y.values(), expected);
      }
    }
  }
}

// Each layer's x is what the one before wrote, and all use the same workspace.
TEST(GpuOverlap, LinearLayersInARow) {
  constexpr int kLayers = 9;
  for (const Way& way : ways()) {
    for (const std::int64_t rows : {1, 40, 300}) {
      if (std::string_view(way.candidate) == "sm80_gemv" && rows > 1) continue;
      SCOPED_TRACE(text(way.candidate, " ", way.format, " ", rows, " rows"));
      const LinearLayer layer(way.filled({.rows = {rows}, .N = 512, .K = 512, .dtype = DType::bf16}));
      const LayerOnGpu gpu(layer, way.candidate);
      const LinearOptions options = gpu.options();
      const HostTensor poison = layer.output();
      const DeviceStream stream;
      const DeviceMemory scratch(gpu.workspace(options), 0xFF);
      Runtime runtime;
      runtime.stream = stream.get();
      runtime.workspace = {scratch.data(), scratch.bytes()};
      const auto run = [&](bool late, bool apart) {
        std::array<DeviceTensor, kLayers> y;
        for (DeviceTensor& one : y) one = DeviceTensor(poison);
        LateInputs x;
        x.add(gpu.x.view());
        if (late) x.start(stream);
        for (int n = 0; n < kLayers; ++n) {
          linear_forward(n == 0 ? gpu.x.view() : y[n - 1].view(), gpu.weights, y[n].view(), options, runtime);
          if (apart) stream.synchronize();
        }
        stream.synchronize();
        std::vector<std::vector<double>> values;
        for (const DeviceTensor& one : y) {
          HostTensor back = poison;
          one.read(back);
          values.push_back(back.values());
        }
        return values;
      };
      const auto expected = run(false, true);
      for (const double last : expected.back()) ASSERT_TRUE(std::isfinite(last));
      for (const bool late : {true, false}) {
        const auto found = run(late, false);
        for (int n = 0; n < kLayers; ++n) ASSERT_EQ(found[n], expected[n]) << "layer " << n;
      }
    }
  }
}

TEST(GpuOverlap, AttentionWaitsForInputs) {
  for (const char* name :
       {"round_s128_d128_bf16", "round_s256_d64_causal_f16", "round_s256_d64_causal_f32", "feature_e4m3_d128_e4m3",
        "decode_long_bf16", "decode_1_4096_bf16", "decode_rows_64_f16", "decode_uneven_lengths_f16",
        "decode_f8_cache_scaled_rows_f16", "decode_rows_100_bias_mask_bf16", "decode_pages_16_many_bf16"}) {
    DeviceCase at(attention_case(name));
    for (const std::string& candidate : at.runner.candidates(Pass::forward)) {
      SCOPED_TRACE(text(name, " ", candidate));
      at.call.options.force = candidate;
      at.poison();
      at.call.run();
      const ForwardOutputs expected = at.read();
      expect_finite(expected);

      const AttentionOptions& o = at.call.options;
      LateInputs late;
      for (const TensorView& x : {at.call.q, at.call.k, at.call.v, o.bias, o.q_scale, o.k_scale, o.v_scale})
        late.add(x);
      for (const TensorView& x : {o.mask, o.seqused_q, o.seqused_k}) late.add(x, 0);
      expect_waits(at, at.call, late, expected);
    }
  }
}

TEST(GpuOverlap, AttentionBackwardWaitsForInputs) {
  for (const char* name : {"round_s128_d128_bf16", "round_s256_d64_causal_f16", "round_s96_d80_gqa4_bf16",
                           "round_s64_d256_f16", "round_s64_d64_f32"}) {
    BackwardCase at(attention_case(name));
    at.call.forward.options.deterministic = true;
    for (const std::string& candidate : candidates(at.call)) {
      SCOPED_TRACE(text(name, " ", candidate));
      at.call.forward.options.force = candidate;
      at.poison();
      at.call.run();
      const Gradients expected = at.read();
      expect_finite(expected);

      const DeviceCall& forward = at.call.forward;
      LateInputs late;
      for (const TensorView& x :
           {forward.q, forward.k, forward.v, forward.o, forward.lse, at.call.d_o, at.call.d_lse}) {
        late.add(x);
      }
      expect_waits(at, at.call, late, expected);
    }
  }
}

// Lengths among the inputs, and the cache, which the grid before still writes when the step may have been started.
TEST(GpuOverlap, StepsOfNativeSparseAttentionWaitForInputs) {
  if (current_gpu().major != 9) GTEST_SKIP() << "nsa_step is for Hopper";
  const NsaStepData data({"", DType::bf16, 2, 16, 128, 128, 1000, {895, 300}, 64, 5, 100});
  const auto run = [&](bool late) {
    const NsaStepOnGpu gpu(data);
    HostTensor out = data.out();
    const DeviceTensor to(out);
    LateInputs inputs;
    for (const DeviceTensor* x : {&gpu.q, &gpu.k_new, &gpu.v_new, &gpu.k, &gpu.v, &gpu.k_pooled, &gpu.v_pooled,
                                  &gpu.lengths, &gpu.g_cmp, &gpu.g_slc, &gpu.g_swa}) {
      inputs.add(x->view());
    }
    const DeviceStream stream;
    const DeviceMemory memory(gpu.workspace(to, data.options), 0xFF);
    if (late) inputs.start(stream);
    gpu.launch(to, data.options, stream, memory);
    stream.synchronize();
    to.read(out);
    HostTensor k = data.k;
    gpu.k.read(k);
    return std::pair(std::move(out), std::move(k));
  };
  const auto expected = run(false), found = run(true);
  EXPECT_TRUE(found.first.same_bits(expected.first));
  EXPECT_TRUE(found.second.same_bits(expected.second));
}

}  // namespace
}  // namespace heddle::kit
