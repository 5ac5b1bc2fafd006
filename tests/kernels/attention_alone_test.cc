// What a caller of the CPU gets who asks for no candidate and, in a prefill, for no flag: a sequence has the same bits
// alone, in a batch and beside longer ones, gradients too. On both sides of where the arithmetic changes: 8 rows of a
// kv head, 64 of them that split their keys, chunks of 512 keys.
#include <gtest/gtest.h>

#include <cmath>
#include <utility>
#include <vector>

#include "core/check.h"
#include "kernels/candidates.h"
#include "kit/indices.h"

namespace heddle::kit {
namespace {

constexpr std::int64_t kSize = 17;

constexpr std::pair<DType, DType> kTypes[] = {{DType::f32, DType::f32},
                                              {DType::bf16, DType::bf16},
                                              {DType::f16, DType::f16},
                                              {DType::bf16, DType::f8e4m3}};  // of q, of k and v

struct Length {
  std::int64_t rows, keys;
};

// Element n of tensor `which` of a sequence; sequences differ.
double value(int which, std::int64_t sequence, std::int64_t n) {
  return static_cast<double>((n * 7919 + sequence * 104729 + which * 1299709) % 2003) / 1000.0 - 1.0;
}

struct Answer {
  std::vector<double> o, lse, dq, dk, dv;
  bool operator==(const Answer&) const = default;
};

struct Kind {
  DType dtype, cache;
  std::int64_t kv_heads;
  Causal causal;
  bool batch_invariant = false, gradients = false;
  std::int64_t heads = 2;

  AttentionOptions options() const {
    AttentionOptions out;
    out.causal = causal;
    out.batch_invariant = batch_invariant;
    return out;
  }
};

struct Call {
  Call(const Kind& kind, std::vector<std::int64_t> rows, std::vector<std::int64_t> keys)
      : q(HostTensor::input(kind.dtype, shape(rows, kind.heads))),
        k(HostTensor::input(kind.cache, shape(keys, kind.kv_heads))),
        v(HostTensor::input(kind.cache, shape(keys, kind.kv_heads))),
        d_o(HostTensor::input(kind.dtype, shape(rows, kind.heads))),
        o(HostTensor::output(kind.dtype, shape(rows, kind.heads))),
        lse(HostTensor::output(DType::f32, lse_shape(rows, kind.heads))),
        dq(HostTensor::output(kind.dtype, shape(rows, kind.heads))),
        dk(HostTensor::output(kind.cache, shape(keys, kind.kv_heads))),
        dv(HostTensor::output(kind.cache, shape(keys, kind.kv_heads))),
        options(kind.options()),
        kind(kind) {}

  void run() {
    WorkspaceBuffer buffer;
    Runtime runtime;
    runtime.workspace = buffer.get(attention_forward_workspace(q.view(), k.view(), v.view(), options));
    attention_forward(q.view(), k.view(), v.view(), o.view(), lse.view(), options, runtime);
    if (!kind.gradients) return;
    AttentionGradients to;
    to.dq = dq.view();
    to.dk = dk.view();
    to.dv = dv.view();
    runtime.workspace = buffer.get(attention_backward_workspace(q.view(), k.view(), v.view(), to, options));
    attention_backward(q.view(), k.view(), v.view(), o.view(), lse.view(), d_o.view(), {}, to, options, runtime);
  }

  // Of rows [row, row + count.rows) and keys [key, key + count.keys) of all; lse's rows of head h begin at
  // first_lse + h * lse_stride.
  Answer answer(std::int64_t row, std::int64_t key, const Length& count, std::int64_t first_lse,
                std::int64_t lse_stride) const {
    Answer out;
    copy(o, row, count.rows, kind.heads, out.o);
    for (std::int64_t h = 0; h < kind.heads; ++h) {
      for (std::int64_t i = 0; i < count.rows; ++i) out.lse.push_back(lse.get(first_lse + h * lse_stride + i));
    }
    if (kind.gradients) {
      copy(dq, row, count.rows, kind.heads, out.dq);
      copy(dk, key, count.keys, kind.kv_heads, out.dk);
      copy(dv, key, count.keys, kind.kv_heads, out.dv);
    }
    return out;
  }

  HostTensor q, k, v, d_o, o, lse, dq, dk, dv;
  AttentionOptions options;
  Kind kind;

 private:
  // extents: [total], or [batch, rows].
  static std::vector<std::int64_t> shape(std::vector<std::int64_t> extents, std::int64_t heads) {
    extents.push_back(heads);
    extents.push_back(kSize);
    return extents;
  }
  static std::vector<std::int64_t> lse_shape(std::vector<std::int64_t> extents, std::int64_t heads) {
    extents.insert(extents.end() - 1, heads);
    return extents;
  }
  static void copy(const HostTensor& x, std::int64_t row, std::int64_t count, std::int64_t heads,
                   std::vector<double>& to) {
    const std::int64_t size = heads * kSize;
    for (std::int64_t at = row * size; at < (row + count) * size; ++at) to.push_back(x.get(at));
  }
};

// `count` rows of sequence `number`, each of heads * kSize elements, from row `begin` of x on.
void write(HostTensor& x, int which, std::int64_t number, std::int64_t begin, std::int64_t count, std::int64_t heads) {
  const std::int64_t row = heads * kSize;
  for (std::int64_t n = 0; n < count * row; ++n) x.set(begin * row + n, value(which, number, n));
}

// Of sequence `number`, from row `row` and key `key` of all on.
void write(Call& call, std::int64_t number, std::int64_t row, std::int64_t key, const Length& count) {
  write(call.q, 0, number, row, count.rows, call.kind.heads);
  write(call.k, 1, number, key, count.keys, call.kind.kv_heads);
  write(call.v, 2, number, key, count.keys, call.kind.kv_heads);
  write(call.d_o, 3, number, row, count.rows, call.kind.heads);
}

// All sequences end to end; answers[n] is sequence numbers[n]'s.
std::vector<Answer> packed(const Kind& kind, const std::vector<Length>& lengths,
                           const std::vector<std::int64_t>& numbers) {
  std::vector<std::int64_t> rows{0}, keys{0};
  for (const Length& x : lengths) rows.push_back(rows.back() + x.rows), keys.push_back(keys.back() + x.keys);
  Call call(kind, {rows.back()}, {keys.back()});
  for (std::size_t n = 0; n < lengths.size(); ++n) write(call, numbers[n], rows[n], keys[n], lengths[n]);
  const HostTensor cu_q = indices(rows), cu_k = indices(keys);
  call.options.cu_seqlens_q = cu_q.view();
  call.options.cu_seqlens_k = cu_k.view();
  call.run();
  std::vector<Answer> out;
  for (std::size_t n = 0; n < lengths.size(); ++n) {
    out.push_back(call.answer(rows[n], keys[n], lengths[n], rows[n], rows.back()));
  }
  return out;
}

// Sequence `number` as the last of `batch` that have room for `more` rows and keys beyond its own; the others use them.
Answer padded(const Kind& kind, const Length& length, std::int64_t number, std::int64_t batch, const Length& more) {
  const Length room{length.rows + more.rows, length.keys + more.keys};
  Call call(kind, {batch, room.rows}, {batch, room.keys});
  std::vector<std::int64_t> used_q, used_k;
  for (std::int64_t b = 0; b < batch; ++b) {
    const bool last = b == batch - 1;
    const Length& used = last ? length : room;
    used_q.push_back(used.rows);
    used_k.push_back(used.keys);
    write(call, last ? number : 100 + b, b * room.rows, b * room.keys, used);
  }
  const HostTensor seqused_q = indices(used_q), seqused_k = indices(used_k);
  if (more.rows > 0) call.options.seqused_q = seqused_q.view();
  if (more.keys > 0) call.options.seqused_k = seqused_k.view();
  call.run();
  const std::int64_t b = batch - 1;
  if (kind.gradients) {
    const Answer unused = call.answer(b * room.rows + length.rows, b * room.keys + length.keys, more, 0, 0);
    for (const auto* gradient : {&unused.dq, &unused.dk, &unused.dv}) {
      for (const double x : *gradient) EXPECT_EQ(x, 0);
    }
  }
  return call.answer(b * room.rows, b * room.keys, length, b * kind.heads * room.rows, room.rows);
}

void check(const Kind& kind, const std::vector<Length>& lengths) {
  SCOPED_TRACE(text(name_of(kind.dtype), " over ", name_of(kind.cache), ", ", kind.kv_heads, " kv heads",
                    kind.causal == Causal::none ? "" : ", causal", kind.batch_invariant ? ", batch_invariant" : ""));
  std::vector<std::int64_t> numbers;
  for (std::size_t n = 0; n < lengths.size(); ++n) numbers.push_back(static_cast<std::int64_t>(n));
  const std::vector<Answer> together = packed(kind, lengths, numbers);
  for (std::size_t n = 0; n < lengths.size(); ++n) {
    const Length& x = lengths[n];
    SCOPED_TRACE(text(x.rows, " rows, ", x.keys, " keys"));
    const Answer alone = padded(kind, x, numbers[n], 1, {0, 0});
    for (const double o : alone.o) ASSERT_TRUE(std::isfinite(o));
    EXPECT_TRUE(alone == packed(kind, {x}, {numbers[n]})[0]) << "alone, packed";
    EXPECT_TRUE(alone == together[n]) << "packed, beside others";
    EXPECT_TRUE(alone == padded(kind, x, numbers[n], 5, {0, 0})) << "in a batch";
    EXPECT_TRUE(alone == padded(kind, x, numbers[n], 2, {0, 200})) << "in a batch, beside longer keys";
    EXPECT_TRUE(alone == padded(kind, x, numbers[n], 2, {60, 200})) << "in a batch, beside more rows and longer keys";
  }
}

TEST(AloneByItself, APrefill) {
  on_each_quick_target([] {
    for (const auto& [dtype, cache] : kTypes) {
      for (const auto& [kv_heads, causal] : {std::pair{1, Causal::bottom_right}, {2, Causal::none}}) {
        check({.dtype = dtype, .cache = cache, .kv_heads = kv_heads, .causal = causal},
              {{17, 511}, {17, 513}, {32, 513}, {33, 512}, {33, 513}, {64, 512}, {64, 513}, {65, 513}, {110, 1030}});
      }
    }
  });
}

// So many kv heads that no batch changes how the sums of dK and dV are cut, and rows of one tile and of two.
TEST(AloneByItself, GradientsOfAPrefill) {
  on_each_quick_target([] {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      for (const auto& [heads, causal] : {std::pair{32, Causal::bottom_right}, {16, Causal::none}}) {
        check({.dtype = dtype, .cache = dtype, .kv_heads = 16, .causal = causal, .gradients = true, .heads = heads},
              {{17, 130}, {33, 65}, {97, 257}, {400, 70}, {800, 33}});
      }
    }
  });
}

TEST(AloneByItself, ADecode) {
  on_each_quick_target([] {
    for (const auto& [dtype, cache] : kTypes) {
      for (const std::int64_t kv_heads : {1, 2}) {
        check({.dtype = dtype,
               .cache = cache,
               .kv_heads = kv_heads,
               .causal = Causal::bottom_right,
               .batch_invariant = true},
              {{1, 31}, {1, 512}, {1, 513}, {2, 1025}, {4, 513}, {5, 513}, {8, 512}, {8, 513}, {9, 512}, {9, 513}});
      }
    }
  });
}

}  // namespace
}  // namespace heddle::kit
