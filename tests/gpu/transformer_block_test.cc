// The Transformer block on a GPU against the textbook one in double precision.
#include <gtest/gtest.h>

#include <algorithm>
#include <ostream>
#include <string>
#include <vector>

#include "core/check.h"
#include "gpu/block_on_gpu.h"
#include "unit/block_expected.h"

namespace heddle::kit {
namespace {

using test::BlockExpected;
using test::BlockInput;
using test::BlockModel;
using test::text_of;

// Odd numbers, one row and none.
const std::vector<int> kLengths = {17, 1, 0, 66, 5};

void expect_accurate(const BlockModel& model, const BlockInput& input) {
  SCOPED_TRACE(text_of(model.options));
  const TransformerBlock block(model.options, model.weights());
  const std::vector<double> found = BlockOnGpu(block, input).run();
  BlockExpected(model, input).expect_right(found);
  EXPECT_EQ(BlockOnGpu(block, input, 0x11).run(), found);
}

struct Case {
  std::string name;
  DType dtype;
  std::vector<lowbit::LayerRule> rules;
  bool all_options;  // else some, which have each value of each option
  friend void PrintTo(const Case& c, std::ostream* to) { *to << c.name; }
};

std::vector<Case> cases() {
  std::vector<Case> out;
  for (const DType dtype : {DType::bf16, DType::f16}) {
    const std::string name = name_of(dtype);
    out.push_back({name, dtype, {}, true});
    for (const std::string format : {"nvfp4", "int8_row", "mxfp4", "int4_g32_zp", "int4_g64", "int4_g128", "nf4",
                                     "fp4_bnb", "fp8_row", "e2m1_row"}) {
      out.push_back({format + "_" + name, dtype, {{"*", format}}, format == "nvfp4"});
    }
    out.push_back({"mixed_" + name, dtype, {{"qkv", "int8_row"}, {"up", "nvfp4:mse"}, {"d*", name}}, true});
    out.push_back({"other_mix_" + name,
                   dtype,
                   {{"out", "mxfp4:even"}, {"d?wn", "int4_g32"}, {"qkv", name}, {"up", "nf4"}},
                   false});
  }
  return out;
}

class GpuTransformerBlock : public testing::TestWithParam<Case> {
 protected:
  TransformerBlockOptions options() const {
    TransformerBlockOptions out = on_gpu(GetParam().dtype, GetParam().rules);
    if (GetParam().name.find("g128") != std::string::npos) out.hidden = 128;  // whole groups
    return out;
  }
};

TEST_P(GpuTransformerBlock, IsWithinTheRule) {
  constexpr Activation kActivations[] = {Activation::relu, Activation::gelu_erf, Activation::gelu_tanh,
                                         Activation::silu, Activation::swiglu};
  int number = 0;
  for (const bool norm_first : {true, false}) {
    for (const Norm norm : {Norm::layer_norm, Norm::rms_norm}) {
      for (const Activation activation : kActivations) {
        for (const bool causal : {false, true}) {
          for (const std::int64_t kv_heads : {4, 2, 1}) {
            // Every eleventh: each value of each option is among them.
            if (++number % 11 != 0 && !GetParam().all_options) continue;
            if (kv_heads == 1 && activation != Activation::swiglu && GetParam().all_options) continue;
            TransformerBlockOptions o = options();
            o.norm_first = norm_first;
            o.norm = norm;
            o.activation = activation;
            o.causal = causal ? Causal::top_left : Causal::none;
            o.kv_heads = kv_heads;
            expect_accurate(BlockModel(o, kv_heads != 4), BlockInput(o, kLengths));
          }
        }
      }
    }
  }
}

// Rows enough for the kernels that many rows have.
TEST_P(GpuTransformerBlock, ManyRows) {
  for (const bool norm_first : {true, false}) {
    TransformerBlockOptions o = options();
    o.norm_first = norm_first;
    o.activation = norm_first ? Activation::swiglu : Activation::gelu_erf;
    o.causal = norm_first ? Causal::bottom_right : Causal::none;
    expect_accurate(BlockModel(o), BlockInput(o, {129, 1, 310, 77}));
  }
}

TEST_P(GpuTransformerBlock, SaysWhatItHolds) {
  const TransformerBlockOptions o = options();
  const BlockModel model(o);
  const TransformerBlock block(o, model.weights());
  EXPECT_EQ(block.options().device, Device::cuda);
  const std::vector<EncoderLayerInfo> layers = block.layers();
  ASSERT_EQ(layers.size(), 4u);
  std::size_t bytes = 0;
  for (int i = 0; i < 4; ++i) {
    const EncoderLayerInfo& layer = layers[static_cast<std::size_t>(i)];
    const std::string format = model.format(layer.name);
    EXPECT_EQ(layer.format, format.substr(0, format.find(':')));
    EXPECT_EQ(layer.rows, model.rows(i));
    EXPECT_EQ(layer.columns, model.columns(i));
    if (format == name_of(o.dtype)) {  // weight, bias, and the norm in front
      const auto norm = static_cast<std::size_t>(i % 2 == 0 ? 2 * layer.columns : 0);
      EXPECT_EQ(layer.weight_bytes, 2 * (static_cast<std::size_t>(layer.rows * (layer.columns + 1)) + norm));
    }
    bytes += layer.weight_bytes;
  }
  EXPECT_EQ(block.weight_bytes(), bytes);
}

INSTANTIATE_TEST_SUITE_P(, GpuTransformerBlock, testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

struct Widths {
  std::int64_t hidden, heads, kv_heads, intermediate;
};

// With each dtype and norm.
void expect_accurate(const Widths& widths, bool norm_first) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const Norm norm : {Norm::layer_norm, Norm::rms_norm}) {
      TransformerBlockOptions o = on_gpu(dtype);
      o.hidden = widths.hidden;
      o.heads = widths.heads;
      o.kv_heads = widths.kv_heads;
      o.intermediate = widths.intermediate;
      o.norm_first = norm_first;
      o.norm = norm;
      o.activation = norm_first ? Activation::swiglu : Activation::silu;
      SCOPED_TRACE(text(widths.hidden, " ", name_of(dtype)));
      expect_accurate(BlockModel(o), BlockInput(o, {3, 0, 9}));
    }
  }
}

// Heads whose keys and values begin at no multiple of 16 bytes, and widths that no warp divides.
TEST(GpuTransformerBlockEdges, OtherWidths) {
  for (const Widths& widths : {Widths{80, 4, 1, 56}, {24, 2, 2, 8}, {8, 1, 1, 40}, {264, 2, 1, 264}}) {
    for (const bool norm_first : {true, false}) expect_accurate(widths, norm_first);
  }
}

// A norm behind takes a block a row.
TEST(GpuTransformerBlockEdges, WideRows) { expect_accurate(Widths{2056, 257, 1, 40}, false); }

TEST(GpuTransformerBlockEdges, OneRowAndNone) {
  for (const char* format : {"bfloat16", "nvfp4", "int8_row"}) {
    for (const bool norm_first : {true, false}) {
      TransformerBlockOptions o = on_gpu(DType::bf16, {{"*", format}});
      o.norm_first = norm_first;
      const BlockModel model(o);
      for (const std::vector<int>& lengths : {std::vector<int>{1}, {0, 0, 1, 0}, {2}}) {
        expect_accurate(model, BlockInput(o, lengths));
      }
      const TransformerBlock block(o, model.weights());
      EXPECT_EQ(block.workspace(0, 0, 0), 0u);
      EXPECT_TRUE(BlockOnGpu(block, BlockInput(o, {})).run().empty());
      EXPECT_TRUE(BlockOnGpu(block, BlockInput(o, {0, 0})).run().empty());
    }
  }
}

TEST(GpuTransformerBlockEdges, WorksInPlaceOnStridedRows) {
  for (const char* format : {"float16", "nvfp4", "int4_g64"}) {
    for (const bool norm_first : {true, false}) {
      TransformerBlockOptions o = on_gpu(DType::f16, {{"*", format}});
      o.norm_first = norm_first;
      const TransformerBlock block(o, BlockModel(o).weights());
      const BlockInput input(o, kLengths);
      BlockOnGpu call(block, input);
      const std::vector<double> expected = call.run();
      // Every row is followed by one that must stay.
      const std::int64_t total = input.total(), h = o.hidden;
      HostTensor wide = HostTensor::output(o.dtype, {total, 2 * h});
      for (std::int64_t i = 0; i < total; ++i) {
        for (std::int64_t j = 0; j < h; ++j) {
          wide.set(i * 2 * h + j, input.x[static_cast<std::size_t>(i * h + j)]);
          wide.set(i * 2 * h + h + j, 7);
        }
      }
      const DeviceTensor mirror(wide);
      TensorView rows(mirror.view().data, o.dtype, {total, h}, {2 * h, 1});
      rows.device = Device::cuda;
      block.forward(rows, call.cu_seqlens, rows, call.runtime, call.longest);
      call.stream.synchronize();
      mirror.read(wide);
      EXPECT_EQ(wide.damage(), "");
      EXPECT_TRUE(call.scratch.intact());
      for (std::int64_t i = 0; i < total; ++i) {
        for (std::int64_t j = 0; j < h; ++j) {
          ASSERT_EQ(wide.get(i * 2 * h + j), expected[static_cast<std::size_t>(i * h + j)]) << i << ", " << j;
          ASSERT_EQ(wide.get(i * 2 * h + h + j), 7) << i << ", " << j;
        }
      }
    }
  }
}

// The bound that workspace() is given, and the one that forward() is, may be larger than the longest sequence.
TEST(GpuTransformerBlockEdges, LargerBounds) {
  for (const char* format : {"bfloat16", "nvfp4", "int4_g64"}) {
    TransformerBlockOptions o = on_gpu(DType::bf16, {{"*", format}});
    o.causal = Causal::top_left;
    const BlockModel model(o);
    const TransformerBlock block(o, model.weights());
    for (const std::vector<int>& lengths : {std::vector<int>{2, 1}, std::vector<int>(40, 5), {66, 3}, {20, 20, 30}}) {
      const BlockInput input(o, lengths);
      const BlockExpected expected(model, input);
      const std::size_t tight = block.workspace(input.total(), input.sequences(), input.longest());
      for (const std::int64_t longest : {std::int64_t{70}, std::int64_t{5000}}) {
        EXPECT_GE(block.workspace(input.total(), input.sequences(), longest), tight) << format;
        SCOPED_TRACE(text(format, ", ", longest));
        expected.expect_right(BlockOnGpu(block, input, 0xFF, longest).run());
      }
    }
  }
}

// A graph holds addresses, not values: each replay takes what x and cu_seqlens hold then.
TEST(GpuTransformerBlockEdges, ReplaysInAGraph) {
  for (const char* format : {"bfloat16", "nvfp4", "int8_row"}) {
    for (const bool norm_first : {true, false}) {
      for (const std::vector<int>& lengths : {std::vector<int>{17, 5, 66}, {1}}) {
        TransformerBlockOptions o = on_gpu(DType::bf16, {{"*", format}});
        o.norm_first = norm_first;
        const TransformerBlock block(o, BlockModel(o).weights());
        const BlockInput first(o, lengths);
        BlockInput second = first;
        std::reverse(second.x.begin(), second.x.end());
        if (lengths.size() == 3) second.cu_seqlens = {0, 40, 41, 88};
        const std::vector<double> of_first = BlockOnGpu(block, first, 0xFF, 66).run(),
                                  of_second = BlockOnGpu(block, second, 0xFF, 66).run();
        BlockOnGpu call(block, first, 0xFF, 66);
        const DeviceGraph graph(call.stream, [&] { call.launch(); });
        for (const auto& [input, wanted] : {std::pair{&first, &of_first}, {&second, &of_second}, {&first, &of_first}}) {
          call.write(*input);
          graph.replay(call.stream);
          EXPECT_EQ(call.read(), *wanted) << format;
        }
      }
    }
  }
}

// In order fragments16 what is less than 2^-29 of a row's largest scale becomes 0.
TEST(GpuTransformerBlockPacking, SaysWhatItChanged) {
  const TransformerBlockOptions o = on_gpu(DType::bf16, {{"out", "mxfp4"}});
  BlockModel model(o);
  std::fill_n(model.values.out.begin() + 3 * o.hidden, o.hidden, 1.0f);
  std::fill_n(model.values.out.begin() + 3 * o.hidden + 32, 32, 0x1p-40f);
  for (const EncoderLayerInfo& layer : TransformerBlock(o, model.weights()).layers()) {
    if (layer.name != "out") {
      EXPECT_EQ(layer.packing_error.changed, 0) << layer.name;
      continue;
    }
    EXPECT_EQ(layer.packing_error.changed, 32);
    EXPECT_EQ(layer.packing_error.max, 1.0);
    EXPECT_EQ(layer.packing_error.max_row, 3);
    EXPECT_EQ(layer.packing_error.max_column, 32);
  }
}

}  // namespace
}  // namespace heddle::kit
