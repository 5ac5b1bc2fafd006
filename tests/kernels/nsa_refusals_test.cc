// What pool_keys and select_blocks refuse, in words, before anything is written.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "heddle/error.h"
#include "heddle/nsa.h"
#include "kernels/elsewhere.h"

namespace heddle {
namespace {

// A call that is right, and what spoils one thing in it.
struct PoolCall {
  std::vector<float> data = std::vector<float>(512, 0.5f), written = std::vector<float>(512, -7.0f);
  std::vector<std::int32_t> starts = {0, 5, 20}, lengths = {3, 9};
  TensorView x{data.data(), DType::f32, {2, 10, 2, 4}}, pooled{written.data(), DType::f32, {2, 4, 2, 4}};
  PoolOptions options{.block = 4, .stride = 2};

  void pack() {
    x = TensorView(data.data(), DType::f32, {20, 2, 4});
    pooled = TensorView(written.data(), DType::f32, {10, 2, 4});
    options.cu_seqlens = TensorView(starts.data(), DType::i32, {3});
  }
};

struct BadPool {
  const char* name;
  std::function<void(PoolCall&)> spoil;
  const char* message;
  const char* backward;  // what the gradient's call says; null: not asked
};

class PoolRefuses : public ::testing::TestWithParam<BadPool> {};

template <class Call>
void expect_refusal(const Call& call, const std::string& message) {
  try {
    call();
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()), message);
  }
}

TEST_P(PoolRefuses, InWords) {
  PoolCall c;
  GetParam().spoil(c);
  expect_refusal([&] { pool_keys(c.x, c.pooled, c.options); }, std::string("[pool_keys] ") + GetParam().message);
  for (const float value : c.written) ASSERT_EQ(value, -7.0f);
}

TEST_P(PoolRefuses, InTheGradientToo) {
  PoolCall c;
  std::swap(c.data, c.written);  // dx is written, and d_pooled read
  GetParam().spoil(c);
  if (GetParam().backward == nullptr) return;
  expect_refusal([&] { pool_keys_backward(c.pooled, c.x, c.options); },
                 std::string("[pool_keys_backward] ") + GetParam().backward);
  for (const float value : c.data) ASSERT_EQ(value, -7.0f);
}

INSTANTIATE_TEST_SUITE_P(
    Nsa, PoolRefuses,
    ::testing::Values(
        BadPool{"x_missing", [](PoolCall& c) { c.x = {}; }, "x is missing", "dx is missing"},
        BadPool{"pooled_missing", [](PoolCall& c) { c.pooled = {}; }, "pooled is missing", "d_pooled is missing"},
        BadPool{"dtype", [](PoolCall& c) { c.x.dtype = DType::i32; },
                "x is int32: it must be float32, float16 or bfloat16",
                "dx is int32: it must be float32, float16 or bfloat16"},
        BadPool{"float8", [](PoolCall& c) { c.x.dtype = DType::f8e4m3; },
                "x is float8_e4m3fn: it must be float32, float16 or bfloat16", nullptr},
        BadPool{"dtypes", [](PoolCall& c) { c.pooled.dtype = DType::bf16; }, "pooled is bfloat16: it must be float32",
                "d_pooled is bfloat16: it must be float32"},
        BadPool{"rank",
                [](PoolCall& c) {
                  c.x = TensorView(c.data.data(), DType::f32, {20, 2, 4});
                },
                "x has 3 dimensions: it must be [B, S, Hkv, D]; found x [20, 2, 4]",
                "dx has 3 dimensions: it must be [B, S, Hkv, D]; found dx [20, 2, 4]"},
        BadPool{"packed_rank", [](PoolCall& c) { c.options.cu_seqlens = TensorView(c.starts.data(), DType::i32, {3}); },
                "x has 4 dimensions: it must be [total, Hkv, D] with cu_seqlens; found x [2, 10, 2, 4]", nullptr},
        BadPool{"stride", [](PoolCall& c) { c.options.stride = 0; }, "stride is 0: it must be at least 1",
                "stride is 0: it must be at least 1"},
        BadPool{"block", [](PoolCall& c) { c.options.block = 1; }, "block is 1: it must be from stride, 2, to 2^31 - 1",
                "block is 1: it must be from stride, 2, to 2^31 - 1"},
        BadPool{"rows", [](PoolCall& c) { c.pooled.shape[1] = 5; },
                "pooled is [2, 5, 2, 4]: it must be [2, 4, 2, 4], a row for each complete block of x [2, 10, 2, 4]",
                "d_pooled is [2, 5, 2, 4]: it must be [2, 4, 2, 4], a row for each complete block of dx [2, 10, 2, 4]"},
        BadPool{"packed_rows",
                [](PoolCall& c) {
                  c.pack();
                  c.pooled.shape[0] = 9;
                },
                "pooled is [9, 2, 4]: it must be [10, 2, 4], total / stride rows for x [20, 2, 4]", nullptr},
        BadPool{"offsets",
                [](PoolCall& c) {
                  c.pack();
                  c.starts[1] = 21;
                },
                "cu_seqlens decreases from 21 to 20 at entry 2: it must never decrease", nullptr},
        BadPool{"offsets_end",
                [](PoolCall& c) {
                  c.pack();
                  c.starts[2] = 19;
                },
                "cu_seqlens ends at 19: it must end at x's first extent, 20", nullptr},
        BadPool{"offsets_dtype",
                [](PoolCall& c) {
                  c.pack();
                  c.options.cu_seqlens.dtype = DType::f32;
                },
                "cu_seqlens is float32: it must be int32", "cu_seqlens is float32: it must be int32"},
        BadPool{"used", [](PoolCall& c) { c.options.seqused = TensorView(c.lengths.data(), DType::i32, {1}); },
                "seqused has 1 entries: it must have 2", "seqused has 1 entries: it must have 2"},
        BadPool{"used_too_long",
                [](PoolCall& c) {
                  c.lengths[1] = 11;
                  c.options.seqused = TensorView(c.lengths.data(), DType::i32, {2});
                },
                "seqused[1] is 11: it must be from 0 to the sequence's length, 10",
                "seqused[1] is 11: it must be from 0 to the sequence's length, 10"},
        BadPool{"device", [](PoolCall& c) { c.pooled.device = Device::cuda; }, "pooled is on another device than x",
                "d_pooled is on another device than dx"},
        BadPool{"gpu", [](PoolCall& c) { c.pooled.device = c.x.device = Device::cuda, c.options.force = "cpu"; },
                "force is 'cpu', which cannot serve this call: it runs on another device than the tensors are on",
                "force is 'cpu', which cannot serve this call: it runs on another device than the tensors are on"},
        BadPool{"force", [](PoolCall& c) { c.options.force = "best"; },
                "force is 'best': the candidates are cpu, reference, cuda",
                "force is 'best': the candidates are cpu, reference, cuda"},
        BadPool{
            "shared", [](PoolCall& c) { c.pooled.data = c.data.data() + 80, c.x.data = c.data.data(); },
            "pooled shares memory with x, which is read while it is written; found pooled [2, 4, 2, 4], x [2, 10, 2, "
            "4]",
            nullptr},
        BadPool{"overlap", [](PoolCall& c) { c.pooled.stride[2] = 0; },
                "pooled is an output whose elements overlap: stride 0 is smaller than the 1 elements inside it; found "
                "pooled [2, 4, 2, 4]",
                nullptr}),
    [](const auto& info) { return std::string(info.param.name); });

struct SelectCall {
  std::vector<float> data = std::vector<float>(512, 0.5f);
  std::vector<std::int32_t> written = std::vector<std::int32_t>(128, -7), offset = {0, 3}, starts = {0, 5, 10};
  TensorView q{data.data(), DType::f32, {2, 5, 4, 8}}, k{data.data(), DType::f32, {2, 3, 2, 8}}, lse;
  TensorView blocks{written.data(), DType::i32, {2, 5, 2, 4}};
  SelectOptions options;
};

struct BadSelect {
  const char* name;
  std::function<void(SelectCall&)> spoil;
  const char* message;
};

class SelectRefuses : public ::testing::TestWithParam<BadSelect> {};

TEST_P(SelectRefuses, InWords) {
  SelectCall c;
  GetParam().spoil(c);
  WorkspaceBuffer buffer;
  const Runtime runtime{.workspace = buffer.get(1 << 20)};
  expect_refusal([&] { select_blocks(c.q, c.k, c.lse, c.blocks, c.options, runtime); },
                 std::string("[select_blocks] ") + GetParam().message);
  for (const std::int32_t value : c.written) ASSERT_EQ(value, -7);
}

INSTANTIATE_TEST_SUITE_P(
    Nsa, SelectRefuses,
    ::testing::Values(
        BadSelect{"q_missing", [](SelectCall& c) { c.q = {}; }, "q is missing"},
        BadSelect{"k_missing", [](SelectCall& c) { c.k = {}; }, "k_pooled is missing"},
        BadSelect{"blocks_missing", [](SelectCall& c) { c.blocks = {}; }, "blocks is missing"},
        BadSelect{"float8", [](SelectCall& c) { c.q.dtype = c.k.dtype = DType::f8e4m3; },
                  "q is float8_e4m3fn: it must be float32, float16 or bfloat16"},
        BadSelect{"cache", [](SelectCall& c) { c.q.dtype = DType::bf16, c.k.dtype = DType::f8e4m3; },
                  "k_pooled is float8_e4m3fn: it must be bfloat16"},
        BadSelect{"dtypes", [](SelectCall& c) { c.k.dtype = DType::bf16; }, "k_pooled is bfloat16: it must be float32"},
        BadSelect{"rank", [](SelectCall& c) { c.q.rank = 3; },
                  "q has 3 dimensions: it must be [B, Sq, H, D]; found q [2, 5, 4]"},
        BadSelect{
            "head_size", [](SelectCall& c) { c.k.shape[3] = 7; },
            "k_pooled has head size 7 and q has 8: they must be equal; found q [2, 5, 4, 8], k_pooled [2, 3, 2, 7]"},
        BadSelect{"heads", [](SelectCall& c) { c.k.shape[2] = 3; },
                  "k_pooled has 3 heads and q has 4: q's heads must be a multiple of k_pooled's; found q [2, 5, 4, 8], "
                  "k_pooled [2, 3, 3, 8]"},
        BadSelect{
            "sequences", [](SelectCall& c) { c.k.shape[0] = 1; },
            "k_pooled has 1 sequences and q has 2: they must be equal; found q [2, 5, 4, 8], k_pooled [1, 3, 2, 8]"},
        BadSelect{"scale", [](SelectCall& c) { c.options.scale = std::numeric_limits<float>::infinity(); },
                  "scale is inf: it must be finite"},
        BadSelect{"block_size", [](SelectCall& c) { c.options.block_size = 48; },
                  "block_size is 48: it must be 16, 32, 64 or 128"},
        BadSelect{"compression_block", [](SelectCall& c) { c.options.compression_block = -1; },
                  "compression_block is -1: it must be from 1 to 65536, or 0 for block_size"},
        BadSelect{"compression_stride", [](SelectCall& c) { c.options.compression_stride = -2; },
                  "compression_stride is -2: it must be at least 1, or 0 for compression_block"},
        BadSelect{"stride_in_block", [](SelectCall& c) { c.options.compression_stride = 48; },
                  "compression_block is 64: it must be a multiple of compression_stride, 48"},
        BadSelect{"stride_in_block_size",
                  [](SelectCall& c) { c.options.compression_block = 96, c.options.compression_stride = 48; },
                  "block_size is 64: it must be a multiple of compression_stride, 48"},
        BadSelect{"q_step", [](SelectCall& c) { c.options.q_step = 0; }, "q_step is 0: it must be from 1 to 2^31 - 1"},
        BadSelect{"positions", [](SelectCall& c) { c.options.q_step = 1 << 30; },
                  "q_step is 1073741824 and the last of 5 rows of sequence 0 stands at position 4294967296: positions "
                  "must be below 2^31 - 1"},
        BadSelect{"offset_below_0",
                  [](SelectCall& c) {
                    c.offset[1] = -1;
                    c.options.q_offset = TensorView(c.offset.data(), DType::i32, {2});
                  },
                  "q_offset[1] is -1: it must be at least 0"},
        BadSelect{"offset_dtype",
                  [](SelectCall& c) { c.options.q_offset = TensorView(c.offset.data(), DType::f32, {2}); },
                  "q_offset is float32: it must be int32"},
        BadSelect{"lse",
                  [](SelectCall& c) {
                    c.lse = TensorView(c.data.data(), DType::f32, {2, 2, 5});
                  },
                  "lse is [2, 2, 5]: it must be [B, H, Sq] = [2, 4, 5]"},
        BadSelect{"lists", [](SelectCall& c) { c.blocks.shape[2] = 4; },
                  "blocks is [2, 5, 4, 4]: it must be [2, 5, 2, n], a list for each row of q and each key/value head"},
        BadSelect{"packed_lists",
                  [](SelectCall& c) {
                    c.q = TensorView(c.data.data(), DType::f32, {10, 4, 8});
                    c.options.cu_seqlens_q = TensorView(c.starts.data(), DType::i32, {3});
                    c.blocks = TensorView(c.written.data(), DType::i32, {5, 2, 4});
                  },
                  "blocks is [5, 2, 4]: it must be [10, 2, n], a list for each row of q and each key/value head"},
        BadSelect{"lists_dtype", [](SelectCall& c) { c.blocks.dtype = DType::f32; },
                  "blocks is float32: it must be int32"},
        BadSelect{"entries", [](SelectCall& c) { c.blocks.shape[3] = 2, c.blocks.stride[3] = 2; },
                  "blocks must have contiguous entries: the last stride is 2"},
        BadSelect{
            "overlap", [](SelectCall& c) { c.blocks.stride[2] = 3; },
            "blocks is an output whose elements overlap: stride 3 is smaller than the 4 elements inside it; found "
            "blocks [2, 5, 2, 4]"},
        BadSelect{
            "shared", [](SelectCall& c) { c.blocks.data = c.data.data(); },
            "blocks shares memory with q, which is read while it is written; found blocks [2, 5, 2, 4], q [2, 5, 4, "
            "8]"},
        BadSelect{"gpu",
                  [](SelectCall& c) {
                    c.q.device = c.k.device = c.blocks.device = Device::cuda;
                    c.options.force = "cpu";
                  },
                  "force is 'cpu', which cannot serve this call: it runs on another device than the tensors are on"},
        BadSelect{"force", [](SelectCall& c) { c.options.force = "best"; },
                  "force is 'best': the candidates are cpu, reference, sm90, sm80"}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(GpuCandidates, RefuseTensorsOnTheCpu) {
  PoolCall pool;
  pool.options.force = "cuda";
  expect_refusal([&] { pool_keys(pool.x, pool.pooled, pool.options); },
                 "[pool_keys] force is 'cuda', which cannot serve this call: " + refusal_of_cpu_tensors());
  expect_refusal([&] { pool_keys_backward(pool.pooled, pool.x, pool.options); },
                 "[pool_keys_backward] force is 'cuda', which cannot serve this call: " + refusal_of_cpu_tensors());
  SelectCall select;
  select.options.force = "sm80";
  expect_refusal([&] { select_blocks(select.q, select.k, {}, select.blocks, select.options, {}); },
                 "[select_blocks] force is 'sm80', which cannot serve this call: " + refusal_of_cpu_tensors());
}

TEST(SelectWorkspace, MustSuffice) {
  SelectCall c;
  expect_refusal([&] { select_blocks(c.q, c.k, {}, c.blocks, c.options, {}); },
                 "[select_blocks] the workspace has 0 bytes: this call needs " +
                     std::to_string(select_blocks_workspace(c.q, c.k, {}, c.blocks, c.options)) +
                     "; ask the operation's workspace query");
}

}  // namespace
}  // namespace heddle
