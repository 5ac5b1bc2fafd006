// What allocates nothing: every allocation of the calling thread is counted, and the executor has no other.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <new>
#include <utility>
#include <vector>

#include "heddle/adaptive.h"
#include "heddle/attention.h"
#include "heddle/int4_cache.h"
#include "heddle/kv_cache.h"
#include "heddle/linear.h"
#include "heddle/lowbit.h"
#include "heddle/nsa.h"
#include "heddle/partial.h"
#include "heddle/sparse.h"
#include "heddle/transformer.h"
#include "heddle/transformer_block.h"
#include "kit/host_tensor.h"
#include "kit/int4_case.h"
#include "kit/linear_layer.h"
#include "ops/adaptive/choice.h"
#include "ops/kv_cache/choice.h"
#include "ops/lowbit/choice.h"
#include "ops/nsa/choice.h"
#include "ops/partial/choice.h"
#include "ops/sparse/choice.h"
#include "unit/block_model.h"
#include "unit/encoder_model.h"

namespace {

thread_local std::int64_t allocations = 0;

void* counted(std::size_t bytes) noexcept {
  ++allocations;
  return std::malloc(bytes > 0 ? bytes : 1);
}
void* counted_or_throw(std::size_t bytes) {
  void* const data = counted(bytes);
  if (data == nullptr) throw std::bad_alloc();
  return data;
}

}  // namespace

// All forms without an alignment, so that what one of them gives, another one may free.
void* operator new(std::size_t bytes) { return counted_or_throw(bytes); }
void* operator new[](std::size_t bytes) { return counted_or_throw(bytes); }
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return counted(bytes); }
void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept { return counted(bytes); }
void operator delete(void* data) noexcept { std::free(data); }
void operator delete[](void* data) noexcept { std::free(data); }
void operator delete(void* data, std::size_t) noexcept { std::free(data); }
void operator delete[](void* data, std::size_t) noexcept { std::free(data); }
void operator delete(void* data, const std::nothrow_t&) noexcept { std::free(data); }
void operator delete[](void* data, const std::nothrow_t&) noexcept { std::free(data); }

namespace heddle::kit {
namespace {

class CallingThread : public Executor {
 public:
  int workers() const override { return 1; }
  void parallel_for(std::int64_t count, const std::function<void(std::int64_t, int)>& task) override {
    for (std::int64_t i = 0; i < count; ++i) task(i, 0);
  }
};

template <class Call>
std::int64_t allocations_of(Call call) {
  cpu_target();  // chosen once in a process
  const std::int64_t before = allocations;
  call();
  return allocations - before;
}

TEST(Allocations, AreCounted) {
  EXPECT_EQ(allocations_of([] { ::operator delete(::operator new(1)); }), 1);
}

TEST(Allocations, OfAppendsInFourBitsAreNone) {
  const Int4Case c({.name = "allocations", .lengths = {200, 129}});
  CallingThread executor;
  Operation<Int4AppendProblem>::candidates();  // their list is made once in a process
  c.fill_cache([&](std::int64_t b, std::int64_t from, std::int64_t count) {
    const HostTensor row = indices({c.row_of(b)}), before = indices({from});
    const auto s = Int4Case::step(c.k_new.view(), c.v_new.view(), c.cache(), row.view(), before.view(), b, from, count);
    const Runtime runtime{{}, &executor, nullptr};
    EXPECT_EQ(allocations_of([&] { append_int4_cache(s.k_new, s.v_new, s.cache, s.seqlens, {}, runtime); }), 0);
  });
}

struct Memory {
  std::vector<std::byte> bytes;
  Workspace of(std::size_t size) {
    bytes.resize(size + 64);
    const auto at = (reinterpret_cast<std::uintptr_t>(bytes.data()) + 63) / 64 * 64;
    return {reinterpret_cast<void*>(at), size};
  }
};

HostTensor filled(DType dtype, std::vector<std::int64_t> shape, bool output = false) {
  HostTensor x = output ? HostTensor::output(dtype, std::move(shape)) : HostTensor::input(dtype, std::move(shape));
  for (std::int64_t n = 0; n < x.elements(); ++n) x.set(n, std::sin(0.3 * static_cast<double>(n)));
  return x;
}

// Prefill with every tensor that tasks look at, and decoding, whose keys are cut among tasks.
TEST(Allocations, OfAttentionAndItsGradientsAreNone) {
  CallingThread executor;
  for (const std::int64_t rows : {1, 70}) {
    const HostTensor q = filled(DType::bf16, {2, rows, 4, 40}), k = filled(DType::bf16, {2, 300, 2, 40}),
                     v = filled(DType::bf16, {2, 300, 2, 24}), d_o = filled(DType::bf16, {2, rows, 4, 24}),
                     bias = filled(DType::f32, {1, 4, rows, 300}), sink = filled(DType::f32, {4});
    const HostTensor o = filled(DType::bf16, {2, rows, 4, 24}, true), lse = filled(DType::f32, {2, 4, rows}, true),
                     dq = filled(DType::bf16, {2, rows, 4, 40}, true), dk = filled(DType::bf16, {2, 300, 2, 40}, true),
                     dv = filled(DType::bf16, {2, 300, 2, 24}, true),
                     dbias = filled(DType::f32, {1, 4, rows, 300}, true), dsink = filled(DType::f32, {4}, true);
    AttentionOptions options;
    options.causal = Causal::bottom_right;
    options.bias = bias.view();
    options.sink = sink.view();
    const AttentionGradients gradients{dq.view(), dk.view(), dv.view(), dbias.view(), dsink.view()};
    Memory memory, more;
    Runtime runtime{{}, &executor, nullptr};
    runtime.workspace = memory.of(attention_forward_workspace(q.view(), k.view(), v.view(), options, runtime));
    EXPECT_EQ(allocations_of(
                  [&] { attention_forward(q.view(), k.view(), v.view(), o.view(), lse.view(), options, runtime); }),
              0)
        << rows << " rows";
    runtime.workspace =
        more.of(attention_backward_workspace(q.view(), k.view(), v.view(), gradients, options, runtime));
    EXPECT_EQ(allocations_of([&] {
                attention_backward(q.view(), k.view(), v.view(), o.view(), lse.view(), d_o.view(), {}, gradients,
                                   options, runtime);
              }),
              0)
        << rows << " rows";
  }
}

TEST(Allocations, OfAttentionOverListsAndItsGradientsAreNone) {
  CallingThread executor;
  const HostTensor q = filled(DType::bf16, {2, 70, 4, 32}), k = filled(DType::bf16, {2, 300, 2, 32}),
                   v = filled(DType::bf16, {2, 300, 2, 32}), d_o = filled(DType::bf16, {2, 70, 4, 32}),
                   o = filled(DType::bf16, {2, 70, 4, 32}, true), lse = filled(DType::f32, {2, 4, 70}, true),
                   dq = filled(DType::bf16, {2, 70, 4, 32}, true), dk = filled(DType::bf16, {2, 300, 2, 32}, true),
                   dv = filled(DType::bf16, {2, 300, 2, 32}, true);
  HostTensor blocks = HostTensor::input(DType::i32, {2, 5, 2, 3});
  for (std::int64_t n = 0; n < blocks.elements(); ++n) blocks.set(n, static_cast<double>(n % 6 - 1));
  const BlockLists lists{.blocks = blocks.view(), .counts = {}, .offsets = {}, .query_rows = 16};
  const AttentionOptions options;
  const AttentionGradients gradients{dq.view(), dk.view(), dv.view(), {}, {}};
  Operation<SparseProblem>::candidates(), Operation<SparseBackwardProblem>::candidates();  // as above
  Memory memory, more;
  Runtime runtime{{}, &executor, nullptr};
  runtime.workspace =
      memory.of(sparse_attention_forward_workspace(q.view(), k.view(), v.view(), lists, options, runtime));
  EXPECT_EQ(allocations_of([&] {
              sparse_attention_forward(q.view(), k.view(), v.view(), lists, o.view(), lse.view(), options, runtime);
            }),
            0);
  runtime.workspace =
      more.of(sparse_attention_backward_workspace(q.view(), k.view(), v.view(), lists, gradients, options, runtime));
  EXPECT_EQ(allocations_of([&] {
              sparse_attention_backward(q.view(), k.view(), v.view(), lists, o.view(), lse.view(), d_o.view(), {},
                                        gradients, options, runtime);
            }),
            0);
}

TEST(Allocations, OfAttentionWithAToleranceAndItsGradientsAreNone) {
  CallingThread executor;
  const HostTensor q = filled(DType::bf16, {2, 70, 4, 32}), k = filled(DType::bf16, {2, 300, 2, 32}),
                   v = filled(DType::bf16, {2, 300, 2, 32}), d_o = filled(DType::bf16, {2, 70, 4, 32}),
                   o = filled(DType::bf16, {2, 70, 4, 32}, true), lse = filled(DType::f32, {2, 4, 70}, true),
                   bound = filled(DType::f32, {2, 4, 70}, true), dq = filled(DType::bf16, {2, 70, 4, 32}, true),
                   dk = filled(DType::bf16, {2, 300, 2, 32}, true), dv = filled(DType::bf16, {2, 300, 2, 32}, true);
  const HostTensor replaced = HostTensor::output(DType::u8, {2, 2, 12, 2});
  const AdaptiveOptions adaptive{.tol = 0.1f};
  const AttentionOptions options;
  const AttentionGradients gradients{dq.view(), dk.view(), dv.view(), {}, {}};
  Operation<AdaptiveProblem>::candidates(), Operation<AdaptiveBackwardProblem>::candidates();  // as above
  Memory memory, more;
  Runtime runtime{{}, &executor, nullptr};
  runtime.workspace =
      memory.of(adaptive_attention_forward_workspace(q.view(), k.view(), v.view(), adaptive, options, runtime));
  EXPECT_EQ(allocations_of([&] {
              adaptive_attention_forward(q.view(), k.view(), v.view(),
                                         {o.view(), lse.view(), bound.view(), replaced.view()}, adaptive, options,
                                         runtime);
            }),
            0);
  runtime.workspace = more.of(adaptive_attention_backward_workspace(q.view(), k.view(), v.view(), replaced.view(),
                                                                    gradients, options, runtime));
  EXPECT_EQ(allocations_of([&] {
              adaptive_attention_backward(q.view(), k.view(), v.view(), replaced.view(), o.view(), lse.view(),
                                          d_o.view(), {}, gradients, options, runtime);
            }),
            0);
}

TEST(Allocations, OfRotaryEmbeddingAndAppendsAreNone) {
  CallingThread executor;
  const Runtime runtime{{}, &executor, nullptr};
  const HostTensor x = filled(DType::bf16, {2, 5, 4, 32}), out = filled(DType::bf16, {2, 5, 4, 32}, true),
                   cos = filled(DType::f32, {300, 16}), sin = filled(DType::f32, {300, 16}),
                   k = filled(DType::bf16, {2, 5, 2, 32}), v = filled(DType::bf16, {2, 5, 2, 24});
  const std::int32_t lengths[] = {0, 13}, pages[] = {3, 1, 0, 2};
  const TensorView seqlens(lengths, DType::i32, {2}), table(pages, DType::i32, {2, 2});
  const Rotary rotary{cos.view(), sin.view()};
  Operation<RotaryProblem>::candidates(), Operation<AppendProblem>::candidates();
  EXPECT_EQ(allocations_of([&] { apply_rotary(x.view(), out.view(), rotary, {.offsets = seqlens}, runtime); }), 0);
  for (const bool paged : {false, true}) {
    const std::int64_t rows = paged ? 4 : 2, slots = paged ? 16 : 32;
    const HostTensor k_cache = filled(DType::bf16, {rows, slots, 2, 32}, true),
                     v_cache = filled(DType::bf16, {rows, slots, 2, 24}, true);
    const AppendOptions options{.rotary = rotary, .page_table = paged ? table : TensorView{}};
    EXPECT_EQ(allocations_of([&] {
                append_kv_cache(k.view(), v.view(), k_cache.view(), v_cache.view(), seqlens, options, runtime);
              }),
              0);
  }
}

TEST(Allocations, OfQuantisationAndItsUndoingAreNone) {
  CallingThread executor;
  const Runtime runtime{{}, &executor, nullptr};
  const HostTensor weights = filled(DType::bf16, {70, 256}), out = filled(DType::bf16, {70, 256}, true);
  Operation<lowbit::QuantizeCall>::candidates(), Operation<lowbit::DequantizeProblem>::candidates();
  for (const auto& [format, rule] : {std::pair{"nvfp4", lowbit::ScaleRule::four_six},
                                     {"int4_g128_zp", lowbit::ScaleRule::mse},
                                     {"int8_row", lowbit::ScaleRule::plain}}) {
    lowbit::QuantizedMatrix matrix = lowbit::storage(lowbit::format_named(format), 70, 256);
    Memory memory[4];
    TensorView* parts[] = {&matrix.codes, &matrix.scales, &matrix.zeros, &matrix.global_scale};
    for (int i = 0; i < 4; ++i) {
      const auto bytes = static_cast<std::size_t>(parts[i]->elements()) * size_of(parts[i]->dtype);
      if (parts[i]->rank > 0) parts[i]->data = memory[i].of(bytes).data;
    }
    const lowbit::QuantizeOptions options{.rule = rule};
    EXPECT_EQ(allocations_of([&] { lowbit::quantize(weights.view(), options, matrix, runtime); }), 0) << format;
    EXPECT_EQ(allocations_of([&] { lowbit::dequantize(matrix, out.view(), {}, runtime); }), 0) << format;
  }
}

// Of low-bit layers; those in floats are the matrix library's, which allocates.
TEST(Allocations, OfTheBlockAndTheEncoderAreNone) {
  CallingThread executor;
  Runtime runtime{{}, &executor, nullptr};
  TransformerBlockOptions options = test::block_options();
  options.layers = {{"*", "int4_g64"}};
  const TransformerBlock block(options, test::BlockModel(options).weights());
  const test::BlockInput rows(options, {17, 1, 0, 66});
  const HostTensor x = rows.tensor(), y = HostTensor::output(rows.dtype, {rows.total(), rows.hidden});
  Memory memory, more;
  runtime.workspace = memory.of(block.workspace(rows.total(), rows.sequences(), rows.longest(), runtime));
  EXPECT_EQ(allocations_of([&] { block.forward(x.view(), rows.offsets(), y.view(), runtime); }), 0);

  test::ModelFolder folder(test::kConfig);
  folder.write();
  EncoderOptions packed;
  packed.layers = {{"*", "int8_row"}};
  const Encoder encoder = Encoder::load(folder.path(), packed);
  const test::Input text(test::kLengths);
  const HostTensor embeddings = HostTensor::output(DType::f32, {text.sequences(), test::kConfig.hidden}),
                   states = HostTensor::output(DType::f32, {text.total(), test::kConfig.hidden});
  runtime.workspace = more.of(encoder.workspace(text.total(), text.sequences(), text.longest(), runtime));
  EXPECT_EQ(allocations_of([&] {
              encoder.encode(text.id_view(), text.offset_view(), embeddings.view(), states.view(), true, runtime);
            }),
            0);
}

TEST(Allocations, OfMergesAndTheirGradientsAreNone) {
  CallingThread executor;
  const Runtime runtime{{}, &executor, nullptr};
  const HostTensor sink = filled(DType::f32, {4}), d_o = filled(DType::bf16, {2, 70, 4, 24}),
                   o = filled(DType::bf16, {2, 70, 4, 24}, true), lse = filled(DType::f32, {2, 4, 70}, true),
                   dsink = filled(DType::f32, {4}, true);
  std::vector<HostTensor> tensors;
  for (int n = 0; n < 24; ++n) {  // with names of two digits
    tensors.push_back(filled(DType::bf16, {2, 70, 4, 24}, n % 2 == 1));
    tensors.push_back(filled(DType::f32, {2, 4, 70}, n % 2 == 1));
  }
  std::vector<Partial> partials, gradients;
  for (std::size_t n = 0; n < tensors.size(); n += 4) {
    partials.push_back({tensors[n].view(), tensors[n + 1].view()});
    gradients.push_back({tensors[n + 2].view(), tensors[n + 3].view()});
  }
  Operation<MergeProblem>::candidates(), Operation<MergeBackwardProblem>::candidates();  // as above
  EXPECT_EQ(allocations_of([&] { merge_attention(partials, o.view(), lse.view(), {.sink = sink.view()}, runtime); }),
            0);
  EXPECT_EQ(allocations_of([&] {
              merge_attention_backward(partials, d_o.view(), lse.view(), gradients, dsink.view(), {.sink = sink.view()},
                                       runtime);
            }),
            0);
}

TEST(Allocations, OfPoolingItsGradientAndTheChoiceOfBlocksAreNone) {
  CallingThread executor;
  const HostTensor x = filled(DType::bf16, {2, 700, 2, 40}), pooled = filled(DType::bf16, {2, 21, 2, 40}, true),
                   dx = filled(DType::bf16, {2, 700, 2, 40}, true), q = filled(DType::bf16, {2, 700, 4, 40}),
                   blocks = HostTensor::output(DType::i32, {2, 700, 2, 6});
  const PoolOptions pool{.block = 32, .stride = 32};
  SelectOptions select;
  select.block_size = 64, select.compression_block = 32;
  Operation<PoolProblem>::candidates(), Operation<PoolBackwardProblem>::candidates();  // as above
  Operation<SelectProblem>::candidates();
  Memory memory;
  Runtime runtime{{}, &executor, nullptr};
  EXPECT_EQ(allocations_of([&] { pool_keys(x.view(), pooled.view(), pool, runtime); }), 0);
  EXPECT_EQ(allocations_of([&] { pool_keys_backward(pooled.view(), dx.view(), pool, runtime); }), 0);
  runtime.workspace = memory.of(select_blocks_workspace(q.view(), pooled.view(), {}, blocks.view(), select, runtime));
  EXPECT_EQ(allocations_of([&] { select_blocks(q.view(), pooled.view(), {}, blocks.view(), select, runtime); }), 0);
}

TEST(Allocations, OfLinearLayersAndTheirGradientsAreNone) {
  CallingThread executor;
  for (const bool int8_x : {false, true}) {
    const LinearLayer layer({.format = "int4_g128",
                             .rows = {9},
                             .N = 70,
                             .K = 256,
                             .dtype = DType::bf16,
                             .bias = true,
                             .int8_x = int8_x,
                             .norm = Norm::rms_norm});
    const LinearOptions options = layer.options();
    const PackedWeights& weights = layer.packed.weights();
    const HostTensor y = layer.output(), dy = filled(DType::bf16, {9, 70}), dx = filled(DType::bf16, {9, 256}, true);
    Memory memory, more;
    Runtime runtime{{}, &executor, nullptr};
    runtime.workspace = memory.of(linear_forward_workspace(layer.x.view(), weights, options, runtime));
    EXPECT_EQ(allocations_of([&] { linear_forward(layer.x.view(), weights, y.view(), options, runtime); }), 0);
    if (int8_x) continue;  // has no gradient
    const LinearGradients gradients{dx.view(), {}, {}, {}};
    runtime.workspace =
        more.of(linear_backward_workspace(dy.view(), layer.x.view(), weights, gradients, options, runtime));
    EXPECT_EQ(allocations_of([&] { linear_backward(dy.view(), layer.x.view(), weights, gradients, options, runtime); }),
              0);
  }
}

}  // namespace
}  // namespace heddle::kit
