// What a caller of the CPU gets who asks for no candidate and, in a prefill, for no flag: a sequence has the same bits
// alone, in a batch and beside longer ones. On both sides of where the arithmetic changes: 8 rows of a kv head, 64 of
// them that split their keys, chunks of 512 keys.
#include <gtest/gtest.h>

#include <cmath>
#include <utility>
#include <vector>

#include "core/check.h"
#include "kernels/candidates.h"

namespace heddle::kit {
namespace {

constexpr std::int64_t kHeads = 2, kSize = 17;

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

struct Operands {
  HostTensor q, k, v;
};

struct Answer {
  std::vector<double> o, lse;
  bool operator==(const Answer&) const = default;
};

struct Kind {
  DType dtype, cache;
  std::int64_t kv_heads;
  Causal causal;
  bool batch_invariant;

  AttentionOptions options() const {
    AttentionOptions out;
    out.causal = causal;
    out.batch_invariant = batch_invariant;
    return out;
  }
};

HostTensor indices(const std::vector<std::int64_t>& values) {
  HostTensor out = HostTensor::input(DType::i32, {static_cast<std::int64_t>(values.size())});
  for (std::size_t n = 0; n < values.size(); ++n) out.set(static_cast<std::int64_t>(n), static_cast<double>(values[n]));
  return out;
}

void attend(const Operands& x, HostTensor& o, HostTensor& lse, const AttentionOptions& options) {
  WorkspaceBuffer buffer;
  Runtime runtime;
  runtime.workspace = buffer.get(attention_forward_workspace(x.q.view(), x.k.view(), x.v.view(), options));
  attention_forward(x.q.view(), x.k.view(), x.v.view(), o.view(), lse.view(), options, runtime);
}

// `count` rows of sequence `number`, each of heads * kSize elements, from row `begin` of x on.
void write(HostTensor& x, int which, std::int64_t number, std::int64_t begin, std::int64_t count, std::int64_t heads) {
  const std::int64_t row = heads * kSize;
  for (std::int64_t n = 0; n < count * row; ++n) x.set(begin * row + n, value(which, number, n));
}

// All sequences end to end; answers[n] is sequence numbers[n]'s.
std::vector<Answer> packed(const Kind& kind, const std::vector<Length>& lengths,
                           const std::vector<std::int64_t>& numbers) {
  std::vector<std::int64_t> rows{0}, keys{0};
  for (const Length& x : lengths) rows.push_back(rows.back() + x.rows), keys.push_back(keys.back() + x.keys);
  Operands x{HostTensor::input(kind.dtype, {rows.back(), kHeads, kSize}),
             HostTensor::input(kind.cache, {keys.back(), kind.kv_heads, kSize}),
             HostTensor::input(kind.cache, {keys.back(), kind.kv_heads, kSize})};
  for (std::size_t n = 0; n < lengths.size(); ++n) {
    write(x.q, 0, numbers[n], rows[n], lengths[n].rows, kHeads);
    write(x.k, 1, numbers[n], keys[n], lengths[n].keys, kind.kv_heads);
    write(x.v, 2, numbers[n], keys[n], lengths[n].keys, kind.kv_heads);
  }
  HostTensor o = HostTensor::output(kind.dtype, {rows.back(), kHeads, kSize}),
             lse = HostTensor::output(DType::f32, {kHeads, rows.back()});
  const HostTensor cu_q = indices(rows), cu_k = indices(keys);
  AttentionOptions options = kind.options();
  options.cu_seqlens_q = cu_q.view();
  options.cu_seqlens_k = cu_k.view();
  attend(x, o, lse, options);
  std::vector<Answer> out(lengths.size());
  for (std::size_t n = 0; n < lengths.size(); ++n) {
    for (std::int64_t at = rows[n] * kHeads * kSize; at < rows[n + 1] * kHeads * kSize; ++at) {
      out[n].o.push_back(o.get(at));
    }
    for (std::int64_t h = 0; h < kHeads; ++h) {
      for (std::int64_t i = rows[n]; i < rows[n + 1]; ++i) out[n].lse.push_back(lse.get(h * rows.back() + i));
    }
  }
  return out;
}

// Sequence `number` as the last of `batch` that have room for `more` rows and keys beyond its own; the others use them.
Answer padded(const Kind& kind, const Length& length, std::int64_t number, std::int64_t batch, const Length& more) {
  const std::int64_t rows = length.rows + more.rows, keys = length.keys + more.keys;
  Operands x{HostTensor::input(kind.dtype, {batch, rows, kHeads, kSize}),
             HostTensor::input(kind.cache, {batch, keys, kind.kv_heads, kSize}),
             HostTensor::input(kind.cache, {batch, keys, kind.kv_heads, kSize})};
  std::vector<std::int64_t> used_q, used_k;
  for (std::int64_t b = 0; b < batch; ++b) {
    const bool last = b == batch - 1;
    used_q.push_back(last ? length.rows : rows);
    used_k.push_back(last ? length.keys : keys);
    const std::int64_t which = last ? number : 100 + b;
    write(x.q, 0, which, b * rows, used_q.back(), kHeads);
    write(x.k, 1, which, b * keys, used_k.back(), kind.kv_heads);
    write(x.v, 2, which, b * keys, used_k.back(), kind.kv_heads);
  }
  HostTensor o = HostTensor::output(kind.dtype, {batch, rows, kHeads, kSize}),
             lse = HostTensor::output(DType::f32, {batch, kHeads, rows});
  const HostTensor seqused_q = indices(used_q), seqused_k = indices(used_k);
  AttentionOptions options = kind.options();
  if (more.rows > 0) options.seqused_q = seqused_q.view();
  if (more.keys > 0) options.seqused_k = seqused_k.view();
  attend(x, o, lse, options);
  Answer out;
  for (std::int64_t n = 0; n < length.rows * kHeads * kSize; ++n) {
    out.o.push_back(o.get((batch - 1) * rows * kHeads * kSize + n));
  }
  for (std::int64_t h = 0; h < kHeads; ++h) {
    for (std::int64_t i = 0; i < length.rows; ++i) out.lse.push_back(lse.get(((batch - 1) * kHeads + h) * rows + i));
  }
  return out;
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
  on_each_target([] {
    for (const auto& [dtype, cache] : kTypes) {
      for (const auto& [kv_heads, causal] : {std::pair{1, Causal::bottom_right}, {2, Causal::none}}) {
        check({dtype, cache, kv_heads, causal, false},
              {{17, 511}, {17, 513}, {32, 513}, {33, 512}, {33, 513}, {64, 512}, {64, 513}, {65, 513}, {110, 1030}});
      }
    }
  });
}

TEST(AloneByItself, ADecode) {
  on_each_target([] {
    for (const auto& [dtype, cache] : kTypes) {
      for (const std::int64_t kv_heads : {1, 2}) {
        check({dtype, cache, kv_heads, Causal::bottom_right, true},
              {{1, 31}, {1, 512}, {1, 513}, {2, 1025}, {4, 513}, {5, 513}, {8, 512}, {8, 513}, {9, 512}, {9, 513}});
      }
    }
  });
}

}  // namespace
}  // namespace heddle::kit
