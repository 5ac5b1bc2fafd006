// The Transformer block on the CPU: accuracy, bits and memory.
#include "heddle/transformer_block.h"

#include <cmath>
#include <cstring>
#include <ostream>

#include <gtest/gtest.h>

#include "heddle/error.h"
#include "kit/host_tensor.h"
#include "unit/block_expected.h"
#include "unit/block_model.h"

namespace heddle {
namespace {

using kit::HostTensor;
using test::block_options;
using test::BlockExpected;
using test::BlockInput;
using test::BlockModel;
using test::text_of;

// Whole blocks of 64 rows, blocks with few rows, and none.
const std::vector<int> kLengths = {17, 1, 0, 66, 5};

struct Storage {
  std::vector<std::byte> memory;
  Workspace workspace;
  explicit Storage(std::size_t bytes) : memory(bytes + 128, std::byte{0xFF}) {  // NaN, which must not matter
    const auto at = (reinterpret_cast<std::uintptr_t>(memory.data()) + 63) / 64 * 64;
    workspace = {reinterpret_cast<void*>(at), bytes};
  }
  bool intact() const {
    const auto* end = static_cast<const std::byte*>(workspace.data) + workspace.bytes;
    return std::all_of(end, memory.data() + memory.size(), [](std::byte b) { return b == std::byte{0xFF}; });
  }
};

std::vector<double> run(const TransformerBlock& block, const BlockInput& input, Executor* executor = nullptr) {
  const HostTensor x = input.tensor(), y = HostTensor::output(input.dtype, {input.total(), input.hidden});
  Runtime runtime{{}, executor, nullptr};
  const Storage storage(block.workspace(input.total(), input.sequences(), input.longest(), runtime));
  runtime.workspace = storage.workspace;
  block.forward(x.view(), input.offsets(), y.view(), runtime);
  EXPECT_EQ(y.damage(), "");
  EXPECT_TRUE(storage.intact());
  return y.values();
}

void expect_accurate(const BlockModel& model, const BlockInput& input) {
  const TransformerBlock block(model.options, model.weights());
  BlockExpected(model, input).expect_right(run(block, input));
}

struct Formats {
  const char* name;
  std::vector<lowbit::LayerRule> rules;
  friend void PrintTo(const Formats& f, std::ostream* to) { *to << f.name; }
};
const Formats kFormats[] = {
    {"own", {}},
    {"float32", {{"*", "float32"}}},
    {"bfloat16", {{"*", "bfloat16"}}},
    {"nvfp4", {{"*", "nvfp4"}}},
    {"int8_row", {{"*", "int8_row"}}},
    {"int4_g64", {{"*", "int4_g64:mse"}}},
    {"mixed", {{"qkv", "int8_row"}, {"up", "nvfp4:mse"}, {"d*", "float32"}}},
    {"other_mix", {{"out", "mxfp4:even"}, {"d?wn", "int4_g32"}, {"qkv", "bfloat16"}}},
};

class TransformerBlockFormats : public testing::TestWithParam<std::tuple<DType, Formats>> {
 protected:
  TransformerBlockOptions options() const {
    TransformerBlockOptions out = block_options();
    out.dtype = std::get<0>(GetParam());
    out.layers = std::get<1>(GetParam()).rules;
    return out;
  }
};

TEST_P(TransformerBlockFormats, IsWithinTheRule) {
  for (const bool norm_first : {true, false}) {
    for (const Norm norm : {Norm::layer_norm, Norm::rms_norm}) {
      for (const Activation activation :
           {Activation::relu, Activation::gelu_erf, Activation::gelu_tanh, Activation::silu, Activation::swiglu}) {
        for (const bool causal : {false, true}) {
          for (const std::int64_t kv_heads : {4, 2, 1}) {
            if (kv_heads == 1 && activation != Activation::swiglu) continue;
            TransformerBlockOptions o = options();
            o.norm_first = norm_first;
            o.norm = norm;
            o.activation = activation;
            o.causal = causal ? Causal::top_left : Causal::none;
            o.kv_heads = kv_heads;
            SCOPED_TRACE(text_of(o));
            expect_accurate(BlockModel(o, kv_heads != 4), BlockInput(o, kLengths));
          }
        }
      }
    }
  }
}

TEST_P(TransformerBlockFormats, BitsDoNotDependOnNeighboursOrThreads) {
  for (const bool norm_first : {true, false}) {
    TransformerBlockOptions o = options();
    o.norm_first = norm_first;
    o.causal = Causal::bottom_right;
    const BlockModel model(o);
    const TransformerBlock block(o, model.weights());
    const BlockInput input(o, kLengths);
    const auto one = make_thread_pool(1), three = make_thread_pool(3);
    const std::vector<double> together = run(block, input, one.get());
    EXPECT_EQ(run(block, input, three.get()), together);
    for (std::size_t i = 0; i < kLengths.size(); ++i) {
      const std::vector<double> alone = run(block, input.alone(i), three.get());
      EXPECT_TRUE(std::equal(alone.begin(), alone.end(), together.begin() + input.cu_seqlens[i] * o.hidden))
          << "sequence " << i;
    }
  }
}

TEST_P(TransformerBlockFormats, SaysWhatItHolds) {
  const TransformerBlockOptions o = options();
  const BlockModel model(o);
  const TransformerBlock block(o, model.weights());
  const std::vector<EncoderLayerInfo> layers = block.layers();
  ASSERT_EQ(layers.size(), 4u);
  std::size_t bytes = 0;
  for (int i = 0; i < 4; ++i) {
    const EncoderLayerInfo& layer = layers[static_cast<std::size_t>(i)];
    const std::string format = model.format(layer.name);
    EXPECT_EQ(layer.format, format.substr(0, format.find(':')));
    EXPECT_EQ(layer.rows, model.rows(i));
    EXPECT_EQ(layer.columns, model.columns(i));
    EXPECT_EQ(layer.packing_error.changed, 0);
    bytes += layer.weight_bytes;
  }
  EXPECT_EQ(layers[0].name, "qkv");
  EXPECT_EQ(block.weight_bytes(), bytes);  // norms are in front, in the layers
}

INSTANTIATE_TEST_SUITE_P(All, TransformerBlockFormats,
                         testing::Combine(testing::Values(DType::f32, DType::bf16), testing::ValuesIn(kFormats)),
                         [](const auto& info) {
                           return std::string(name_of(std::get<0>(info.param))) + "_" + std::get<1>(info.param).name;
                         });

TEST(TransformerBlock, WorksInPlaceOnStridedRows) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    TransformerBlockOptions o = block_options();
    o.dtype = dtype;
    const TransformerBlock block(o, BlockModel(o).weights());
    const BlockInput input(o, kLengths);
    const std::vector<double> expected = run(block, input);
    // Every row is followed by one that must stay.
    const HostTensor wide = [&] {
      HostTensor tensor = HostTensor::output(dtype, {input.total(), 2 * o.hidden});
      for (std::int64_t i = 0; i < input.total(); ++i) {
        for (std::int64_t j = 0; j < o.hidden; ++j) {
          tensor.set(i * 2 * o.hidden + j, input.x[static_cast<std::size_t>(i * o.hidden + j)]);
          tensor.set(i * 2 * o.hidden + o.hidden + j, 7);
        }
      }
      return tensor;
    }();
    const TensorView x(wide.view().data, dtype, {input.total(), o.hidden}, {2 * o.hidden, 1});
    const Storage storage(block.workspace(input.total(), input.sequences(), input.longest()));
    block.forward(x, input.offsets(), x, {storage.workspace, nullptr, nullptr});
    for (std::int64_t i = 0; i < input.total(); ++i) {
      for (std::int64_t j = 0; j < o.hidden; ++j) {
        ASSERT_EQ(wide.get(i * 2 * o.hidden + j), expected[static_cast<std::size_t>(i * o.hidden + j)])
            << i << ", " << j;
        ASSERT_EQ(wide.get(i * 2 * o.hidden + o.hidden + j), 7) << i << ", " << j;
      }
    }
  }
}

TEST(TransformerBlock, TakesWeightsOfAnyDtypeAndStride) {
  const TransformerBlockOptions o = block_options();
  BlockModel model(o);
  for (float& value : model.values.out) value = bf16_to_f32(f32_to_bf16(value));
  const BlockInput input(o, {9});
  const std::vector<double> expected = run(TransformerBlock(o, model.weights()), input);
  const std::int64_t h = o.hidden;
  std::vector<std::uint16_t> turned(static_cast<std::size_t>(h * h));  // out, its columns as rows, in bf16
  for (std::int64_t i = 0; i < h; ++i) {
    for (std::int64_t j = 0; j < h; ++j) {
      turned[static_cast<std::size_t>(j * h + i)] = f32_to_bf16(model.values.out[static_cast<std::size_t>(i * h + j)]);
    }
  }
  TransformerBlockWeights weights = model.weights();
  weights.out = TensorView(turned.data(), DType::bf16, {h, h}, {1, h});
  TransformerBlock block(o, weights);
  std::fill(turned.begin(), turned.end(), 0x7fc0);  // nothing of the caller's is kept
  TransformerBlock moved = std::move(block);
  EXPECT_EQ(run(moved, input), expected);
}

TEST(TransformerBlock, NoRows) {
  const TransformerBlockOptions o = block_options();
  const TransformerBlock block(o, BlockModel(o).weights());
  EXPECT_EQ(block.workspace(0, 0, 0), 0u);
  EXPECT_TRUE(run(block, BlockInput(o, {})).empty());
  EXPECT_TRUE(run(block, BlockInput(o, {0, 0})).empty());
}

// Activations and norms beside the matrix library, and all that linear_forward has, on each instruction set.
TEST(TransformerBlock, OnEveryTarget) {
  for (const std::string& target : cpu_targets()) {
    set_cpu_target(target);
    for (const Activation activation :
         {Activation::relu, Activation::gelu_erf, Activation::gelu_tanh, Activation::silu, Activation::swiglu}) {
      for (const DType dtype : {DType::f32, DType::bf16}) {
        for (const char* format : {"float32", "bfloat16", "nvfp4"}) {
          TransformerBlockOptions o = block_options();
          o.dtype = dtype;
          o.activation = activation;
          o.norm = activation == Activation::swiglu ? Norm::rms_norm : Norm::layer_norm;
          o.intermediate = 80;  // rows of up are no whole tiles
          o.norm_first = activation != Activation::relu;
          o.layers = {{"*", format}};
          SCOPED_TRACE(target + ", " + name_of(dtype) + ", " + format + ", " + text_of(o));
          expect_accurate(BlockModel(o), BlockInput(o, kLengths));
        }
      }
    }
    set_cpu_target("");
  }
}

// Of any lengths within the bounds, also where attention cuts its tiles to keep many workers busy.
TEST(TransformerBlock, WorkspaceSufficesForAnyLengths) {
  TransformerBlockOptions o = block_options();
  const TransformerBlock block(o, BlockModel(o).weights());
  for (const int workers : {1, 2, 5}) {
    const auto pool = make_thread_pool(workers);
    Runtime runtime{{}, pool.get(), nullptr};
    for (const std::vector<int>& lengths : std::vector<std::vector<int>>{
             {400}, {397, 1, 1, 1}, {100, 100, 100, 100}, {1, 1, 398}, {0, 200, 0, 200}, {193, 207}}) {
      const BlockInput input(o, lengths);
      const Storage storage(block.workspace(400, 6, 400, runtime));
      runtime.workspace = storage.workspace;
      const HostTensor x = input.tensor(), y = HostTensor::output(o.dtype, {400, o.hidden});
      block.forward(x.view(), input.offsets(), y.view(), runtime);
      EXPECT_EQ(y.values(), run(block, input, pool.get()));
    }
  }
}

}  // namespace
}  // namespace heddle
