// The values of a case's tensors, where values are meant to be read.
#include <cmath>
#include <limits>

#include "kit/case_maker.h"

namespace heddle::kit {
namespace {

using std::int64_t;

std::vector<int64_t> extents(const Extents& given, const AttentionProblem& p, int64_t columns) {
  return {given.batch ? p.B : 1, given.heads ? p.H : 1, given.rows ? p.Sq : 1, given.columns ? columns : 1};
}

// Of an element in a bias or mask with extents e; j: its column.
int64_t index(const std::vector<int64_t>& e, int64_t b, int64_t h, int64_t i, int64_t j) {
  return ((b % e[0] * e[1] + h % e[1]) * e[2] + i % e[2]) * e[3] + j % e[3];
}

}  // namespace

// Rows 3, 10, 17, ... are `outlier` times as large: their softmax is peaked.
void CaseData::Maker::fill_rows(const AttentionProblem& p, HostTensor& x, int64_t width, double size, double outlier) {
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

void CaseData::Maker::fill_keys(const AttentionProblem& p, HostTensor& x, int64_t width, double size, double outlier,
                                double offset) {
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
        const double mean = n % 3 == 1 ? -offset : offset;
        x.set(row * p.Hkv * width + n, normal() * size * (j % 13 == 6 ? outlier : 1) + mean);
      }
    }
  }
}

void CaseData::Maker::make_d_lse(const AttentionProblem& p) {
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

void CaseData::Maker::make_heads() {
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
void CaseData::Maker::make_draft_mask() {
  data_.draft_mask = HostTensor::input(DType::i32, {c_.B, c_.Sq});
  for (int64_t n = 0; n < c_.B * c_.Sq; ++n) {
    const int64_t row = n % c_.Sq, before = uniform(0, (int64_t{1} << row) - 1);
    const auto bits = static_cast<std::uint32_t>(row % 5 == 4 ? 0 : before | int64_t{1} << row);
    data_.draft_mask.set(n, static_cast<std::int32_t>(bits));
  }
}

void CaseData::Maker::make_mask(const AttentionProblem& p) {
  const std::vector<int64_t> shape = extents(c_.mask, p, c_.columns());
  data_.mask = HostTensor::input(DType::boolean, shape);
  for (int64_t n = 0; n < data_.mask.elements(); ++n) {
    const int64_t row = n / shape[3] % shape[2];
    const bool empty_row = c_.mask_empty || (c_.mask.rows && row % 6 == 4);
    data_.mask.set(n, !empty_row && uniform(0, 9) < 7);
  }
}

// Entries that only pairs outside the sequences, the causal range, the window or the mask would read stay NaN.
void CaseData::Maker::make_bias(const AttentionProblem& p) {
  const std::vector<int64_t> shape = extents(c_.bias, p, c_.columns());
  data_.bias = HostTensor::input(c_.bias_f32 || c_.dtype == DType::f8e4m3 ? DType::f32 : c_.dtype, shape, c_.layout_q);
  std::vector<bool> read(data_.bias.elements());
  const std::vector<int64_t> mask_shape = extents(c_.mask, p, c_.columns());
  for (int64_t b = 0; b < p.B; ++b) {
    const Sequence s = p.sequence(b);
    for (int64_t h = 0; h < p.H; ++h) {
      for (int64_t i = 0; i < s.sq; ++i) {
        const auto range = p.band(s).keys_of(i);
        for (int64_t j = range.begin; j < range.end; ++j) {
          if (!c_.mask.given || data_.mask.get(index(mask_shape, b, h, i, s.key_offset + j)) != 0) {
            read[index(shape, b, h, i, s.key_offset + j)] = true;
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
void CaseData::Maker::poison_unattended(const AttentionProblem& p) {
  const std::vector<int64_t> bias_shape = extents(c_.bias, p, c_.columns()),
                             mask_shape = extents(c_.mask, p, c_.columns());
  std::vector<bool> rows(p.B * p.Sq * p.H), keys(p.B * p.Sk * p.Hkv);
  for (int64_t b = 0; b < p.B; ++b) {
    const Sequence s = p.sequence(b);
    for (int64_t h = 0; h < p.H; ++h) {
      for (int64_t i = 0; i < s.sq; ++i) {
        const auto range = p.band(s).keys_of(i);
        for (int64_t j = range.begin; j < range.end; ++j) {
          if (c_.mask.given && data_.mask.get(index(mask_shape, b, h, i, s.key_offset + j)) == 0) continue;
          if (c_.bias.given && std::isinf(data_.bias.get(index(bias_shape, b, h, i, s.key_offset + j)))) continue;
          rows[(b * p.Sq + i) * p.H + h] = keys[(b * p.Sk + s.k_begin + j) * p.Hkv + h / p.G] = true;
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
    if (data_.d_o.given()) poison(data_.d_o, rows, p.Dv);
  }
  if (c_.poison_keys) {
    poison(data_.k, keys, p.D);
    poison(data_.v, keys, p.Dv);
  }
}

}  // namespace heddle::kit
