// Validate mode: what a kernel finds wrong with index data is what the CPU throws for the same call, word for word;
// nothing is found where nothing is wrong; and where it is off, nothing more is launched.
#include <gtest/gtest.h>

#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "gpu/device_backward.h"
#include "heddle/int4_cache.h"
#include "heddle/transformer_block.h"
#include "kit/int4_case.h"
#include "unit/block_model.h"

namespace heddle::kit {
namespace {

constexpr std::int64_t kMost = 2147483647, kLeast = -kMost - 1;

HostTensor ints(const std::vector<std::int64_t>& values, std::vector<std::int64_t> shape = {}) {
  if (shape.empty()) shape = {std::ssize(values)};
  HostTensor out = HostTensor::input(DType::i32, shape);
  for (std::int64_t n = 0; n < out.elements(); ++n)
    out.set(n, static_cast<double>(values[static_cast<std::size_t>(n)]));
  return out;
}

// Where a call's tensors are: those of the host, or mirrors of them.
class Side {
 public:
  explicit Side(Device device) : device_(device) {}

  TensorView operator()(const HostTensor& x) {
    if (device_ == Device::cpu || !x.given()) return x.view();
    return mirrors_.emplace_back(x).view();
  }
  // For a call on the GPU, a workspace of what `bytes` asks for; on the CPU it is refused before it would need one.
  Runtime with(const std::function<std::size_t()>& bytes) {
    Runtime runtime;
    if (device_ == Device::cpu) return runtime;
    scratch_ = DeviceMemory(bytes(), 0xFF);
    runtime.workspace = {scratch_.data(), scratch_.bytes()};
    runtime.stream = stream_.value().get();
    runtime.validate = true;
    return runtime;
  }
  const DeviceStream& stream() const { return stream_.value(); }

 private:
  Device device_;
  std::deque<DeviceTensor> mirrors_;
  DeviceMemory scratch_;
  std::optional<DeviceStream> stream_{std::in_place};
};

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

struct Tensors {
  HostTensor q, k, v, o, lse;
  HostTensor cu_q, cu_k, used_q, used_k, leftpad, table, rows;
  std::int64_t longest_q = 0, longest_k = 0;

  Tensors(std::vector<std::int64_t> q_shape, const std::vector<std::int64_t>& k_shape,
          const std::vector<std::int64_t>& lse_shape)
      : q(HostTensor::input(DType::f16, q_shape)),
        k(HostTensor::input(DType::f16, k_shape)),
        v(HostTensor::input(DType::f16, k_shape)),
        o(HostTensor::output(DType::f16, q_shape)),
        lse(HostTensor::output(DType::f32, lse_shape)) {}

  AttentionOptions options(Side& side) const {
    AttentionOptions out;
    out.cu_seqlens_q = side(cu_q);
    out.cu_seqlens_k = side(cu_k);
    out.max_seqlen_q = longest_q;
    out.max_seqlen_k = longest_k;
    out.seqused_q = side(used_q);
    out.seqused_k = side(used_k);
    out.cache_leftpad = side(leftpad);
    out.page_table = side(table);
    out.cache_batch_idx = side(rows);
    return out;
  }
  void forward(Side& side) const {
    const TensorView q_ = side(q), k_ = side(k), v_ = side(v), o_ = side(o), lse_ = side(lse);
    const AttentionOptions with = options(side);
    attention_forward(q_, k_, v_, o_, lse_, with,
                      side.with([&] { return attention_forward_workspace(q_, k_, v_, with); }));
  }
  void backward(Side& side) const {
    const TensorView q_ = side(q), k_ = side(k), v_ = side(v), o_ = side(o), lse_ = side(lse);
    const HostTensor dq = HostTensor::output(DType::f16, {6, 2, 64}), dk = HostTensor::output(DType::f16, {8, 1, 64}),
                     dv = HostTensor::output(DType::f16, {8, 1, 64});
    const AttentionGradients gradients{side(dq), side(dk), side(dv), {}, {}};
    const AttentionOptions with = options(side);
    attention_backward(q_, k_, v_, o_, lse_, side(o), {}, gradients, with,
                       side.with([&] { return attention_backward_workspace(q_, k_, v_, gradients, with); }));
  }
};

Tensors packed() {
  Tensors t({6, 2, 64}, {8, 1, 64}, {2, 6});
  t.cu_q = ints({0, 3, 6});
  t.cu_k = ints({0, 4, 8});
  t.longest_q = 3;
  t.longest_k = 4;
  return t;
}
Tensors dense() { return Tensors({2, 3, 2, 64}, {2, 5, 1, 64}, {2, 2, 3}); }
Tensors paged() {
  Tensors t({2, 3, 2, 64}, {4, 16, 1, 64}, {2, 2, 3});
  t.table = ints({0, 1, 2, 3}, {2, 2});
  return t;
}

using Change = std::function<void(Tensors&)>;

TEST(GpuValidate, PackedAttentionForwardAndBackward) {
  const std::vector<Change> changes = {
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
        t.used_q = ints({3, 4});
      },
      [](auto& t) {
        t.used_q = ints({-1, 3});
      },
      [](auto& t) {
        t.used_k = ints({4, kMost});
      },
  };
  for (const Change& change : changes) {
    Tensors t = packed();
    change(t);
    expect_same([&](Side& side) { t.forward(side); });
    expect_same([&](Side& side) { t.backward(side); });
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
    append_kv_cache(side(k_new), side(v_new), side(t.k), side(t.v), side(t.used_k), side(t.table), side(t.rows),
                    rotary(side), side.with([] { return std::size_t{0}; }));
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

TEST(GpuValidate, Rotations) {
  const HostTensor x = HostTensor::output(DType::f16, {2, 3, 2, 64}), cos = HostTensor::input(DType::f32, {8, 32}),
                   few = HostTensor::input(DType::f32, {2, 32});
  const auto rotate = [&](Side& side, const HostTensor& table, const HostTensor& offsets) {
    const TensorView x_ = side(x), table_ = side(table);
    apply_rotary(x_, x_, {table_, table_, false}, side(offsets), side.with([] { return std::size_t{0}; }));
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

TEST(GpuValidate, NoCaseIsBlamed) {
  const DeviceStream stream;
  for (const AttentionCase& spec : attention_cases()) {
    SCOPED_TRACE(spec.name);
    DeviceCase at(spec);
    std::size_t chosen = 0;
    for (const Candidate& candidate : at.runner.explain(Pass::forward)) chosen += candidate.chosen ? 1 : 0;
    if (chosen == 0) continue;
    const DeviceMemory memory(at.call.workspace(), 0xFF);
    Runtime runtime;
    runtime.stream = stream.get();
    runtime.workspace = {memory.data(), memory.bytes()};
    runtime.validate = true;
    attention_forward(at.call.q, at.call.k, at.call.v, at.call.o, at.call.lse, at.call.options, runtime);
    ASSERT_EQ(last_error(stream.get()), "");
  }
}

TEST(GpuValidate, NoGradientIsBlamed) {
  const DeviceStream stream;
  for (const char* name : {"feature_packed_f16", "feature_packed_causal_bf16", "feature_packed_used_bf16",
                           "feature_used_both_causal_bf16", "feature_used_both_causal_f32"}) {
    SCOPED_TRACE(name);
    BackwardCase at(attention_case(name));
    const DeviceMemory memory(at.call.workspace(), 0xFF);
    Runtime runtime;
    runtime.stream = stream.get();
    runtime.workspace = {memory.data(), memory.bytes()};
    runtime.validate = true;
    const DeviceCall& forward = at.call.forward;
    attention_backward(forward.q, forward.k, forward.v, forward.o, forward.lse, at.call.d_o, at.call.d_lse,
                       at.call.gradients, forward.options, runtime);
    ASSERT_EQ(last_error(stream.get()), "");
  }
}

// Runs a packed call whose offsets the test may change.
class OneCall {
 public:
  OneCall() : tensors_(packed()), side_(Device::cuda), offsets_(tensors_.cu_q) {
    q_ = side_(tensors_.q), k_ = side_(tensors_.k), v_ = side_(tensors_.v), o_ = side_(tensors_.o);
    options_ = tensors_.options(side_);
    options_.cu_seqlens_q = offsets_.view();
    runtime_ = side_.with([&] { return attention_forward_workspace(q_, k_, v_, options_); });
  }
  void launch(const DeviceStream& stream, bool validate = true) {
    runtime_.stream = stream.get();
    runtime_.validate = validate;
    attention_forward(q_, k_, v_, o_, {}, options_, runtime_);
  }
  void set(const std::vector<std::int64_t>& offsets) { offsets_.write(ints(offsets)); }

 private:
  Tensors tensors_;
  Side side_;
  DeviceTensor offsets_;
  TensorView q_, k_, v_, o_;
  AttentionOptions options_;
  Runtime runtime_;
};

TEST(GpuValidate, IsOneLaunchMoreOrNone) {
  const DeviceStream stream;
  OneCall call;
  Runtime standard;
  EXPECT_FALSE(standard.validate.has_value());
  const std::size_t off = DeviceGraph(stream, [&] { call.launch(stream, false); }).nodes();
  const std::size_t on = DeviceGraph(stream, [&] { call.launch(stream, true); }).nodes();
  EXPECT_GE(off, 1u);
  EXPECT_EQ(on, off + 1);
}

TEST(GpuValidate, StreamsHaveTheirOwn) {
  const DeviceStream first, second;
  OneCall call;
  call.set({0, 3, 5});
  call.launch(first, false);
  EXPECT_EQ(last_error(first.get()), "");
  call.launch(first);
  EXPECT_EQ(last_error(second.get()), "");
  first.synchronize();
  EXPECT_EQ(poll_error(second.get()), "");
  EXPECT_EQ(poll_error(first.get()), "[attention_forward] cu_seqlens_q ends at 5: it must end at q's first extent, 6");
  EXPECT_EQ(poll_error(first.get()), "");
}

TEST(GpuValidate, TheFirstIsKeptUntilItIsTaken) {
  const DeviceStream stream;
  OneCall call;
  call.set({2, 1, 5});
  call.launch(stream);
  stream.synchronize();
  call.set({0, 3, 5});
  call.launch(stream);
  EXPECT_EQ(last_error(stream.get()), "[attention_forward] cu_seqlens_q[0] is 2: it must be 0");
  call.launch(stream);
  EXPECT_EQ(last_error(stream.get()), "[attention_forward] cu_seqlens_q ends at 5: it must end at q's first extent, 6");
}

TEST(GpuValidate, ReplaysOfAGraphCheck) {
  const DeviceStream captured, replayed;
  OneCall call;
  const DeviceGraph graph(captured, [&] { call.launch(captured); });
  graph.replay(replayed);
  replayed.synchronize();
  EXPECT_EQ(poll_error(captured.get()), "");
  for (int round = 0; round < 3; ++round) {
    call.set({0, 4, 3});
    graph.replay(replayed);
    replayed.synchronize();
    EXPECT_EQ(poll_error(captured.get()),
              "[attention_forward] cu_seqlens_q decreases from 4 to 3 at entry 2: it must never decrease");
    call.set({0, 3, 6});
    graph.replay(replayed);
    replayed.synchronize();
    EXPECT_EQ(poll_error(captured.get()), "");
  }
}

}  // namespace
}  // namespace heddle::kit
