#include "cpu/linear_staging.h"

#include <algorithm>
#include <cstring>

#include "core/parallel.h"
#include "cpu/kernels.h"
#include "lowbit/formats.h"
#include "lowbit/int8_rows.h"

namespace heddle::cpu {
namespace {

// Rows of x that no product of f32 or of bytes reads beyond, whatever its register tile.
constexpr std::int64_t kRowStep = 8;
// Elements of x below which handing its rows out costs more than widening them, and normalising them.
constexpr std::int64_t kTaskElements = std::int64_t{1} << 15, kNormElements = std::int64_t{1} << 13;

// Bytes of one row of x, widened, or of bf16 as it is, up to whole steps of columns.
std::size_t row_bytes(const LinearProblem& p, bool pairs) {
  return static_cast<std::size_t>(p.panels().layout.columns) * (pairs ? 2 : 4);
}

std::int64_t row_step(const LinearProblem& p) {
  return in_pairs(p) ? std::max<std::int64_t>(kernels().bf16_rows, kRowStep) : kRowStep;
}

}  // namespace

bool in_pairs(const LinearProblem& p) {
  return kernels().bf16_pairs && p.dtype == DType::bf16 && !p.batch_invariant && !p.int8_x && p.M > kLinearFewRows;
}

StagedRows::StagedRows(const LinearProblem& p, std::byte* at) {
  const lowbit::PanelLayout& l = p.panels().layout;
  const std::int64_t count = round_up(std::min(p.M, kLinearChunk), row_step(p));
  std::int64_t end = 0;
  const auto take = [&](std::int64_t size) {
    std::byte* here = at == nullptr ? nullptr : at + end;
    end += round_up(size, 64);
    return here;
  };
  rows = take(count * static_cast<std::int64_t>(row_bytes(p, in_pairs(p))));
  if (p.int8_x) {
    int8.spans = l.groups * ((std::min(l.group, l.columns) + kInt8Columns - 1) / kInt8Columns);
    codes_ = reinterpret_cast<std::int8_t*>(take(count * l.columns));
    scales_ = reinterpret_cast<float*>(take(count * 4));
    totals_ = reinterpret_cast<float*>(take(count * int8.spans * 4));
    int8.words = reinterpret_cast<const std::uint32_t*>(codes_);
    int8.scales = scales_;
    int8.totals = totals_;
  }
  norm.kind = p.norm.kind;
  norm.eps = p.norm.eps;
  if (p.norm.weight != nullptr) norm.weight = norm_weight_ = reinterpret_cast<float*>(take(p.K * 4));
  if (p.norm.bias != nullptr) norm.bias = norm_bias_ = reinterpret_cast<float*>(take(p.K * 4));
  bytes = static_cast<std::size_t>(end);
}

void StagedRows::prepare(const LinearProblem& p) const {
  if (norm.weight != nullptr) kernels().load_row(p.norm.weight, p.dtype, 1, p.K, p.K, norm_weight_);
  if (norm.bias != nullptr) kernels().load_row(p.norm.bias, p.dtype, 1, p.K, p.K, norm_bias_);
}

// f32 to row i of int8, its scale and its totals.
void StagedRows::stage_int8(const LinearProblem& p, std::int64_t i, const float* x) const {
  const lowbit::PanelLayout& l = p.panels().layout;
  std::int8_t* q = codes_ + i * l.columns;
  scales_[i] = round_to_int8(x, l.columns, q);
  float* total = totals_ + i * int8.spans;
  for (std::int64_t k = 0; k < l.columns;) {
    const std::int64_t end = std::min({l.columns, k + kInt8Columns, (k / l.group + 1) * l.group});
    std::int32_t sum = 0;
    for (; k < end; ++k) sum += q[k];
    *total++ = static_cast<float>(sum);
  }
  if (lowbit::bits_of(p.panels().format.element) == 8) return;
  for (std::int64_t k = 0; k < l.columns; k += lowbit::kPanelStep) {
    const std::int8_t eight[8] = {q[k], q[k + 2], q[k + 4], q[k + 6], q[k + 1], q[k + 3], q[k + 5], q[k + 7]};
    std::memcpy(q + k, eight, sizeof eight);
  }
}

void StagedRows::stage(const LinearProblem& p, std::int64_t begin, std::int64_t count, Executor& executor) const {
  const Kernels& k = kernels();
  const bool pairs = in_pairs(p), normed = norm.kind != Norm::none;
  const std::size_t bytes = row_bytes(p, pairs), used = static_cast<std::size_t>(p.K) * (pairs ? 2 : 4);
  const std::int64_t columns = p.panels().layout.columns;
  const auto row = [&](std::int64_t i) {
    std::byte* at = rows + static_cast<std::size_t>(i) * bytes;
    if (i >= count) {
      std::memset(at, 0, bytes);
    } else if (normed) {
      k.linear.norm_row(norm, p.x.row(begin + i), p.dtype, p.K, at, pairs ? DType::bf16 : DType::f32);
      std::memset(at + used, 0, bytes - used);
    } else if (pairs) {
      if (used > 0) std::memcpy(at, p.x.row(begin + i), used);
      std::memset(at + used, 0, bytes - used);
    } else {
      k.load_row(p.x.row(begin + i), p.dtype, 1, p.K, columns, reinterpret_cast<float*>(at));
    }
    if (p.int8_x) stage_int8(p, i, reinterpret_cast<const float*>(at));
  };
  const std::int64_t up_to = round_up(count, row_step(p));
  if (count * columns < (normed ? kNormElements : kTaskElements)) {
    for (std::int64_t i = 0; i < up_to; ++i) row(i);
  } else {
    parallel_for(executor, up_to, [&row](std::int64_t i, int) { row(i); });
  }
}

LinearTask StagedRows::task(const LinearProblem& p, std::int64_t begin, std::int64_t count) const {
  LinearTask task;
  task.m_begin = begin;
  task.m_count = count;
  task.pairs = in_pairs(p);
  task.x = rows;
  task.int8 = int8;
  return task;
}

}  // namespace heddle::cpu
