// Transformer blocks over ranks, threads here: weights split over them, and stages through which micro-batches go.
#include "heddle/distributed_block.h"

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "heddle/error.h"
#include "kit/counted.h"
#include "kit/host_tensor.h"
#include "kit/on_ranks.h"
#include "unit/block_expected.h"
#include "unit/block_model.h"

namespace heddle {
namespace {

using distributed::Communicator;
using distributed::even_range;
using distributed::PipelineStage;
using distributed::Range;
using distributed::TensorParallelBlock;
using kit::Counted;
using kit::HostTensor;
using kit::on_ranks;
using test::block_options;
using test::BlockExpected;
using test::BlockInput;
using test::BlockModel;
using test::text_of;

constexpr auto kTimeout = std::chrono::seconds(60);

// Blocks of rows, few rows, and none.
const std::vector<int> kLengths = {17, 1, 0, 66, 5};

HostTensor rows_of(const BlockInput& input, const Range& rows) {
  HostTensor out = HostTensor::input(input.dtype, {rows.size(), input.hidden});
  for (std::int64_t n = 0; n < rows.size() * input.hidden; ++n) {
    out.set(n, input.x[static_cast<std::size_t>(rows.begin * input.hidden + n)]);
  }
  return out;
}

// What ranks that share the block have as y, one behind the other where they have rows of it.
std::vector<std::vector<double>> over_ranks(const BlockModel& model, const BlockInput& input, int ranks,
                                            bool sequence_parallel, Executor* executor = nullptr) {
  std::vector<std::vector<double>> out(static_cast<std::size_t>(ranks));
  const auto thrown = on_ranks(ranks, kTimeout, [&](Communicator& communicator) {
    const int rank = communicator.rank();
    TensorParallelBlock block(model.options, model.weights(), communicator, sequence_parallel);
    const Range rows = sequence_parallel ? even_range(input.total(), ranks, rank) : Range{0, input.total()};
    const HostTensor x = rows_of(input, rows), y = HostTensor::output(input.dtype, {rows.size(), input.hidden});
    Runtime runtime;
    runtime.executor = executor;
    block.forward(x.view(), input.offsets(), y.view(), runtime);
    EXPECT_EQ(y.damage(), "");
    out[static_cast<std::size_t>(rank)] = y.values();
  });
  EXPECT_EQ(thrown, std::vector<std::string>(thrown.size()));
  return out;
}

std::vector<double> joined(const std::vector<std::vector<double>>& parts) {
  std::vector<double> out;
  for (const auto& part : parts) out.insert(out.end(), part.begin(), part.end());
  return out;
}

struct Formats {
  const char* name;
  std::vector<lowbit::LayerRule> rules;
  int most_ranks;  // of which each has whole groups
  friend void PrintTo(const Formats& f, std::ostream* to) { *to << f.name; }
};
const Formats kFormats[] = {
    {"own", {}, 4},
    {"bfloat16", {{"*", "bfloat16"}}, 4},
    {"nvfp4", {{"*", "nvfp4"}}, 4},
    {"int8_row", {{"*", "int8_row"}}, 4},
    {"e2m1_row", {{"*", "e2m1_row"}}, 4},
    {"mxfp4", {{"*", "mxfp4:even"}}, 2},
    {"int4_zp", {{"down", "int4_g128_zp"}, {"*", "int4_g32:mse"}}, 2},
    {"mixed", {{"qkv", "int8_row"}, {"up", "nvfp4:mse"}, {"d*", "float32"}}, 4},
};

class TensorParallel : public testing::TestWithParam<std::tuple<DType, Formats>> {
 protected:
  TransformerBlockOptions options() const {
    TransformerBlockOptions out = block_options();
    out.kv_heads = 4;
    out.intermediate = 256;
    out.dtype = std::get<0>(GetParam());
    out.layers = std::get<1>(GetParam()).rules;
    return out;
  }
};

TEST_P(TensorParallel, IsOneProcess) {
  const int most = std::get<1>(GetParam()).most_ranks;
  for (const bool norm_first : {true, false}) {
    for (const Activation activation : {Activation::gelu_erf, Activation::swiglu}) {
      TransformerBlockOptions o = options();
      o.norm_first = norm_first;
      o.activation = activation;
      o.norm = activation == Activation::swiglu ? Norm::rms_norm : Norm::layer_norm;
      o.causal = norm_first ? Causal::top_left : Causal::none;
      const BlockModel model(o, activation != Activation::swiglu || norm_first);
      const BlockInput input(o, kLengths);
      const BlockExpected expected(model, input);
      for (int ranks = 1; ranks <= most; ++ranks) {
        SCOPED_TRACE(text_of(o) + ", " + std::to_string(ranks) + " ranks");
        const auto y = over_ranks(model, input, ranks, false);
        if (HasFailure()) return;
        expected.expect_right(y[0]);
        for (const auto& of_rank : y) EXPECT_EQ(of_rank, y[0]);
        EXPECT_EQ(joined(over_ranks(model, input, ranks, true)), y[0]);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, TensorParallel,
                         testing::Combine(testing::Values(DType::f32, DType::bf16), testing::ValuesIn(kFormats)),
                         [](const auto& info) {
                           return std::string(name_of(std::get<0>(info.param))) + "_" + std::get<1>(info.param).name;
                         });

// Of grouped heads, three ranks have 2, 1 and 1 of four key/value heads; of 100 columns 34, 33 and 33.
TEST(TensorParallelBlocks, UnevenShares) {
  TransformerBlockOptions o = block_options();
  o.heads = 8;
  o.kv_heads = 4;
  o.intermediate = 100;
  const BlockModel model(o);
  const BlockInput input(o, kLengths);
  const BlockExpected expected(model, input);
  for (const bool sequence_parallel : {false, true}) {
    const auto y = over_ranks(model, input, 3, sequence_parallel);
    expected.expect_right(sequence_parallel ? joined(y) : y[0]);
  }
  std::vector<std::size_t> bytes(3);
  const auto thrown = on_ranks(3, kTimeout, [&](Communicator& communicator) {
    const int rank = communicator.rank();
    const TensorParallelBlock block(o, model.weights(), communicator);
    const distributed::HeadShare heads[] = {{0, 4, 0, 2}, {4, 6, 2, 3}, {6, 8, 3, 4}};
    EXPECT_EQ(block.heads(), heads[rank]);
    const Range columns[] = {{0, 34}, {34, 67}, {67, 100}};
    EXPECT_EQ(block.columns(), columns[rank]);
    const std::vector<EncoderLayerInfo> layers = block.layers();
    const std::int64_t size = o.hidden / o.heads, queries = (heads[rank].end - heads[rank].begin) * size;
    const std::int64_t keys = (heads[rank].kv_end - heads[rank].kv_begin) * size;
    const std::int64_t shapes[4][2] = {{queries + 2 * keys, o.hidden},
                                       {o.hidden, queries},
                                       {columns[rank].size(), o.hidden},
                                       {o.hidden, columns[rank].size()}};
    for (std::size_t n = 0; n < 4; ++n) {
      EXPECT_EQ(layers[n].rows, shapes[n][0]) << layers[n].name;
      EXPECT_EQ(layers[n].columns, shapes[n][1]) << layers[n].name;
    }
    EXPECT_EQ(block.options().kv_heads, 4);
    bytes[static_cast<std::size_t>(rank)] = block.weight_bytes();
  });
  EXPECT_EQ(thrown, std::vector<std::string>(3));
  EXPECT_LT(bytes[1], TransformerBlock(o, model.weights()).weight_bytes() / 2);
}

// Fewer rows than ranks, none, and y over x.
TEST(TensorParallelBlocks, FewRowsInPlace) {
  TransformerBlockOptions o = block_options();
  o.kv_heads = 4;
  const BlockModel model(o);
  for (const std::vector<int>& lengths : std::vector<std::vector<int>>{{2}, {1, 0, 1}, {0, 0}, {}}) {
    const BlockInput input(o, lengths);
    const auto y = over_ranks(model, input, 4, false);
    EXPECT_EQ(joined(over_ranks(model, input, 4, true)), y[0]);
    const auto thrown = on_ranks(4, kTimeout, [&](Communicator& communicator) {
      TensorParallelBlock block(o, model.weights(), communicator);
      const HostTensor x = input.tensor();
      block.forward(x.view(), input.offsets(), x.view());
      EXPECT_EQ(x.values(), y[0]);
    });
    EXPECT_EQ(thrown, std::vector<std::string>(4));
  }
}

TEST(TensorParallelBlocks, BitsDoNotDependOnThreadsOrCalls) {
  for (const char* format : {"float32", "nvfp4"}) {
    TransformerBlockOptions o = block_options();
    o.layers = {{"*", format}};
    o.norm_first = false;
    const BlockModel model(o);
    const BlockInput input(o, kLengths);
    const auto one = make_thread_pool(1), three = make_thread_pool(3);
    const auto y = over_ranks(model, input, 2, false, one.get());
    EXPECT_EQ(over_ranks(model, input, 2, false, three.get()), y);
    const auto thrown = on_ranks(2, kTimeout, [&](Communicator& communicator) {
      TensorParallelBlock block(o, model.weights(), communicator);
      // Memory that other rows were in.
      for (const std::vector<int>& lengths : {std::vector<int>{200}, kLengths}) {
        const BlockInput here(o, lengths);
        const HostTensor x = here.tensor(), out = HostTensor::output(o.dtype, {here.total(), o.hidden});
        block.forward(x.view(), here.offsets(), out.view());
        if (lengths == kLengths) {
          EXPECT_EQ(out.values(), y[0]);
        }
      }
    });
    EXPECT_EQ(thrown, std::vector<std::string>(2));
  }
}

std::string error_of(const TransformerBlockOptions& options, int ranks) {
  const BlockModel model(options);
  return on_ranks(ranks, kTimeout,
                  [&](Communicator& communicator) { TensorParallelBlock(options, model.weights(), communicator); })
      .front();
}

TEST(TensorParallelBlockRefusals, Shares) {
  const auto refused = [](int ranks, const auto& change) {
    TransformerBlockOptions options = block_options();
    change(options);
    return error_of(options, ranks);
  };
  EXPECT_EQ(refused(3, [](auto&) {}), "[tensor_parallel_block] kv_heads is 2 for 3 ranks: each must have one");
  EXPECT_EQ(refused(2, [](auto& o) { o.intermediate = 1; }),
            "[tensor_parallel_block] intermediate is 1 for 2 ranks: each must have some");
  EXPECT_EQ(refused(2,
                    [](auto& o) {
                      o.layers = {{"down", "int4_g128"}};
                    }),
            "[tensor_parallel_block] intermediate is 128, of which int4_g128 stores 128 together, for 2 ranks: each "
            "must have some");
  EXPECT_EQ(refused(2,
                    [](auto& o) {
                      o.layers = {{"*", "int4_g64:mse"}};
                    }),
            "[tensor_parallel_block] the heads of rank 0 of 2 are columns 0 to 32 of out: int4_g64:mse stores 64 "
            "columns together, which must not be cut");
  EXPECT_EQ(refused(2, [](auto& o) { o.device = Device::cuda, o.dtype = DType::bf16; }),
            "[tensor_parallel_block] device is cuda: blocks over several processes are on the CPU so far");
  // What a block refuses.
  EXPECT_EQ(refused(2, [](auto& o) { o.eps = -1; }),
            "[transformer_block] eps is -1: it must be finite and not negative");
}

TEST(TensorParallelBlockRefusals, Calls) {
  TransformerBlockOptions o = block_options();
  const BlockModel model(o);
  const BlockInput input(o, {4, 3});
  const auto refused = [&](bool sequence_parallel, const auto& call) {
    return on_ranks(2, kTimeout,
                    [&](Communicator& communicator) {
                      TensorParallelBlock block(o, model.weights(), communicator, sequence_parallel);
                      if (communicator.rank() == 1) call(block);
                    })
        .back();
  };
  const HostTensor x = input.tensor(), narrow = HostTensor::output(DType::f32, {7, 32});
  EXPECT_EQ(refused(true, [&](auto& block) { block.forward(x.view(), input.offsets(), x.view()); }),
            "[tensor_parallel_block] x is [7, 64]: rank 1 of 2 has rows 4 to 7 of 7");
  EXPECT_EQ(refused(false, [&](auto& block) { block.forward(narrow.view(), input.offsets(), narrow.view()); }),
            "[tensor_parallel_block] x is [7, 32]: it must be [total, 64], the block's hidden");
  const std::vector<std::int32_t> down = {0, 8, 7};
  const TensorView offsets(down.data(), DType::i32, {3});
  for (const bool sequence_parallel : {false, true}) {
    const std::string what =
        refused(sequence_parallel, [&](auto& block) { block.forward(x.view(), offsets, x.view()); });
    EXPECT_EQ(what, "[tensor_parallel_block] cu_seqlens decreases from 8 to 7 at entry 2: it must never decrease");
  }
}

TEST(TensorParallelBlockRefusals, RanksThatDisagreeAreToldOnEveryRank) {
  const auto thrown = on_ranks(2, kTimeout, [](Communicator& communicator) {
    TransformerBlockOptions o = block_options();
    if (communicator.rank() == 1) o.causal = Causal::top_left;
    const BlockModel model(o);
    TensorParallelBlock block(o, model.weights(), communicator);
    const BlockInput input(o, {4, 3});
    const HostTensor x = input.tensor();
    block.forward(x.view(), input.offsets(), x.view());
  });
  for (const std::string& what : thrown) {
    EXPECT_EQ(what, "[tensor_parallel_block] ranks do not agree: causal is 0 on rank 0 and 1 on rank 1");
  }
}

TEST(TensorParallelBlockRefusals, ALostRankIsAnError) {
  const auto thrown = on_ranks(2, kTimeout, [](Communicator& communicator) {
    const TransformerBlockOptions o = block_options();
    const BlockModel model(o);
    TensorParallelBlock block(o, model.weights(), communicator);
    const BlockInput input(o, {4, 3});
    const HostTensor x = input.tensor();
    block.forward(x.view(), input.offsets(), x.view());
    if (communicator.rank() == 1) throw RuntimeError("lost");
    block.forward(x.view(), input.offsets(), x.view());
  });
  EXPECT_EQ(thrown[0], "[tensor_parallel_block] rows of out summed: rank 0 waits for rank 1, within 60 s: it is gone");
}

// Four blocks of a model, of different weights and precisions.
std::vector<TransformerBlock> blocks_of(DType dtype, std::size_t begin, std::size_t end) {
  std::vector<TransformerBlock> out;
  for (std::size_t n = begin; n < end; ++n) {
    TransformerBlockOptions o = block_options();
    o.dtype = dtype;
    o.norm_first = n != 2;
    o.causal = n % 2 == 0 ? Causal::top_left : Causal::none;
    if (n == 1) o.layers = {{"*", "nvfp4"}};
    BlockModel model(o);
    for (float& value : model.values.norm1) value += 0.1f * static_cast<float>(n);
    out.emplace_back(o, model.weights());
  }
  return out;
}

TEST(Pipeline, HasTheBitsOfOneProcess) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    TransformerBlockOptions o = block_options();
    o.dtype = dtype;
    const BlockInput input(o, kLengths);
    const HostTensor expected = input.tensor();
    WorkspaceBuffer buffer;
    for (const TransformerBlock& block : blocks_of(dtype, 0, 4)) {
      Runtime runtime;
      runtime.workspace = buffer.get(block.workspace(input.total(), input.sequences(), input.longest()));
      block.forward(expected.view(), input.offsets(), expected.view(), runtime);
    }
    // Rows 17, 18, 18, 84 and 89 end sequences.
    for (const auto& [micro_batches, sent] : {std::pair{1, 1}, {2, 2}, {5, 3}, {100, 4}}) {
      for (const std::vector<std::size_t>& ends : std::vector<std::vector<std::size_t>>{{4}, {1, 4}, {2, 3, 4}}) {
        const auto ranks = static_cast<int>(ends.size());
        SCOPED_TRACE(std::to_string(micro_batches) + " micro-batches, " + std::to_string(ranks) + " ranks");
        const auto thrown = on_ranks(ranks, kTimeout, [&, most = micro_batches, sent = sent](Communicator& threads) {
          Counted communicator(threads);
          const auto rank = static_cast<std::size_t>(communicator.rank());
          const bool last = rank + 1 == ends.size();
          PipelineStage stage(blocks_of(dtype, rank == 0 ? 0 : ends[rank - 1], ends[rank]), communicator);
          const HostTensor x = input.tensor(), y = HostTensor::output(dtype, {input.total(), input.hidden});
          const TensorView none;
          for (int call = 1; call <= 2; ++call) {
            stage.forward(rank == 0 ? x.view() : none, input.offsets(), last ? y.view() : none, most);
            EXPECT_EQ(communicator.messages, last ? 0 : call * sent);
            if (last) {
              EXPECT_EQ(y.values(), expected.values());
            }
          }
          EXPECT_EQ(y.damage(), "");
        });
        EXPECT_EQ(thrown, std::vector<std::string>(thrown.size()));
      }
    }
  }
}

TEST(Pipeline, NoRows) {
  const auto thrown = on_ranks(2, kTimeout, [](Communicator& communicator) {
    PipelineStage stage(blocks_of(DType::f32, 0, 1), communicator);
    const HostTensor x = HostTensor::output(DType::f32, {0, 64});
    const TensorView none;
    const bool first = communicator.rank() == 0;
    for (const std::vector<int>& lengths : std::vector<std::vector<int>>{{}, {0, 0}}) {
      const BlockInput input(block_options(), lengths);
      stage.forward(first ? x.view() : none, input.offsets(), first ? none : x.view(), 2);
    }
  });
  EXPECT_EQ(thrown, std::vector<std::string>(2));
}

TEST(PipelineRefusals, SayWhatAndWhy) {
  const BlockInput input(block_options(), {4, 3});
  const HostTensor x = input.tensor(), short_of_one = HostTensor::output(DType::f32, {6, 64});
  const auto refused = [&](const auto& call) {
    return on_ranks(2, kTimeout,
                    [&](Communicator& communicator) {
                      PipelineStage stage(blocks_of(DType::f32, 0, 1), communicator);
                      if (communicator.rank() == 1) call(stage);
                    })
        .back();
  };
  EXPECT_EQ(refused([&](auto& stage) { stage.forward(x.view(), input.offsets(), x.view(), 2); }),
            "[pipeline_stage] x is given on rank 1 of 2: it is the first rank's alone");
  EXPECT_EQ(refused([&](auto& stage) { stage.forward({}, input.offsets(), {}, 2); }),
            "[pipeline_stage] y is missing on rank 1 of 2: it is the last rank's alone");
  EXPECT_EQ(refused([&](auto& stage) { stage.forward({}, input.offsets(), short_of_one.view(), 2); }),
            "[pipeline_stage] y is [6, 64]: cu_seqlens is of 7 rows");
  EXPECT_EQ(refused([&](auto& stage) { stage.forward({}, input.offsets(), x.view(), 0); }),
            "[pipeline_stage] micro_batches is 0: it must be at least 1");
  const auto made = [](std::vector<TransformerBlock> blocks) {
    const auto communicators = distributed::thread_communicators(1, kTimeout);
    try {
      PipelineStage(std::move(blocks), *communicators[0]);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  };
  EXPECT_EQ(made({}), "[pipeline_stage] blocks is empty: each rank must have one");
  std::vector<TransformerBlock> unlike = blocks_of(DType::f32, 0, 1);
  unlike.push_back(std::move(blocks_of(DType::bf16, 0, 1)[0]));
  EXPECT_EQ(made(std::move(unlike)),
            "[pipeline_stage] blocks[1] has hidden 64 and bfloat16, blocks[0] 64 and float32: they must have the same");
}

TEST(PipelineRefusals, RanksThatDisagreeAreToldOnEveryRank) {
  const BlockInput input(block_options(), {4, 3});
  const HostTensor x = input.tensor(), y = input.tensor();
  const auto thrown = on_ranks(2, kTimeout, [&](Communicator& communicator) {
    const int rank = communicator.rank();
    PipelineStage stage(blocks_of(DType::f32, 0, 1), communicator);
    const TensorView none;
    stage.forward(rank == 0 ? x.view() : none, input.offsets(), rank == 0 ? none : y.view(), 2 + rank);
  });
  for (const std::string& what : thrown) {
    EXPECT_EQ(what, "[pipeline_stage] ranks do not agree: micro_batches is 2 on rank 0 and 3 on rank 1");
  }
}

}  // namespace
}  // namespace heddle
