// The steps, and the tensors by their shapes: lengths, packed rows, pages and rows of a cache.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "kit/case_maker.h"
#include "kit/indices.h"

namespace heddle::kit {
namespace {

using std::int64_t;

constexpr int64_t kSparePages = 3;
constexpr int64_t kSpareCacheRows = 2;
constexpr double kGarbageIndex = 0x7FFFFFF0;  // in index slots that nothing may read

}  // namespace

void CaseData::Maker::make() {
  const std::vector<int64_t> q_lengths = lengths(c_.packed_q, c_.Sq), k_lengths = lengths(c_.packed_k, c_.Sk);
  if (c_.packed_q) data_.cu_seqlens_q = indices(cumulative(q_lengths));
  if (c_.packed_k) data_.cu_seqlens_k = indices(cumulative(k_lengths));
  if (c_.seqused_q) data_.seqused_q = indices(used(q_lengths));
  const std::vector<int64_t> k_used = c_.seqused_k ? used(k_lengths) : k_lengths;
  if (c_.seqused_k) data_.seqused_k = indices(k_used);
  if (c_.leftpad) data_.leftpad = indices(left_padding(k_used));
  if (c_.q_offset) data_.q_offset = indices(offsets());
  if (c_.key_offset) {
    data_.key_offset = indices(c_.key_step > 1 ? std::vector<int64_t>(c_.B, c_.key_step - 1) : offsets());
  }

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
  // Products of 11 bits, or of codes of 8, leave nothing of scores in the hundreds.
  const double large = c_.precision == Precision::f32 ? 10 : 2, size = c_.values == Values::large_logits ? large : 1;
  fill_rows(p, data_.q, c_.D, size, 4);
  fill_keys(p, data_.k, c_.D, size, 3, c_.values == Values::far_keys ? 60 : 0);
  fill_keys(p, data_.v, c_.Dv, 1, 8);
  if (c_.has_backward()) {
    data_.d_o = rows(c_.float32_out ? DType::f32 : c_.dtype, c_.packed_q, q_total, c_.Sq, c_.H, c_.Dv, c_.layout_o);
    fill_rows(p, data_.d_o, c_.Dv, 1, 2);
    if (c_.d_lse) make_d_lse(p);
  }
  make_heads();
  if (c_.draft_mask) make_draft_mask();
  if (c_.mask.given) make_mask(p);
  if (c_.bias.given) make_bias(p);
  if (c_.poison_keys || c_.poison_rows) poison_unattended(data_.problem());
}

// The first sequence is the longest, the second is empty if there are enough, the others are random.
std::vector<int64_t> CaseData::Maker::lengths(bool packed, int64_t longest) {
  std::vector<int64_t> out(c_.B, longest);
  for (int64_t b = 1; packed && b < c_.B; ++b) out[b] = b == 1 && c_.B >= 4 ? 0 : uniform(0, longest);
  return out;
}

std::vector<int64_t> CaseData::Maker::used(const std::vector<int64_t>& lengths) {
  std::vector<int64_t> out;
  for (std::size_t b = 0; b < lengths.size(); ++b) {
    out.push_back(b == 0 ? std::max<int64_t>(lengths[b] - 1, 0) : b == 2 ? 0 : uniform(0, lengths[b]));
  }
  return out;
}

std::vector<int64_t> CaseData::Maker::left_padding(const std::vector<int64_t>& lengths) {
  std::vector<int64_t> out;
  for (std::size_t b = 0; b < lengths.size(); ++b) out.push_back(b == 1 ? lengths[b] : uniform(0, lengths[b] / 2));
  return out;
}

// Rows and keys so stand about the same places; the first sequence's are as far from 0 as any.
std::vector<int64_t> CaseData::Maker::offsets() {
  std::vector<int64_t> out;
  for (int64_t b = 0; b < c_.B; ++b) out.push_back(b == 0 ? c_.kMostOffset : uniform(0, c_.kMostOffset));
  return out;
}

std::vector<int64_t> CaseData::Maker::cumulative(const std::vector<int64_t>& lengths) {
  std::vector<int64_t> out = {0};
  for (int64_t length : lengths) out.push_back(out.back() + length);
  return out;
}

HostTensor CaseData::Maker::rows(DType dtype, bool packed, int64_t total, int64_t longest, int64_t heads, int64_t width,
                                 Layout layout) {
  if (packed) return HostTensor::input(dtype, {total, heads, width}, layout);
  return HostTensor::input(dtype, {c_.B, longest, heads, width}, layout);
}

// From 0.5 to 2, so that a forgotten or a misplaced one shows. Rows that hold nothing have a scale too.
HostTensor CaseData::Maker::scales(const HostTensor& data, bool packed) {
  const TensorView& view = data.view();
  std::vector<int64_t> shape(view.shape.begin(), view.shape.begin() + view.rank - 1);
  if (c_.scaling != Scaling::rows) shape[packed ? 0 : 1] = 1;
  if (c_.scaling == Scaling::one) std::fill(shape.begin(), shape.end(), 1);
  HostTensor out = HostTensor::input(DType::f32, shape);
  for (int64_t n = 0; n < out.elements(); ++n) out.set(n, std::exp2(static_cast<double>(uniform(-8, 8)) / 8));
  return out;
}

void CaseData::Maker::make_keys(int64_t total, const std::vector<int64_t>& used) {
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
void CaseData::Maker::make_pages(const std::vector<int64_t>& used) {
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

}  // namespace heddle::kit
