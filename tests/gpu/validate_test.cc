// Validate mode: what a kernel finds wrong with index data is what the CPU throws for the same call, word for word;
// validate_record_test.cc has what becomes of it.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "gpu/validate_calls.h"
#include "heddle/int4_cache.h"
#include "heddle/kv_cache.h"
#include "heddle/nsa.h"
#include "heddle/sparse.h"
#include "heddle/transformer_block.h"
#include "kit/int4_case.h"
#include "unit/block_model.h"

namespace heddle::kit {
namespace {

constexpr std::int64_t kMost = 2147483647, kLeast = -kMost - 1;

using Call = std::function<void(Side& side)>;

std::string thrown_by(const Call& call) {
  Side host(Device::cpu);
  try {
    call(host);
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

void expect_same(const Call& call) {
  const std::string expected = thrown_by(call);
  SCOPED_TRACE(expected);
  EXPECT_EQ(expected.find("["), 0u);
  Side gpu(Device::cuda);
  call(gpu);
  EXPECT_EQ(last_error(gpu.stream().get()), expected);
  EXPECT_EQ(last_error(gpu.stream().get()), "");
}

using Change = std::function<void(Tensors&)>;

// Mistakes in the offsets and lengths of packed sequences, those in the lengths of rows of q last.
constexpr int kOfUsedRows = 2;
std::vector<Change> packed_mistakes() {
  return {
      [](auto& t) {
        t.cu_q = ints({1, 3, 6});
      },
      [](auto& t) {
        t.cu_q = ints({0, 7, 6});
      },
      [](auto& t) {
        t.cu_q = ints({0, 3, 5});
      },
      [](auto& t) {
        t.cu_k = ints({kLeast, 4, kMost});
      },
      [](auto& t) {
        t.cu_k = ints({0, kMost, 8});
      },
      [](auto& t) {
        t.cu_k = ints({0, 4, 9});
      },
      [](auto& t) { t.longest_q = 2; },
      [](auto& t) { t.longest_k = 3; },
      [](auto& t) {
        t.used_k = ints({4, kMost});
      },
      [](auto& t) {
        t.used_q = ints({3, 4});
      },
      [](auto& t) {
        t.used_q = ints({-1, 3});
      },
  };
}

TEST(GpuValidate, PackedAttentionForwardAndBackward) {
  for (const Change& change : packed_mistakes()) {
    Tensors t = packed();
    change(t);
    expect_same([&](Side& side) { t.forward(side); });
    expect_same([&](Side& side) { t.backward(side); });
  }
}

TEST(GpuValidate, AttentionOverLists) {
  const HostTensor blocks = ints({0, 0, 0, 0, 0, 0}, {6, 1, 1});
  for (const Change& change : packed_mistakes()) {
    Tensors t = packed();
    change(t);
    const HostTensor dq = HostTensor::output(DType::f16, {6, 2, 64}), dk = HostTensor::output(DType::f16, {8, 1, 64}),
                     dv = HostTensor::output(DType::f16, {8, 1, 64});
    expect_same([&](Side& side) {
      const TensorView q = side(t.q), k = side(t.k), v = side(t.v), o = side(t.o), lse = side(t.lse);
      const BlockLists lists{.blocks = side(blocks), .counts = {}, .offsets = {}, .block_size = 16};
      const AttentionOptions with = t.options(side);
      sparse_attention_forward(q, k, v, lists, o, lse, with,
                               side.with([&] { return sparse_attention_forward_workspace(q, k, v, lists, with); }));
    });
    expect_same([&](Side& side) {
      const TensorView q = side(t.q), k = side(t.k), v = side(t.v), o = side(t.o), lse = side(t.lse);
      const BlockLists lists{.blocks = side(blocks), .counts = {}, .offsets = {}, .block_size = 16};
      const AttentionGradients gradients{side(dq), side(dk), side(dv), {}, {}};
      const AttentionOptions with = t.options(side);
      sparse_attention_backward(q, k, v, lists, o, lse, side(t.o), {}, gradients, with, side.with([&] {
        return sparse_attention_backward_workspace(q, k, v, lists, gradients, with);
      }));
    });
  }
}

TEST(GpuValidate, TheChoiceOfBlocks) {
  std::vector<Change> changes = packed_mistakes();
  changes.resize(changes.size() - kOfUsedRows);
  for (const Change& change : changes) {
    Tensors t = packed();
    change(t);
    const HostTensor blocks = HostTensor::output(DType::i32, {6, 1, 4});
    expect_same([&](Side& side) {
      const TensorView q = side(t.q), k_pooled = side(t.k), lists = side(blocks);
      SelectOptions with;
      with.block_size = 16;
      with.cu_seqlens_q = side(t.cu_q);
      with.cu_seqlens_k = side(t.cu_k);
      with.seqused_k = side(t.used_k);
      with.max_seqlen_q = t.longest_q;
      with.max_seqlen_k = t.longest_k;
      select_blocks(q, k_pooled, {}, lists, with,
                    side.with([&] { return select_blocks_workspace(q, k_pooled, {}, lists, with); }));
    });
  }
}

TEST(GpuValidate, PooledKeys) {
  const HostTensor x = HostTensor::input(DType::f16, {8, 1, 64}), pooled = HostTensor::output(DType::f16, {4, 1, 64}),
                   cache = HostTensor::input(DType::f16, {2, 8, 1, 64}),
                   rows = HostTensor::output(DType::f16, {2, 4, 1, 64}),
                   dx = HostTensor::output(DType::f16, {8, 1, 64}),
                   d_pooled = HostTensor::input(DType::f16, {4, 1, 64});
  const std::pair<HostTensor, HostTensor> mistakes[] = {
      {ints({1, 3, 8}), {}},          {ints({0, 9, 8}), {}},           {ints({0, 3, 7}), {}},
      {ints({kLeast, 3, kMost}), {}}, {ints({0, 4, 8}), ints({4, 5})}, {ints({0, 4, 8}), ints({-1, 4})},
  };
  const auto none = [] { return std::size_t{0}; };
  for (const auto& [offsets, used] : mistakes) {
    const auto options = [&](Side& side) {
      return PoolOptions{.block = 2, .stride = 2, .cu_seqlens = side(offsets), .seqused = side(used)};
    };
    expect_same([&](Side& side) { pool_keys(side(x), side(pooled), options(side), side.with(none)); });
    expect_same([&](Side& side) { pool_keys_backward(side(d_pooled), side(dx), options(side), side.with(none)); });
  }
  for (const std::int64_t used : {std::int64_t{9}, std::int64_t{-1}, kMost}) {
    const HostTensor lengths = ints({8, used});
    expect_same([&](Side& side) {
      extend_pooled_keys(side(cache), side(rows), {.block = 2, .stride = 2, .seqused = side(lengths), .appended = 1},
                         side.with(none));
    });
  }
}

TEST(GpuValidate, CachedAttention) {
  const std::vector<std::pair<Tensors, Change>> changes = {
      {dense(),
       [](auto& t) {
         t.rows = ints({0, 2});
       }},
      {dense(),
       [](auto& t) {
         t.rows = ints({kLeast, 1});
       }},
      {dense(),
       [](auto& t) {
         t.used_k = ints({5, 6});
       }},
      {dense(),
       [](auto& t) {
         t.leftpad = ints({6, 0});
       }},
      {dense(),
       [](auto& t) {
         t.leftpad = ints({0, -1});
       }},
      {paged(),
       [](auto& t) {
         t.used_k = ints({33, 32});
       }},
      {paged(),
       [](auto& t) {
         t.table = ints({0, 1, 2, 4}, {2, 2});
       }},
      {paged(),
       [](auto& t) {
         t.table = ints({kMost, 1, -1, 3}, {2, 2});
       }},
      {paged(),
       [](auto& t) {
         t.table = ints({9, 1, 2, 9}, {2, 2});  // the first page of sequence 0 is skipped
         t.leftpad = ints({16, 0});
       }},
      {paged(),
       [](auto& t) {
         t.used_k = ints({32, kMost});
         t.leftpad = ints({0, kMost});
       }},
  };
  for (auto [t, change] : changes) {
    change(t);
    expect_same([&, &t = t](Side& side) { t.forward(side); });
  }
}

struct Appended {
  Tensors t;
  HostTensor k_new, v_new, cos;
  bool rotates = false;
  Causal causal = Causal::none;

  explicit Appended(Tensors tensors)
      : t(std::move(tensors)),
        k_new(HostTensor::input(DType::f16, {2, 3, 1, 64})),
        v_new(HostTensor::input(DType::f16, {2, 3, 1, 64})),
        cos(HostTensor::input(DType::f32, {8, 32})) {}

  Rotary rotary(Side& side) const {
    if (!rotates) return {};
    const TensorView table = side(cos);
    return {table, table, false};
  }
  void append(Side& side) const {
    append_kv_cache(side(k_new), side(v_new), side(t.k), side(t.v), side(t.used_k),
                    {.rotary = rotary(side), .page_table = side(t.table), .cache_batch_idx = side(t.rows)},
                    side.with([] { return std::size_t{0}; }));
  }
  void attend(Side& side) const {
    const TensorView q = side(t.q), k = side(k_new), v = side(v_new), k_cache = side(t.k), v_cache = side(t.v);
    const Rotary table = rotary(side);
    AttentionOptions options = t.options(side);
    options.causal = causal;
    attention_with_kv_cache(q, k, v, k_cache, v_cache, side(t.o), side(t.lse), table, options, side.with([&] {
      return attention_with_kv_cache_workspace(q, k, v, k_cache, v_cache, table, options);
    }));
  }
};

TEST(GpuValidate, AppendsAloneAndWithAttention) {
  const auto with = [](Tensors t, const Change& change, bool rotates = false) {
    change(t);
    Appended out(std::move(t));
    out.rotates = rotates;
    return out;
  };
  const std::vector<Appended> calls = {
      with(dense(),
           [](auto& t) {
             t.used_k = ints({0, 3});
           }),
      with(dense(),
           [](auto& t) {
             t.used_k = ints({kLeast, 0});
           }),
      with(dense(),
           [](auto& t) {
             t.used_k = ints({0, 0}), t.rows = ints({0, 2});
           }),
      with(dense(),
           [](auto& t) {
             t.used_k = ints({2, 1}), t.rows = ints({1, 1});
           }),  // both write to row 1
      with(paged(),
           [](auto& t) {
             t.used_k = ints({0, 30});
           }),
      with(paged(),
           [](auto& t) {
             t.used_k = ints({0, 14}), t.table = ints({0, 1, 2, 4}, {2, 2});
           }),
      with(paged(),
           [](auto& t) {
             t.used_k = ints({15, 17}), t.table = ints({0, 2, 1, 2}, {2, 2});
           }),
      with(
          paged(),
          [](auto& t) {
            t.used_k = ints({5, 6});
          },
          true),
  };
  for (const Appended& call : calls) {
    expect_same([&](Side& side) { call.append(side); });
    expect_same([&](Side& side) { call.attend(side); });
  }
  // q has more rows than there are new keys, and the tables end between.
  Appended call = with(
      paged(),
      [](auto& t) {
        t.used_k = ints({6, 5});
      },
      true);
  call.k_new = HostTensor::input(DType::f16, {2, 1, 1, 64});
  call.v_new = HostTensor::input(DType::f16, {2, 1, 1, 64});
  call.causal = Causal::bottom_right;
  expect_same([&](Side& side) { call.attend(side); });
}

// A step of native sparse attention, which no CPU has: its lengths are read as an append's, whose words these are.
TEST(GpuValidate, StepsOfNativeSparseAttention) {
  constexpr std::int64_t kHeads = 16, kBlock = 16;
  const auto zeros = [](std::vector<std::int64_t> shape) { return HostTensor::input(DType::f16, std::move(shape)); };
  struct Mistake {
    std::vector<std::int64_t> lengths, table;  // pages of 16 keys; none: a cache of 32
  };
  for (const auto& [lengths, table] : {Mistake{{0, 32}, {}}, Mistake{{-1, 31}, {}}, Mistake{{3, kMost}, {}},
                                       Mistake{{0, 32}, {0, 1, 2, 3}}, Mistake{{15, 16}, {0, 1, 2, 4}}}) {
    const std::int64_t caches = table.empty() ? 2 : 4, rows = table.empty() ? 32 : 16;
    const HostTensor q = zeros({2, 1, kHeads, 64}), k_new = zeros({2, 1, 1, 64}), v_new = zeros({2, 1, 1, 64}),
                     k = zeros({caches, rows, 1, 64}), v = zeros({caches, rows, 1, 64}),
                     k_pooled = zeros({caches, rows / kBlock, 1, 64}), v_pooled = zeros({caches, rows / kBlock, 1, 64}),
                     gate = zeros({2, 1, kHeads}), out = HostTensor::output(DType::f16, {2, 1, kHeads, 64}),
                     held = ints(lengths), pages = table.empty() ? HostTensor() : ints(table, {2, 2});
    std::string expected = thrown_by([&](Side& side) {
      append_kv_cache(side(k_new), side(v_new), side(k), side(v), side(held), {.page_table = side(pages)}, {});
    });
    for (const auto& [of_append, of_step] :
         {std::pair{"append_kv_cache", "nsa_step"}, {"seqlens", "lengths"}, {"k_cache", "cache.k"}}) {
      for (std::size_t at = 0; (at = expected.find(of_append, at)) != std::string::npos; at += std::strlen(of_step)) {
        expected.replace(at, std::strlen(of_append), of_step);
      }
    }
    SCOPED_TRACE(expected);
    EXPECT_EQ(expected.find("[nsa_step] "), 0u);
    Side gpu(Device::cuda);
    const NsaCache cache{gpu(k), gpu(v), gpu(k_pooled), gpu(v_pooled), gpu(held), gpu(pages)};
    const NsaGates gates{gpu(gate), gpu(gate), {}};
    const TensorView q_ = gpu(q), k_ = gpu(k_new), v_ = gpu(v_new), out_ = gpu(out);
    const NsaStepOptions options{.scale = {}, .block_size = kBlock, .block_count = 4};
    if (explain_nsa_step(q_, k_, v_, cache, gates, out_, options).empty() ||
        !explain_nsa_step(q_, k_, v_, cache, gates, out_, options).front().supported) {
      GTEST_SKIP() << "no GPU that has steps of native sparse attention";
    }
    nsa_step(q_, k_, v_, cache, gates, out_, options,
             gpu.with([&] { return nsa_step_workspace(q_, k_, v_, cache, gates, out_, options); }));
    EXPECT_EQ(last_error(gpu.stream().get()), expected);
  }
}

TEST(GpuValidate, Rotations) {
  const HostTensor x = HostTensor::output(DType::f16, {2, 3, 2, 64}), cos = HostTensor::input(DType::f32, {8, 32}),
                   few = HostTensor::input(DType::f32, {2, 32});
  const auto rotate = [&](Side& side, const HostTensor& table, const HostTensor& offsets) {
    const TensorView x_ = side(x), table_ = side(table);
    apply_rotary(x_, x_, {table_, table_, false}, {.offsets = side(offsets)}, side.with([] { return std::size_t{0}; }));
  };
  expect_same([&](Side& side) { rotate(side, cos, ints({0, 6})); });
  expect_same([&](Side& side) { rotate(side, cos, ints({-1, 0})); });
  expect_same([&](Side& side) { rotate(side, few, HostTensor()); });
}

TEST(GpuValidate, CachesIn4Bits) {
  const Int4Spec spec{.name = "validate",
                      .D = 64,
                      .Dv = 64,
                      .lengths = {700, 60, 191},
                      .paged = true,
                      .row_idx = true,
                      .leftpad = true};
  struct Changes {
    std::function<void(Int4Case&)> change;
    bool appends = true, attends = true;
  };
  const std::vector<Changes> changes = {
      {[](auto& c) { c.row_idx.set(1, -1); }},
      {[](auto& c) { c.row_idx.set(1, 5); }},
      {[](auto& c) { c.row_idx.set(1, 4); }, true, false},  // sequence 0 has row 4
      {[](auto& c) { c.lengths.set(2, kMost); }},
      {[](auto& c) { c.lengths.set(0, -1); }},
      {[](auto& c) { c.page_table.set(0, 99); }, false},
      {[](auto& c) { c.lengths.set(0, 127), c.page_table.set(0, 99); }, true, false},
      {[](auto& c) { c.lengths.set(0, 127), c.lengths.set(1, 127), c.page_table.set(12, c.page_table.get(0)); }, true,
       false},
      {[](auto& c) { c.leftpad.set(1, 61); }, false},
  };
  for (const Changes& of : changes) {
    Int4Case c(spec);
    of.change(c);
    const auto cache = [&](Side& side) {
      return Int4Cache{side(c.blocks), side(c.k_tail), side(c.v_tail), side(c.page_table), side(c.row_idx)};
    };
    if (of.appends) {
      expect_same([&](Side& side) {
        append_int4_cache(part(side(c.k_new), 1, 0, 3), part(side(c.v_new), 1, 0, 3), cache(side), side(c.lengths), {},
                          side.with([] { return std::size_t{0}; }));
      });
    }
    if (!of.attends) continue;
    expect_same([&](Side& side) {
      const TensorView q = side(c.q);
      const Int4Cache in = cache(side);
      AttentionOptions options = c.options();
      options.seqused_k = side(c.lengths);
      options.cache_leftpad = side(c.leftpad);
      attention_over_int4_cache(q, in, side(c.new_o()), side(c.new_lse()), options,
                                side.with([&] { return attention_over_int4_cache_workspace(q, in, options); }));
    });
  }
}

// What the CPU says is held in tests/unit/transformer_block_arguments_test.cc: a block there may need a library that is
// not here.
TEST(GpuValidate, TransformerBlock) {
  TransformerBlockOptions options = test::block_options();
  options.dtype = DType::bf16;
  options.device = Device::cuda;
  const test::BlockModel model(options);
  const TransformerBlock block(model.options, model.weights());
  const HostTensor x = test::BlockInput(options, {7, 5}).tensor(),
                   y = HostTensor::output(DType::bf16, {12, x.view().shape[1]});
  const std::pair<std::vector<std::int64_t>, std::string> mistakes[] = {
      {{1, 7, 12}, "cu_seqlens[0] is 1: it must be 0"},
      {{0, 13, 12}, "cu_seqlens decreases from 13 to 12 at entry 2: it must never decrease"},
      {{0, 7, 11}, "cu_seqlens ends at 11: it must end at x's first extent, 12"},
      {{0, 3, 12}, "longest is 7: the longest sequence has 9"},
      {{0, 7, 12}, ""},
  };
  for (const auto& [offsets, sentence] : mistakes) {
    Side gpu(Device::cuda);
    const Runtime runtime = gpu.with([&] { return block.workspace(12, 2, 7); });
    block.forward(gpu(x), gpu(ints(offsets)), gpu(y), runtime, 7);
    EXPECT_EQ(last_error(gpu.stream().get()), sentence.empty() ? "" : "[transformer_block] " + sentence);
  }
}

}  // namespace
}  // namespace heddle::kit
