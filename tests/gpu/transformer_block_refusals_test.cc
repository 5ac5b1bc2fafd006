// What the Transformer block refuses on a GPU.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "gpu/block_on_gpu.h"
#include "kit/messages.h"

namespace heddle::kit {
namespace {

using test::BlockInput;
using test::BlockModel;

TEST(GpuTransformerBlockErrors, Construction) {
  const BlockModel model(on_gpu(DType::f16));
  const auto refused = [&](const std::function<void(TransformerBlockWeights&)>& change, const std::string& message) {
    TransformerBlockWeights weights = model.weights();
    change(weights);
    expect_message([&] { TransformerBlock(model.options, weights); }, message);
  };
  refused([](auto& w) { w.up.device = Device::cuda; },
          "[transformer_block] up is on a GPU: a block's weights are given in the CPU's memory");
  std::vector<float> large(64 * 64, 0.5f);
  large[65] = 65520;  // rounds to float16's infinity
  refused(
      [&](auto& w) {
        w.out = TensorView(large.data(), DType::f32, {64, 64});
      },
      "[transformer_block] out holds 65520 at [1, 1]: weights must be finite in float16");
}

// Nothing is launched: y keeps its bytes.
TEST(GpuTransformerBlockErrors, Forward) {
  const TransformerBlockOptions o = on_gpu(DType::bf16);
  const TransformerBlock block(o, BlockModel(o).weights());
  const BlockInput input(o, {7, 5});
  BlockOnGpu call(block, input);
  const HostTensor before = HostTensor::output(o.dtype, {12, 64});
  struct Arguments {
    TensorView x, cu_seqlens, y;
    Runtime runtime;
    std::int64_t longest;
  };
  const auto refused = [&](const std::function<void(Arguments&)>& change, const std::string& message) {
    Arguments a{call.x.view(), call.cu_seqlens, call.y.view(), call.runtime, call.longest};
    change(a);
    expect_message([&] { block.forward(a.x, a.cu_seqlens, a.y, a.runtime, a.longest); }, message);
    HostTensor after = before;
    call.stream.synchronize();
    call.y.read(after);
    EXPECT_TRUE(after.same_bits(before)) << message;
  };
  const std::string here = ": this block was made to run on a GPU";
  refused([](auto& a) { a.x.device = Device::cpu; }, "[transformer_block] x is on the CPU" + here);
  refused([](auto& a) { a.y.device = Device::cpu; }, "[transformer_block] y is on the CPU" + here);
  refused([](auto& a) { a.cu_seqlens.device = Device::cpu; }, "[transformer_block] cu_seqlens is on the CPU" + here);
  refused([](auto& a) { a.x.dtype = DType::f16; }, "[transformer_block] x is float16");
  refused([](auto& a) { a.y.shape[0] = 11; }, "[transformer_block] y is [11, 64]: it must be [12, 64], as x");
  refused([](auto& a) { a.x.data = static_cast<std::byte*>(a.x.data) + 2; },
          "[transformer_block] x must be aligned to 16 bytes");
  refused([](auto& a) { a.x.stride[0] = 68; },
          "[transformer_block] x's rows are 68 elements apart: on a GPU it must be a multiple of 8, and at least 64");
  refused([](auto& a) { a.x.stride[0] = 0; }, "[transformer_block] x's rows are 0 elements apart");
  refused([](auto& a) { a.y.stride = {1, 12}; }, "[transformer_block] y's last dimension has stride 12: it must be 1");
  refused(
      [](auto& a) { a.longest = 0; },
      "[transformer_block] longest is 0: cu_seqlens is on a GPU, where lengths are not read, so an upper bound must "
      "be given");
  refused([](auto& a) { a.longest = 5; }, "[transformer_block] 2 sequences of at most 5 rows cannot hold 12");
  refused([](auto& a) { a.longest = -1; }, "[transformer_block] longest is -1: it must not be negative");
  refused([](auto& a) { a.runtime.workspace.bytes -= 1; },
          "; TransformerBlock::workspace() says how many always suffice");
  refused([](auto& a) { a.runtime.workspace.data = nullptr; }, "[transformer_block] the workspace has 0 bytes");
  refused([](auto& a) { a.runtime.workspace.data = static_cast<std::byte*>(a.runtime.workspace.data) + 4; },
          "[transformer_block] the workspace must be aligned to 64 bytes");
}

}  // namespace
}  // namespace heddle::kit
