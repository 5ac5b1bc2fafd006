// What a Transformer block refuses, and in which words.
#include <cmath>
#include <functional>

#include <gtest/gtest.h>

#include "cuda/backend.h"
#include "heddle/error.h"
#include "heddle/transformer_block.h"
#include "kit/device_mirror.h"
#include "unit/block_model.h"

namespace heddle {
namespace {

using test::block_options;
using test::BlockInput;
using test::BlockModel;

std::string error_of(const std::function<void()>& run) {
  try {
    run();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(TransformerBlockArguments, Options) {
  const auto refused = [](const std::function<void(TransformerBlockOptions&)>& change) {
    TransformerBlockOptions options = block_options();
    const BlockModel model(options);
    change(options);
    return error_of([&] { TransformerBlock(options, model.weights()); });
  };
  EXPECT_EQ(refused([](auto& o) { o.hidden = 0; }), "[transformer_block] hidden is 0: it must be from 1 to 16777216");
  EXPECT_EQ(refused([](auto& o) { o.heads = -1; }), "[transformer_block] heads is -1: it must be from 1 to 16777216");
  EXPECT_EQ(refused([](auto& o) { o.heads = 5; }),
            "[transformer_block] hidden is 64: it must be a multiple of heads, 5");
  EXPECT_EQ(refused([](auto& o) { o.hidden = 4096; }),
            "[transformer_block] heads of 1024 elements: at most 256 are supported; hidden is 4096, heads 4");
  EXPECT_EQ(refused([](auto& o) { o.kv_heads = 3; }),
            "[transformer_block] kv_heads is 3: it must divide heads, 4, or be 0 for as many");
  EXPECT_EQ(refused([](auto& o) { o.intermediate = 0; }),
            "[transformer_block] intermediate is 0: it must be from 1 to 16777216");
  EXPECT_EQ(refused([](auto& o) { o.norm = Norm::none; }),
            "[transformer_block] norm is none: it must be layer_norm or rms_norm");
  EXPECT_EQ(refused([](auto& o) { o.activation = Activation::none; }),
            "[transformer_block] activation is none: it must be relu, gelu_erf, gelu_tanh, silu or swiglu");
  EXPECT_EQ(refused([](auto& o) { o.eps = std::nanf(""); }),
            "[transformer_block] eps is nan: it must be finite and not negative");
  EXPECT_EQ(refused([](auto& o) { o.dtype = DType::f16; }),
            "[transformer_block] dtype is float16: it must be float32 or bfloat16");
  EXPECT_EQ(refused([](auto& o) {
              o.layers = {{"gate", "nvfp4"}};
            }),
            "[transformer_block] pattern 'gate' decides over no layer: names are qkv, out, up and down");
  EXPECT_NE(refused([](auto& o) { o.layers = {{"up", "fp5"}}; }).find("fp5"), std::string::npos);
  EXPECT_NE(refused([](auto& o) { o.layers = {{"up", "nvfp4:best"}}; }).find("best"), std::string::npos);
  EXPECT_EQ(refused([](auto& o) {
              o.layers = {{"up", "int4_g128"}};
            }),
            "[transformer_block] up is [128, 64]: K = 64 is no multiple of 128, the group of int4_g128");
}

// What is refused before a GPU is looked for.
TEST(TransformerBlockArguments, OnAGpu) {
  TransformerBlockOptions options = block_options();
  options.device = Device::cuda;
  options.dtype = DType::bf16;
  const BlockModel model(options);
  const auto refused = [&](const std::function<void(TransformerBlockOptions&)>& change) {
    TransformerBlockOptions changed = options;
    change(changed);
    return error_of([&] { TransformerBlock(changed, model.weights()); });
  };
  EXPECT_EQ(refused([](auto& o) { o.dtype = DType::f32; }),
            "[transformer_block] dtype is float32: on a GPU it must be float16 or bfloat16");
  EXPECT_EQ(refused([](auto& o) { o.hidden = 68; }),
            "[transformer_block] hidden is 68: on a GPU it must be a multiple of 8");
  EXPECT_EQ(refused([](auto& o) { o.intermediate = 100; }),
            "[transformer_block] intermediate is 100: on a GPU it must be a multiple of 8");
  EXPECT_EQ(refused([](auto& o) {
              o.hidden = 24;
              o.kv_heads = 1;
            }),
            "[transformer_block] qkv has (heads + 2 kv_heads) * head = 36 rows, of heads 4, kv_heads 1 and heads of 6 "
            "elements: on a GPU they must be a multiple of 8");
  for (const char* format : {"float32", "float16"}) {
    EXPECT_EQ(refused([&](auto& o) {
                o.layers = {{"up", format}};
              }),
              std::string("[transformer_block] pattern 'up' asks for ") + format +
                  ": on a GPU products are in dtype, bfloat16, or low-bit");
  }
  if (!kit::current_gpu().name.empty()) return;  // tests/gpu/transformer_block_test.cc
  try {
    TransformerBlock(options, model.weights());
    FAIL() << "there is no GPU";
  } catch (const RuntimeError& error) {
    const char* why = cuda::built() ? "this process sees no GPU" : "this heddle was built without CUDA";
    EXPECT_TRUE(std::string(error.what()).starts_with(std::string("[transformer_block] device is cuda: ") + why))
        << error.what();
  }
}

TEST(TransformerBlockArguments, Weights) {
  const auto refused = [](const std::function<void(TransformerBlockWeights&)>& change, DType dtype = DType::f32,
                          Norm norm = Norm::layer_norm, const char* format = nullptr) {
    TransformerBlockOptions options = block_options();
    options.dtype = dtype;
    options.norm = norm;
    if (format != nullptr) options.layers = {{"*", format}};
    const BlockModel model(options);
    TransformerBlockWeights weights = model.weights();
    change(weights);
    return error_of([&] { TransformerBlock(options, weights); });
  };
  const std::string sizes = " for hidden 64, heads 4, kv_heads 2, intermediate 128 and gelu_erf";
  EXPECT_EQ(refused([](auto& w) { w.qkv = {}; }), "[transformer_block] qkv is missing: it must be [128, 64]");
  EXPECT_EQ(refused([](auto& w) { w.norm2 = {}; }), "[transformer_block] norm2 is missing: it must be [64]");
  EXPECT_EQ(refused([](auto& w) { w.up = w.down; }),
            "[transformer_block] up is [64, 128]: it must be [128, 64]" + sizes);
  EXPECT_EQ(refused([](auto& w) { w.down_bias = w.up_bias; }),
            "[transformer_block] down_bias is [128]: it must be [64]" + sizes);
  EXPECT_EQ(refused([](auto& w) { w.out.dtype = DType::i32; }),
            "[transformer_block] out is int32: it must be float32, float16 or bfloat16");
  EXPECT_EQ(refused([](auto& w) { w.out.device = Device::cuda; }),
            "[transformer_block] out is on a GPU: a block's weights are given in the CPU's memory");
  EXPECT_EQ(refused([](auto& w) { w.norm1_bias = w.norm1; }, DType::f32, Norm::rms_norm),
            "[transformer_block] norm1_bias is given and norm is rms_norm: only layer_norm has one");

  const auto with = [](TensorView& view, std::int64_t at, float value) { static_cast<float*>(view.data)[at] = value; };
  for (const char* format : {static_cast<const char*>(nullptr), "nvfp4", "int8_row"}) {
    EXPECT_EQ(refused([&](auto& w) { with(w.down, 3 * 128 + 5, std::nanf("")); }, DType::f32, Norm::layer_norm, format),
              "[transformer_block] down holds nan at [3, 5]: weights must be finite in float32");
    EXPECT_EQ(refused([&](auto& w) { with(w.qkv, 64, INFINITY); }, DType::f32, Norm::layer_norm, format),
              "[transformer_block] qkv holds inf at [1, 0]: weights must be finite in float32");
  }
  EXPECT_EQ(refused([&](auto& w) { with(w.up, 1, 3.4e38f); }, DType::bf16),
            "[transformer_block] up holds 3.4e+38 at [0, 1]: weights must be finite in bfloat16");
  EXPECT_EQ(refused([&](auto& w) { with(w.norm1, 7, -INFINITY); }),
            "[transformer_block] norm1 holds -inf at [7]: weights must be finite in float32");
  EXPECT_EQ(refused([&](auto& w) { with(w.up_bias, 2, std::nanf("")); }),
            "[transformer_block] up_bias holds nan at [2]: weights must be finite in float32");
  // float16's scales end before float32 does.
  EXPECT_EQ(
      refused([&](auto& w) { with(w.out, 0, 1e30f); }, DType::f32, Norm::layer_norm, "int4_g64"),
      "[transformer_block] out: [quantize] weights[0, 0] is 1e+30: int4_g64 has float16 scales, which serve weights "
      "up to 458528");
}

class TransformerBlockCall : public testing::Test {
 protected:
  struct Arguments {
    TensorView x, cu_seqlens, y;
    Runtime runtime;
  };
  std::string refused(const std::function<void(Arguments&)>& change, std::int64_t longest = 0) {
    const std::size_t bytes = block_.workspace(input_.total(), input_.sequences(), input_.longest());
    WorkspaceBuffer scratch;
    Arguments arguments{TensorView(input_.x.data(), DType::f32, {12, 64}),
                        input_.offsets(),
                        TensorView(y_.data(), DType::f32, {12, 64}),
                        {{scratch.get(bytes).data, bytes}, nullptr, nullptr}};
    change(arguments);
    const std::string error =
        error_of([&] { block_.forward(arguments.x, arguments.cu_seqlens, arguments.y, arguments.runtime, longest); });
    EXPECT_EQ(y_, std::vector<float>(y_.size(), 5.0f)) << error;  // nothing is written
    return error;
  }
  std::string refused(std::vector<std::int32_t> cu_seqlens) {
    return refused([&](Arguments& a) {
      a.cu_seqlens = TensorView(cu_seqlens.data(), DType::i32, {static_cast<std::int64_t>(cu_seqlens.size())});
    });
  }

  const TransformerBlockOptions options_ = block_options();
  const TransformerBlock block_{options_, BlockModel(options_).weights()};
  BlockInput input_{options_, {7, 5}};
  std::vector<float> y_ = std::vector<float>(12 * 64, 5.0f);
};

TEST_F(TransformerBlockCall, Tensors) {
  EXPECT_EQ(refused([](auto& a) { a.x.device = Device::cuda; }),
            "[transformer_block] x is on a GPU: this block was made to run on the CPU");
  EXPECT_EQ(refused([](auto& a) { a.y.device = Device::cuda; }),
            "[transformer_block] y is on a GPU: this block was made to run on the CPU");
  EXPECT_EQ(refused([](auto& a) { a.cu_seqlens.device = Device::cuda; }),
            "[transformer_block] cu_seqlens is on a GPU: this block was made to run on the CPU");
  EXPECT_EQ(refused([](auto& a) {
              a.x = TensorView(a.x.data, DType::f32, {24, 32});
            }),
            "[transformer_block] x is [24, 32]: it must be [total, 64], the block's hidden");
  EXPECT_EQ(refused([](auto& a) {
              a.y = TensorView(a.y.data, DType::f32, {11, 64});
            }),
            "[transformer_block] y is [11, 64]: it must be [12, 64], as x");
  EXPECT_EQ(refused([](auto& a) {
              a.x.stride = {1, 12};
            }),
            "[transformer_block] x's last dimension has stride 12: it must be 1");
  EXPECT_NE(refused([](auto& a) { a.x.dtype = DType::bf16; }).find("[transformer_block] x is bfloat16"),
            std::string::npos);
  EXPECT_NE(refused([](auto& a) { a.y.stride = {32, 1}; }).find("[transformer_block] y"), std::string::npos);
  EXPECT_NE(refused([](auto& a) { a.x = {}; }).find("[transformer_block] x"), std::string::npos);
  EXPECT_NE(refused([](auto& a) { a.x.data = nullptr; }).find("[transformer_block] x"), std::string::npos);
}

TEST_F(TransformerBlockCall, Lengths) {
  EXPECT_EQ(refused(std::vector<std::int32_t>{1, 12}), "[transformer_block] cu_seqlens[0] is 1: it must be 0");
  EXPECT_EQ(refused(std::vector<std::int32_t>{0, 9, 7, 12}),
            "[transformer_block] cu_seqlens decreases from 9 to 7 at entry 2: it must never decrease");
  EXPECT_EQ(refused(std::vector<std::int32_t>{0, 11}),
            "[transformer_block] cu_seqlens ends at 11: it must end at x's first extent, 12");
  EXPECT_EQ(refused(std::vector<std::int32_t>{}),
            "[transformer_block] cu_seqlens is empty: it holds one offset more than sequences");
  EXPECT_EQ(refused([](auto&) {}, 6), "[transformer_block] longest is 6: the longest sequence has 7");
  EXPECT_EQ(refused([](auto&) {}, -1), "[transformer_block] longest is -1: it must not be negative");
}

TEST_F(TransformerBlockCall, Workspace) {
  const std::string small = refused([](auto& a) { a.runtime.workspace.bytes = 128; });
  EXPECT_TRUE(small.starts_with("[transformer_block] the workspace has 128 bytes: this call needs ")) << small;
  EXPECT_TRUE(small.ends_with("; TransformerBlock::workspace() says how many always suffice")) << small;
  EXPECT_NE(refused([](auto& a) { a.runtime.workspace.data = nullptr; }).find("the workspace has 0 bytes"),
            std::string::npos);
  EXPECT_EQ(refused([](auto& a) { a.runtime.workspace.data = static_cast<std::byte*>(a.runtime.workspace.data) + 4; }),
            "[transformer_block] the workspace must be aligned to 64 bytes");
  const auto query = [&](std::int64_t total, std::int64_t sequences, std::int64_t longest) {
    return error_of([&] { block_.workspace(total, sequences, longest); });
  };
  EXPECT_EQ(query(-1, 1, 1), "[transformer_block_workspace] total is -1: it must be from 0 to 2^31 - 1");
  EXPECT_EQ(query(5, 1, 0), "[transformer_block_workspace] longest is 0: 5 rows need a longer sequence");
  EXPECT_EQ(query(5, 2, 2), "[transformer_block_workspace] 2 sequences of at most 2 rows cannot hold 5");
}

}  // namespace
}  // namespace heddle
