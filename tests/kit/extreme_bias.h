// A call whose bias has very large numbers among others, as masks of torch.finfo(dtype).min or of -1e9 have.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "core/dtypes.h"
#include "heddle/attention.h"
#include "heddle/int4_cache.h"
#include "heddle/runtime.h"
#include "kit/host_tensor.h"
#include "kit/int4_case.h"

namespace heddle::kit::extreme_bias {

struct Size {
  const char* name;
  std::int64_t rows, keys, width = 24, batch = 1;
  bool by_keys = false;  // the bias is [batch, 1, 1, keys], and sequences differ in it as rows do else
  double end = 0;        // the largest number of the bias; 0: the largest that is finite in its dtype
};

inline double largest(DType dtype) {
  if (dtype == DType::f16) return 65504.0;
  return dtype == DType::bf16 ? 3.3895313892515355e38 : std::numeric_limits<float>::max();
}

// Every eighth row (or sequence) is of one kind.
inline double bias_at(std::int64_t i, std::int64_t j, double end) {
  const double small = std::sin(static_cast<double>(3 * i + 7 * j));
  switch (i % 8) {
    case 0:  // no key is wanted, as of a row of padding
      return -end;
    case 1:  // one key outweighs all
      return j == 37 ? end : small;
    case 2:  // most keys are padding
      return j % 5 != 0 ? -end : small;
    case 3:  // two kinds of unwanted, one less so
      return j % 2 == 0 ? -end : -0.875 * end;
    case 4:  // everything as large as can be
      return end;
    case 5:  // from end to end
      return j % 3 == 0 ? end : -end;
    case 6:  // keys of the first blocks are unwanted, then one is there
      return j < 200 ? -end : small;
    default:
      return small;
  }
}

struct Call {
  HostTensor q, k, v, d_o, bias, sink;
  AttentionOptions options;

  // cache_dtype: of k and v.
  Call(const Size& size, DType dtype, DType bias_dtype, bool with_sink)
      : Call(size, dtype, bias_dtype, with_sink, dtype) {}
  Call(const Size& size, DType dtype, DType bias_dtype, bool with_sink, DType cache_dtype) {
    const std::int64_t heads = 2, width = size.width, batch = size.batch;
    const auto fill = [](HostTensor& x, double step, double most = 1) {
      for (std::int64_t n = 0; n < x.elements(); ++n) x.set(n, most * std::sin(static_cast<double>(n) * step));
    };
    q = HostTensor::input(dtype, {batch, size.rows, heads, width});
    k = HostTensor::input(cache_dtype, {batch, size.keys, 1, width});
    v = HostTensor::input(cache_dtype, {batch, size.keys, 1, width});
    d_o = HostTensor::input(dtype, {batch, size.rows, heads, width});
    fill(q, 0.37);
    fill(k, 0.73);
    fill(v, 0.19);
    fill(d_o, 0.51);
    bias = size.by_keys ? HostTensor::input(bias_dtype, {batch, 1, 1, size.keys})
                        : HostTensor::input(bias_dtype, {1, 1, size.rows, size.keys});
    // Where floats have places left beside the largest number, scores are so small that they vanish beside it anyway.
    if (size.end != 0) fill(q, 0.37, 1e-6);
    const double end = size.end != 0 ? std::min(size.end, largest(bias_dtype)) : largest(bias_dtype);
    for (std::int64_t n = 0; n < bias.elements(); ++n) bias.set(n, bias_at(n / size.keys, n % size.keys, end));
    options.bias = bias.view();
    if (with_sink) {
      sink = HostTensor::input(DType::f32, {heads});
      sink.set(0, 0.5);
      sink.set(1, -std::numeric_limits<float>::max());
      options.sink = sink.view();
    }
  }
};

// Attention over a cache in 4 bits, which is filled, and what doubles give.
struct Int4Call {
  Int4Case data;
  HostTensor bias, exact_o, exact_lse;

  Int4Call(std::int64_t rows, DType dtype, DType bias_dtype, double end) : data(spec_of(rows, dtype)) {
    data.fill_cache_on_cpu();
    // As in Call: the scores vanish beside that number anyway.
    for (std::int64_t n = 0; end == 1e9 && n < data.q.elements(); ++n) data.q.set(n, 1e-6 * data.q.get(n));
    const std::int64_t keys = data.spec.max_blocks * kInt4Keys + kInt4Tail - 1;
    bias = HostTensor::input(bias_dtype, {data.spec.B(), 1, rows, keys});
    for (std::int64_t n = 0; n < bias.elements(); ++n) {
      const std::int64_t b = n / (rows * keys), i = n / keys % rows;
      bias.set(n, bias_at(b + i, n % keys, std::min(end, largest(bias_dtype))));
    }
    exact_o = data.new_o(), exact_lse = data.new_lse();
    attend("reference", exact_o, exact_lse);
  }

  void attend(const char* candidate, HostTensor& o, HostTensor& lse) const {
    AttentionOptions options = data.options();
    options.bias = bias.view();
    options.force = candidate;
    WorkspaceBuffer buffer;
    Runtime runtime;
    runtime.workspace = buffer.get(attention_over_int4_cache_workspace(data.q.view(), data.cache(), options));
    attention_over_int4_cache(data.q.view(), data.cache(), o.view(), lse.view(), options, runtime);
  }

 private:
  static Int4Spec spec_of(std::int64_t rows, DType dtype) {
    Int4Spec spec{.name = "extreme_bias", .dtype = dtype, .H = 2, .Hkv = 1, .Sq = rows, .D = 64, .Dv = 64};
    spec.lengths = rows > 8 ? std::vector{300} : std::vector{700, 191, 600, 600, 600, 600, 600, 600};
    spec.max_blocks = 10;
    spec.causal = Causal::none;
    return spec;
  }
};

// Errors as a share of the largest value of the tensor, beside what float32 leaves of sums of terms near 1; NaN fails.
inline void expect_near(const HostTensor& got, const HostTensor& wanted, double tolerance, const std::string& what,
                        double of_terms = 1e-6) {
  const std::vector<double> x = got.values(), y = wanted.values();
  double most = 0;
  for (double value : y) most = std::max(most, std::abs(value));
  for (std::size_t n = 0; n < x.size(); ++n) {
    if (!(std::abs(x[n] - y[n]) <= tolerance * most + of_terms)) {
      ADD_FAILURE() << what << ", element " << n << ": " << x[n] << ", doubles give " << y[n];
      return;
    }
  }
}

inline void expect_lse(const HostTensor& got, const HostTensor& wanted, const std::string& what,
                       double tolerance = 2e-6) {
  const std::vector<double> x = got.values(), y = wanted.values();
  for (std::size_t n = 0; n < x.size(); ++n) {
    EXPECT_TRUE(x[n] == y[n] || std::abs(x[n] - y[n]) <= 1e-6 * std::abs(y[n]) + tolerance)
        << what << ", row " << n << ": " << x[n] << ", doubles give " << y[n];
  }
}

}  // namespace heddle::kit::extreme_bias
