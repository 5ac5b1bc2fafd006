#include "kit/case_data.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "core/check.h"
#include "ops/attention_arguments.h"

namespace heddle::kit {
namespace {

using std::int64_t;

constexpr int64_t kSparePages = 3;
constexpr int64_t kSpareCacheRows = 2;
constexpr double kGarbageIndex = 0x7FFFFFF0;  // in index slots that nothing may read

std::vector<int64_t> extents(const Extents& given, const AttentionProblem& p) {
  return {given.batch ? p.B : 1, given.heads ? p.H : 1, given.rows ? p.Sq : 1, given.columns ? p.Sk : 1};
}

HostTensor indices(const std::vector<int64_t>& values) {
  HostTensor out = HostTensor::input(DType::i32, {static_cast<int64_t>(values.size())});
  for (std::size_t n = 0; n < values.size(); ++n) out.set(static_cast<int64_t>(n), static_cast<double>(values[n]));
  return out;
}

}  // namespace

class CaseData::Maker {
 public:
  Maker(CaseData& data, std::uint64_t seed) : data_(data), c_(data.spec), random_(seed * 7919 + 17) {}

  void make() {
    const std::vector<int64_t> q_lengths = lengths(c_.packed_q, c_.Sq), k_lengths = lengths(c_.packed_k, c_.Sk);
    if (c_.packed_q) data_.cu_seqlens_q = indices(cumulative(q_lengths));
    if (c_.packed_k) data_.cu_seqlens_k = indices(cumulative(k_lengths));
    if (c_.seqused_q) data_.seqused_q = indices(used(q_lengths));
    const std::vector<int64_t> k_used = c_.seqused_k ? used(k_lengths) : k_lengths;
    if (c_.seqused_k) data_.seqused_k = indices(k_used);
    if (c_.leftpad) data_.leftpad = indices(left_padding(k_used));

    const int64_t q_total = std::accumulate(q_lengths.begin(), q_lengths.end(), int64_t{0});
    const int64_t k_total = std::accumulate(k_lengths.begin(), k_lengths.end(), int64_t{0});
    data_.q = rows(c_.dtype, c_.packed_q, q_total, c_.Sq, c_.H, c_.D, c_.layout_q);
    make_keys(k_total, k_used);
    if (c_.scaling != Scaling::none) {
      if (c_.dtype == DType::f8e4m3) data_.q_scale = scales(data_.q, c_.packed_q);
      data_.k_scale = scales(data_.k, c_.packed_k);
      data_.v_scale = scales(data_.v, c_.packed_k);
    }
    AttentionProblem p = data_.problem();
    fill_rows(p, data_.q, c_.D, c_.values == Values::large_logits ? 10 : 1, 4);
    fill_keys(p, data_.k, c_.D, c_.values == Values::large_logits ? 10 : 1, 3);
    fill_keys(p, data_.v, c_.Dv, 1, 8);
    if (c_.has_backward()) {
      data_.d_o = rows(c_.dtype, c_.packed_q, q_total, c_.Sq, c_.H, c_.Dv, c_.layout_o);
      fill_rows(p, data_.d_o, c_.Dv, 1, 2);
      if (c_.d_lse) make_d_lse(p);
    }
    make_heads();
    if (c_.draft_mask) make_draft_mask();
    if (c_.mask.given) make_mask(p);
    if (c_.bias.given) make_bias(p);
    if (c_.poison_keys || c_.poison_rows) poison_unattended(data_.problem());
  }

 private:
  double normal() { return normal_(random_); }
  int64_t uniform(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random_); }

  // The first sequence is the longest, the second is empty if there are enough, the others are random.
  std::vector<int64_t> lengths(bool packed, int64_t longest) {
    std::vector<int64_t> out(c_.B, longest);
    for (int64_t b = 1; packed && b < c_.B; ++b) out[b] = b == 1 && c_.B >= 4 ? 0 : uniform(0, longest);
    return out;
  }

  std::vector<int64_t> used(const std::vector<int64_t>& lengths) {
    std::vector<int64_t> out;
    for (std::size_t b = 0; b < lengths.size(); ++b) {
      out.push_back(b == 0 ? std::max<int64_t>(lengths[b] - 1, 0) : b == 2 ? 0 : uniform(0, lengths[b]));
    }
    return out;
  }

  std::vector<int64_t> left_padding(const std::vector<int64_t>& lengths) {
    std::vector<int64_t> out;
    for (std::size_t b = 0; b < lengths.size(); ++b) out.push_back(b == 1 ? lengths[b] : uniform(0, lengths[b] / 2));
    return out;
  }

  static std::vector<int64_t> cumulative(const std::vector<int64_t>& lengths) {
    std::vector<int64_t> out = {0};
    for (int64_t length : lengths) out.push_back(out.back() + length);
    return out;
  }

  HostTensor rows(DType dtype, bool packed, int64_t total, int64_t longest, int64_t heads, int64_t width,
                  Layout layout) {
    if (packed) return HostTensor::input(dtype, {total, heads, width}, layout);
    return HostTensor::input(dtype, {c_.B, longest, heads, width}, layout);
  }

  // From 0.5 to 2, so that a forgotten or a misplaced one shows. Rows that hold nothing have a scale too.
  HostTensor scales(const HostTensor& data, bool packed) {
    const TensorView& view = data.view();
    std::vector<int64_t> shape(view.shape.begin(), view.shape.begin() + view.rank - 1);
    if (c_.scaling != Scaling::rows) shape[packed ? 0 : 1] = 1;
    if (c_.scaling == Scaling::one) std::fill(shape.begin(), shape.end(), 1);
    HostTensor out = HostTensor::input(DType::f32, shape);
    for (int64_t n = 0; n < out.elements(); ++n) out.set(n, std::exp2(static_cast<double>(uniform(-8, 8)) / 8));
    return out;
  }

  void make_keys(int64_t total, const std::vector<int64_t>& used) {
    if (c_.page_size > 0) {
      make_pages(used);
    } else if (c_.cache_batch_idx) {
      const int64_t cache_rows = c_.B + kSpareCacheRows;
      std::vector<int64_t> row_of(c_.B);
      for (int64_t& row : row_of) row = uniform(0, cache_rows - 1);  // two sequences may read one row
      data_.cache_batch_idx = indices(row_of);
      data_.k = HostTensor::input(c_.k_dtype(), {cache_rows, c_.Sk, c_.Hkv, c_.D}, c_.layout_k);
      data_.v = HostTensor::input(c_.k_dtype(), {cache_rows, c_.Sk, c_.Hkv, c_.Dv}, c_.layout_k);
    } else {
      data_.k = rows(c_.k_dtype(), c_.packed_k, total, c_.Sk, c_.Hkv, c_.D, c_.layout_k);
      data_.v = rows(c_.k_dtype(), c_.packed_k, total, c_.Sk, c_.Hkv, c_.Dv, c_.layout_k);
    }
  }

  // Pages in random order, some of them used by nobody; table entries behind the used ones are no page numbers.
  void make_pages(const std::vector<int64_t>& used) {
    const int64_t columns = (c_.Sk + c_.page_size - 1) / c_.page_size;
    const int64_t pages = c_.B * columns + kSparePages;
    std::vector<int64_t> order(pages);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random_);
    data_.page_table = HostTensor::input(DType::i32, {c_.B, columns});
    for (int64_t n = 0; n < c_.B * columns; ++n) {
      const bool in_use = n % columns * c_.page_size < used[n / columns];
      data_.page_table.set(n, in_use ? static_cast<double>(order[n]) : kGarbageIndex);
    }
    data_.k = HostTensor::input(c_.k_dtype(), {pages, c_.page_size, c_.Hkv, c_.D}, c_.layout_k);
    data_.v = HostTensor::input(c_.k_dtype(), {pages, c_.page_size, c_.Hkv, c_.Dv}, c_.layout_k);
  }

  // Rows 3, 10, 17, ... are `outlier` times as large: their softmax is peaked.
  void fill_rows(const AttentionProblem& p, HostTensor& x, int64_t width, double size, double outlier) {
    for (int64_t b = 0; b < p.B; ++b) {
      const Sequence s = p.sequence(b);
      for (int64_t i = 0; i < s.sq; ++i) {
        const int64_t row = p.cu_seqlens_q ? s.q_begin + i : b * p.Sq + i;
        for (int64_t n = 0; n < p.H * width; ++n) {
          x.set(row * p.H * width + n, normal() * size * (i % 7 == 3 ? outlier : 1));
        }
      }
    }
  }

  void fill_keys(const AttentionProblem& p, HostTensor& x, int64_t width, double size, double outlier) {
    for (int64_t b = 0; b < p.B; ++b) {
      const Sequence s = p.sequence(b);
      for (int64_t j = 0; j < s.sk; ++j) {
        const int64_t slot = s.k_begin + j;
        int64_t row = slot;
        if (p.page_table) {
          row = p.page_table[b * p.page_table_stride + slot / p.page_size] * p.page_size + slot % p.page_size;
        } else if (!p.cu_seqlens_k) {
          row = (p.cache_batch_idx ? p.cache_batch_idx[b] : b) * p.Sk + slot;
        }
        for (int64_t n = 0; n < p.Hkv * width; ++n) {
          x.set(row * p.Hkv * width + n, normal() * size * (j % 13 == 6 ? outlier : 1));
        }
      }
    }
  }

  void make_d_lse(const AttentionProblem& p) {
    data_.d_lse = data_.new_lse();
    for (int64_t b = 0; b < p.B; ++b) {
      const Sequence s = p.sequence(b);
      for (int64_t h = 0; h < p.H; ++h) {
        for (int64_t i = 0; i < s.sq; ++i) {
          const int64_t total = p.cu_seqlens_q ? p.cu_seqlens_q[p.B] : 0;
          data_.d_lse.set(p.cu_seqlens_q ? h * total + s.q_begin + i : (b * p.H + h) * p.Sq + i, normal());
        }
      }
    }
  }

  void make_heads() {
    if (c_.alibi != Alibi::none) {
      const int64_t rows = c_.alibi == Alibi::per_batch ? c_.B : 1;
      data_.alibi = c_.alibi == Alibi::per_batch ? HostTensor::input(DType::f32, {rows, c_.H}, Layout::padded_rows)
                                                 : HostTensor::input(DType::f32, {c_.H});
      for (int64_t n = 0; n < rows * c_.H; ++n) {
        data_.alibi.set(n, std::exp2(-4.0 * static_cast<double>(n % c_.H + 1) / c_.H) * (1 + 0.3 * (n / c_.H)));
      }
    }
    if (c_.sink) {
      data_.sink = HostTensor::input(DType::f32, {c_.H});
      for (int64_t h = 0; h < c_.H; ++h) data_.sink.set(h, normal() + 1);
    }
  }

  // A tree of drafts: each row sees itself and some of those before it; every fifth row sees no draft at all.
  void make_draft_mask() {
    data_.draft_mask = HostTensor::input(DType::i32, {c_.B, c_.Sq});
    for (int64_t n = 0; n < c_.B * c_.Sq; ++n) {
      const int64_t row = n % c_.Sq, before = uniform(0, (int64_t{1} << row) - 1);
      const auto bits = static_cast<std::uint32_t>(row % 5 == 4 ? 0 : before | int64_t{1} << row);
      data_.draft_mask.set(n, static_cast<std::int32_t>(bits));
    }
  }

  void make_mask(const AttentionProblem& p) {
    const std::vector<int64_t> shape = extents(c_.mask, p);
    data_.mask = HostTensor::input(DType::boolean, shape);
    for (int64_t n = 0; n < data_.mask.elements(); ++n) {
      const int64_t row = n / shape[3] % shape[2];
      const bool empty_row = c_.mask_empty || (c_.mask.rows && row % 6 == 4);
      data_.mask.set(n, !empty_row && uniform(0, 9) < 7);
    }
  }

  // Entries that only pairs outside the sequences, the causal range, the window or the mask would read stay NaN.
  void make_bias(const AttentionProblem& p) {
    const std::vector<int64_t> shape = extents(c_.bias, p);
    data_.bias =
        HostTensor::input(c_.bias_f32 || c_.dtype == DType::f8e4m3 ? DType::f32 : c_.dtype, shape, c_.layout_q);
    std::vector<bool> read(data_.bias.elements());
    const auto index = [](const std::vector<int64_t>& s, int64_t b, int64_t h, int64_t i, int64_t j) {
      return ((b % s[0] * s[1] + h % s[1]) * s[2] + i % s[2]) * s[3] + j % s[3];
    };
    const std::vector<int64_t> mask_shape = extents(c_.mask, p);
    for (int64_t b = 0; b < p.B; ++b) {
      const Sequence s = p.sequence(b);
      for (int64_t h = 0; h < p.H; ++h) {
        for (int64_t i = 0; i < s.sq; ++i) {
          const auto range = p.key_range(s, i);
          for (int64_t j = range.begin; j < range.end; ++j) {
            if (!c_.mask.given || data_.mask.get(index(mask_shape, b, h, i, j)) != 0) {
              read[index(shape, b, h, i, j)] = true;
            }
          }
        }
      }
    }
    for (int64_t n = 0; n < data_.bias.elements(); ++n) {
      const bool hole = c_.bias_holes && (uniform(0, 9) == 0 || (c_.bias.rows && n / shape[3] % shape[2] % 5 == 2));
      const double value = normal();
      if (read[n]) data_.bias.set(n, hole ? -std::numeric_limits<double>::infinity() : value);
    }
  }

  // Batched, contiguous cases only.
  void poison_unattended(const AttentionProblem& p) {
    const auto index = [](const std::vector<int64_t>& s, int64_t b, int64_t h, int64_t i, int64_t j) {
      return ((b % s[0] * s[1] + h % s[1]) * s[2] + i % s[2]) * s[3] + j % s[3];
    };
    const std::vector<int64_t> bias_shape = extents(c_.bias, p), mask_shape = extents(c_.mask, p);
    std::vector<bool> rows(p.B * p.Sq * p.H), keys(p.B * p.Sk * p.Hkv);
    for (int64_t b = 0; b < p.B; ++b) {
      const Sequence s = p.sequence(b);
      for (int64_t h = 0; h < p.H; ++h) {
        for (int64_t i = 0; i < s.sq; ++i) {
          const auto range = p.key_range(s, i);
          for (int64_t j = range.begin; j < range.end; ++j) {
            if (c_.mask.given && data_.mask.get(index(mask_shape, b, h, i, j)) == 0) continue;
            if (c_.bias.given && std::isinf(data_.bias.get(index(bias_shape, b, h, i, j)))) continue;
            rows[(b * p.Sq + i) * p.H + h] = keys[(b * p.Sk + j) * p.Hkv + h / p.G] = true;
          }
        }
      }
    }
    const auto poison = [](HostTensor& x, const std::vector<bool>& attended, int64_t width) {
      for (int64_t n = 0; n < x.elements(); ++n) {
        if (!attended[n / width]) x.set(n, std::nan(""));
      }
    };
    if (c_.poison_rows) {
      poison(data_.q, rows, p.D);
      poison(data_.d_o, rows, p.Dv);
    }
    if (c_.poison_keys) {
      poison(data_.k, keys, p.D);
      poison(data_.v, keys, p.Dv);
    }
  }

  CaseData& data_;
  const AttentionCase& c_;
  std::mt19937_64 random_;
  std::normal_distribution<double> normal_;
};

CaseData::CaseData(const AttentionCase& c, std::uint64_t seed) : spec(c) { Maker(*this, seed).make(); }

AttentionOptions CaseData::options() const {
  AttentionOptions out;
  out.scale = spec.scale;
  out.causal = spec.causal;
  out.window_left = spec.window_left;
  out.window_right = spec.window_right;
  out.softcap = spec.softcap;
  out.alibi_slopes = alibi.view();
  out.bias = bias.view();
  out.mask = mask.view();
  out.sink = sink.view();
  out.dropout = {spec.dropout, 0x1234567890ABCDEFu, 42};
  out.cu_seqlens_q = cu_seqlens_q.view();
  out.cu_seqlens_k = cu_seqlens_k.view();
  out.seqused_q = seqused_q.view();
  out.seqused_k = seqused_k.view();
  out.page_table = page_table.view();
  out.cache_batch_idx = cache_batch_idx.view();
  out.cache_leftpad = leftpad.view();
  out.precision = spec.precision;
  out.draft_mask = draft_mask.view();
  out.q_scale = q_scale.view();
  out.k_scale = k_scale.view();
  out.v_scale = v_scale.view();
  return out;
}

HostTensor CaseData::new_o() const {
  const auto& shape = q.view().shape;
  if (spec.packed_q) return HostTensor::output(spec.o_dtype(), {shape[0], spec.H, spec.Dv}, spec.layout_o);
  return HostTensor::output(spec.o_dtype(), {spec.B, spec.Sq, spec.H, spec.Dv}, spec.layout_o);
}

HostTensor CaseData::new_lse() const {
  const Layout layout = spec.layout_o == Layout::padded_rows ? Layout::padded_rows : Layout::contiguous;
  if (spec.packed_q) return HostTensor::output(DType::f32, {spec.H, q.view().shape[0]}, layout);
  return HostTensor::output(DType::f32, {spec.B, spec.H, spec.Sq}, layout);
}

Gradients CaseData::new_gradients() const {
  const auto like = [&](const HostTensor& x, Layout layout) {
    const TensorView& view = x.view();
    if (!view.given()) return HostTensor();
    return HostTensor::output(view.dtype, {view.shape.begin(), view.shape.begin() + view.rank}, layout);
  };
  return {like(q, spec.layout_o), like(k, spec.layout_o), like(v, spec.layout_o), like(bias, spec.layout_o),
          like(sink, Layout::contiguous)};
}

AttentionProblem CaseData::problem() const {
  return checked_forward_problem(Check("attention_forward"), q.view(), k.view(), v.view(), {}, {}, options());
}

AttentionBackwardProblem CaseData::backward_problem(const Gradients& gradients) const {
  return checked_backward_problem(Check("attention_backward"), q.view(), k.view(), v.view(), {}, {}, d_o.view(),
                                  d_lse.view(), gradients.views(), options());
}

std::string CaseData::describe() const {
  const char* causal[] = {"none", "top_left", "bottom_right"};
  std::string out = text(spec.name, ": q ", q.view(), ", k ", k.view(), ", v ", v.view(), ", ",
                         heddle::name_of(spec.dtype), ", causal ", causal[static_cast<int>(spec.causal)]);
  if (spec.window_left >= 0 || spec.window_right >= 0) {
    out += text(", window (", spec.window_left, ", ", spec.window_right, ")");
  }
  if (spec.softcap > 0) out += text(", softcap ", spec.softcap);
  if (spec.dropout > 0) out += text(", dropout ", spec.dropout);
  const std::pair<const char*, const HostTensor*> tensors[] = {{"alibi", &alibi},
                                                               {"bias", &bias},
                                                               {"mask", &mask},
                                                               {"sink", &sink},
                                                               {"cu_seqlens_q", &cu_seqlens_q},
                                                               {"cu_seqlens_k", &cu_seqlens_k},
                                                               {"seqused_q", &seqused_q},
                                                               {"seqused_k", &seqused_k},
                                                               {"page_table", &page_table},
                                                               {"cache_batch_idx", &cache_batch_idx},
                                                               {"leftpad", &leftpad},
                                                               {"draft_mask", &draft_mask},
                                                               {"q_scale", &q_scale},
                                                               {"k_scale", &k_scale},
                                                               {"v_scale", &v_scale}};
  for (const auto& [name, tensor] : tensors) {
    if (tensor->given()) out += text(", ", name, " ", tensor->view());
  }
  return out;
}

}  // namespace heddle::kit
