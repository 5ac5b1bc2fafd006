// Linear layers over packed weights: rows of x widened once, then tasks of rows of W.
#include "cpu/linear.h"

#include <algorithm>
#include <cstring>

#include "core/int8_rows.h"
#include "cpu/kernels.h"

namespace heddle::cpu {
namespace {

constexpr std::int64_t round_up(std::int64_t n, std::int64_t step) { return (n + step - 1) / step * step; }

// Rows of x that no SIMD target reads beyond, whatever its register tile.
constexpr std::int64_t kRowStep = 8;
// Elements of x below which handing its rows out costs more than widening them.
constexpr std::int64_t kTaskElements = std::int64_t{1} << 15;

// Whether products are taken in bf16 pairs.
bool pairs(const LinearProblem& p) {
  return kernels().bf16_pairs && p.dtype == DType::bf16 && !p.batch_invariant && !p.int8_x && p.M > kLinearFewRows;
}

// Bytes of one row of x, widened, or of bf16 as it is, up to whole steps of columns.
std::size_t row_bytes(const LinearProblem& p, bool in_pairs) {
  return static_cast<std::size_t>(p.weights.layout.columns) * (in_pairs ? 2 : 4);
}

// What is made of up to kLinearChunk rows of x.
struct Staged {
  std::byte* rows = nullptr;    // f32, or bf16 for pairs
  std::int8_t* int8 = nullptr;  // [rows][columns], as Int8Rows says
  float *scales = nullptr, *totals = nullptr;
  std::int64_t spans = 0;
  std::size_t bytes = 0;

  Staged(const LinearProblem& p, std::byte* at) {
    const lowbit::PanelLayout& l = p.weights.layout;
    const std::int64_t count = round_up(std::min(p.M, kLinearChunk), kRowStep);
    spans = l.groups * ((std::min(l.group, l.columns) + kInt8Columns - 1) / kInt8Columns);
    rows = at;
    std::int64_t end = round_up(count * static_cast<std::int64_t>(row_bytes(p, pairs(p))), 64);
    if (p.int8_x) {
      int8 = reinterpret_cast<std::int8_t*>(at + end);
      end += round_up(count * l.columns, 64);
      scales = reinterpret_cast<float*>(at + end);
      end += round_up(count * 4, 64);
      totals = reinterpret_cast<float*>(at + end);
      end += round_up(count * spans * 4, 64);
    }
    bytes = static_cast<std::size_t>(end);
  }
};

std::size_t x_bytes(const LinearProblem& p) { return Staged(p, nullptr).bytes; }

std::size_t scratch_each() {
  return static_cast<std::size_t>(round_up(static_cast<std::int64_t>(kernels().linear.scratch()), 64));
}

std::string supports(const LinearProblem&) { return ""; }

double estimate(const LinearProblem& p, int workers) {
  const Kernels& k = kernels();
  const double weights = static_cast<double>(p.N) * static_cast<double>(p.K);
  const double rate = pairs(p) ? k.bf16_rate : k.f32_rate;
  const double chunks = static_cast<double>((p.M + kLinearChunk - 1) / kLinearChunk);
  constexpr double kDecodeFlops = 8;  // what decoding a weight costs, in products
  return weights * (2 * static_cast<double>(p.M) + kDecodeFlops * chunks) / (rate * workers);
}

std::size_t workspace(const LinearProblem& p, int workers) {
  if (p.M == 0 || p.N == 0) return 0;
  return x_bytes(p) + scratch_each() * static_cast<std::size_t>(workers);
}

// f32 to row i of int8, its scale and its totals.
void stage_int8(const LinearProblem& p, const Staged& staged, std::int64_t i, const float* x) {
  const lowbit::PanelLayout& l = p.weights.layout;
  std::int8_t* q = staged.int8 + i * l.columns;
  staged.scales[i] = round_to_int8(x, l.columns, q);
  float* total = staged.totals + i * staged.spans;
  for (std::int64_t k = 0; k < l.columns;) {
    const std::int64_t end = std::min({l.columns, k + kInt8Columns, (k / l.group + 1) * l.group});
    std::int32_t sum = 0;
    for (; k < end; ++k) sum += q[k];
    *total++ = static_cast<float>(sum);
  }
  for (std::int64_t k = 0; k < l.columns; k += lowbit::kPanelStep) {
    const std::int8_t eight[8] = {q[k], q[k + 2], q[k + 4], q[k + 6], q[k + 1], q[k + 3], q[k + 5], q[k + 7]};
    std::memcpy(q + k, eight, sizeof eight);
  }
}

// Rows [begin, begin + count) of x, and rows of zeros up to whole steps.
void stage(const LinearProblem& p, std::int64_t begin, std::int64_t count, const Staged& staged, Executor& executor) {
  const Kernels& k = kernels();
  const bool in_pairs = pairs(p);
  const std::size_t bytes = row_bytes(p, in_pairs);
  const std::int64_t columns = p.weights.layout.columns;
  const auto row = [&](std::int64_t i) {
    std::byte* at = staged.rows + static_cast<std::size_t>(i) * bytes;
    if (i >= count) {
      std::memset(at, 0, bytes);
    } else if (in_pairs) {
      const auto used = static_cast<std::size_t>(p.K) * 2;
      if (used > 0) std::memcpy(at, p.x.row(begin + i), used);
      std::memset(at + used, 0, bytes - used);
    } else {
      k.load_row(p.x.row(begin + i), p.dtype, 1, p.K, columns, reinterpret_cast<float*>(at));
    }
    if (p.int8_x) stage_int8(p, staged, i, reinterpret_cast<const float*>(at));
  };
  const std::int64_t rows = round_up(count, kRowStep);
  if (count * columns < kTaskElements) {
    for (std::int64_t i = 0; i < rows; ++i) row(i);
  } else {
    executor.parallel_for(rows, [&row](std::int64_t i, int) { row(i); });
  }
}

void launch(const LinearProblem& p, const Runtime& runtime) {
  if (p.M == 0 || p.N == 0) return;
  const LinearKernels& kernel = kernels().linear;
  const std::size_t scratch = scratch_each();
  const Staged staged(p, static_cast<std::byte*>(runtime.workspace.data));
  std::byte* scratches = staged.rows + staged.bytes;
  const std::int64_t tiles = (p.N + kLinearTile - 1) / kLinearTile;
  for (std::int64_t begin = 0; begin < p.M; begin += kLinearChunk) {
    LinearTask task;
    task.m_begin = begin;
    task.m_count = std::min(kLinearChunk, p.M - begin);
    task.pairs = pairs(p);
    task.x = staged.rows;
    if (p.int8_x) {
      task.int8 = {reinterpret_cast<const std::uint32_t*>(staged.int8), staged.scales, staged.totals, staged.spans};
    }
    stage(p, begin, task.m_count, staged, *runtime.executor);
    runtime.executor->parallel_for(tiles, [&](std::int64_t tile, int worker) {
      LinearTask mine = task;
      mine.tile = tile;
      kernel.forward(p, mine, scratches + scratch * static_cast<std::size_t>(worker));
    });
  }
}

}  // namespace

const LinearKernel kLinear = {
    .name = "cpu",
    .method = "linear",
    .device = Device::cpu,
    .automatic = true,
    .supports = supports,
    .estimate = estimate,
    .workspace = workspace,
    .launch = launch,
};

}  // namespace heddle::cpu
