#include "kit/block_lists.h"

#include <random>
#include <vector>

namespace heddle::kit {
namespace {

std::int64_t ceil_div(std::int64_t x, std::int64_t y) { return (x + y - 1) / y; }

std::int64_t lists_of(const CaseData& data, std::int64_t query_rows) {
  if (!data.spec.packed_q) return ceil_div(data.spec.Sq, query_rows);
  const std::int64_t total = data.q.view().shape[0];
  return query_rows == 1 ? total : total / query_rows + data.spec.B;
}

}  // namespace

CaseLists::CaseLists(const CaseData& data, const ListShape& shape, std::uint64_t seed) {
  const AttentionCase& spec = data.spec;
  const std::int64_t n = lists_of(data, shape.query_rows);
  std::vector<std::int64_t> extents{n, shape.units};
  if (!spec.packed_q) extents.insert(extents.begin(), spec.B);
  if (shape.counts) counts = HostTensor::input(DType::i32, extents);
  extents.push_back(shape.entries);
  blocks = HostTensor::input(DType::i32, extents);
  std::mt19937_64 random(seed);
  const std::int64_t there = ceil_div(spec.Sk, shape.block_size);
  for (std::int64_t k = 0; k < blocks.elements(); ++k) {
    const auto block = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(there + 3)) - 1;
    const bool again = k % shape.entries > 0 && random() % 5 == 0;
    blocks.set(k, again ? blocks.get(k - 1) : static_cast<double>(block));
  }
  for (std::int64_t k = 0; shape.counts && k < counts.elements(); ++k) {
    counts.set(k, static_cast<double>(random() % static_cast<std::uint64_t>(shape.entries + 4)) - 2);
  }
  const std::int64_t words = ceil_div(shape.block_size, 32);
  if (shape.masks > 0) {
    masks = HostTensor::input(DType::i32, {shape.masks, shape.query_rows, words});
    mask_ids = HostTensor::input(DType::i32, extents);
  }
  for (std::int64_t k = 0; k < masks.elements(); ++k) {
    const std::int64_t mask = k / (shape.query_rows * words);
    const auto drawn = static_cast<std::int32_t>(random());
    masks.set(k, mask == 0 ? 0 : mask == 1 ? -1 : drawn);
  }
  constexpr std::int32_t kNone[] = {-2, -2147483647 - 1, 2147483647};
  for (std::int64_t k = 0; shape.masks > 0 && k < mask_ids.elements(); ++k) {
    const auto id = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(shape.masks + 3)) - 1;
    mask_ids.set(k, id > shape.masks ? kNone[k % 3] : static_cast<double>(id));
  }
  views = {.blocks = blocks.view(),
           .counts = counts.view(),
           .offsets = {},
           .block_size = shape.block_size,
           .query_rows = shape.query_rows,
           .masks = masks.view(),
           .mask_ids = mask_ids.view()};
}

bool CaseLists::holds(const CaseData& data, std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
  const AttentionCase& spec = data.spec;
  const bool packed = spec.packed_q;
  const TensorView& view = blocks.view();
  const std::int64_t units = view.shape[packed ? 1 : 2], entries = view.shape[packed ? 2 : 3];
  const std::int64_t unit = units == spec.H ? h : units == 1 ? 0 : h / (spec.H / spec.Hkv);
  std::int64_t list = i / views.query_rows;
  if (packed) {
    const auto begin = static_cast<std::int64_t>(data.cu_seqlens_q.get(b));
    list += views.query_rows == 1 ? begin : begin / views.query_rows + b;
  } else {
    list += b * view.shape[1];
  }
  const std::int64_t at = list * units + unit;
  const double count = counts.given() ? counts.get(at) : static_cast<double>(entries);
  for (std::int64_t n = 0; n < entries && static_cast<double>(n) < count; ++n) {
    if (blocks.get(at * entries + n) != static_cast<double>(j / views.block_size)) continue;
    const double id = masks.given() ? mask_ids.get(at * entries + n) : -1;
    if (id < 0 || id >= static_cast<double>(masks.view().shape[0])) return id == -1;
    const std::int64_t word =
        (static_cast<std::int64_t>(id) * views.query_rows + i % views.query_rows) * ceil_div(views.block_size, 32) +
        j % views.block_size / 32;
    return (static_cast<std::int64_t>(masks.get(word)) >> (j % views.block_size % 32) & 1) != 0;
  }
  return false;
}

void CaseLists::write_mask(CaseData& data) const {
  const AttentionCase& spec = data.spec;
  std::int64_t at = 0;
  for (std::int64_t b = 0; b < spec.B; ++b) {
    // Columns of a piece are those of the longer problem.
    const auto first = spec.key_offset ? static_cast<std::int64_t>(data.key_offset.get(b)) : 0;
    // Rows behind a packed sequence's end have no list.
    const std::int64_t rows =
        spec.packed_q ? static_cast<std::int64_t>(data.cu_seqlens_q.get(b + 1) - data.cu_seqlens_q.get(b)) : spec.Sq;
    for (std::int64_t h = 0; h < spec.H; ++h) {
      for (std::int64_t i = 0; i < spec.Sq; ++i) {
        for (std::int64_t column = 0; column < spec.columns(); ++column) {
          const std::int64_t j = column - first;
          data.mask.set(at++, i < rows && j >= 0 && j < spec.Sk && holds(data, b, h, i, j) ? 1 : 0);
        }
      }
    }
  }
}

CsrLists::CsrLists(const CaseLists& lists) {
  const TensorView& padded = lists.blocks.view();
  const int n = padded.rank - 3;  // the extent of lists
  const std::int64_t batches = n == 0 ? 1 : padded.shape[0], count = padded.shape[n], units = padded.shape[n + 1],
                     entries = padded.shape[n + 2];
  std::vector<std::int64_t> extents{units, count + 1};
  if (n == 1) extents.insert(extents.begin(), batches);
  offsets = HostTensor::input(DType::i32, extents);
  std::vector<double> all, ids;
  std::int64_t at = 0;
  for (std::int64_t b = 0; b < batches; ++b) {
    for (std::int64_t l = 0; l < units; ++l) {
      for (std::int64_t k = 0; k < count; ++k) {
        const std::int64_t list = (b * count + k) * units + l;
        offsets.set(at++, static_cast<double>(all.size()));
        const double length = lists.counts.given() ? lists.counts.get(list) : static_cast<double>(entries);
        for (std::int64_t e = 0; e < entries && static_cast<double>(e) < length; ++e) {
          all.push_back(lists.blocks.get(list * entries + e));
          if (lists.masks.given()) ids.push_back(lists.mask_ids.get(list * entries + e));
        }
      }
      offsets.set(at++, static_cast<double>(all.size()));
    }
  }
  blocks = HostTensor::input(DType::i32, {static_cast<std::int64_t>(all.size())});
  for (std::size_t k = 0; k < all.size(); ++k) blocks.set(static_cast<std::int64_t>(k), all[k]);
  if (lists.masks.given()) mask_ids = HostTensor::input(DType::i32, {static_cast<std::int64_t>(ids.size())});
  for (std::size_t k = 0; k < ids.size(); ++k) mask_ids.set(static_cast<std::int64_t>(k), ids[k]);
  views = lists.views;
  views.blocks = blocks.view();
  views.counts = {};
  views.offsets = offsets.view();
  views.mask_ids = mask_ids.view();
}

}  // namespace heddle::kit
