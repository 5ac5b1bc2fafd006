// Gradients of linear layers over packed weights: for each chunk of rows, dz by rows of W, then dz W by columns, then,
// with a norm in front, dx by rows and the norm's own gradients by columns.
#include <algorithm>

#include "core/check.h"
#include "core/parallel.h"
#include "cpu/kernels.h"
#include "cpu/linear.h"
#include "cpu/linear_staging.h"

namespace heddle::cpu {
namespace {

// Whole vectors of rows of x on every target.
constexpr std::int64_t kLanesOfRows = 16;
// Columns of one task of the norm's own gradients.
constexpr std::int64_t kNormColumns = 256;

std::int64_t tiles_of(const LinearProblem& f) { return ceil_div(f.N, kLinearTile); }

bool pairs_of(const LinearProblem& f) {
  return kernels().bf16_pairs && f.dtype == DType::bf16 && !f.batch_invariant && f.M > kLinearFewRows;
}

std::size_t scratch_each() {
  return static_cast<std::size_t>(round_up(static_cast<std::int64_t>(kernels().linear.gradient_scratch()), 64));
}

struct Place {
  std::byte* staged = nullptr;  // rows of x, for z
  std::byte* dz = nullptr;
  float *dbias = nullptr, *normed = nullptr, *dnorm_weight = nullptr, *dnorm_bias = nullptr;
  double* statistics = nullptr;  // [rows][mean, inverse]
  std::byte* scratches = nullptr;
  std::size_t bytes = 0;

  Place(const LinearBackwardProblem& p, std::byte* at) {
    const LinearProblem& f = p.forward;
    const std::int64_t rows = round_up(std::min(f.M, kLinearChunk), kLanesOfRows), sums = tiles_of(f) * kLinearTile;
    std::int64_t end = 0;
    const auto take = [&](std::int64_t size) {
      std::byte* here = at == nullptr ? nullptr : at + end;
      end += round_up(size, 64);
      return here;
    };
    const auto take_floats = [&](std::int64_t count) { return reinterpret_cast<float*>(take(count * 4)); };
    if (p.activated() || p.normed()) staged = take(static_cast<std::int64_t>(StagedRows(f, nullptr).bytes));
    dz = take(sums * rows * (pairs_of(f) ? 2 : 4));
    if (p.dbias != nullptr) dbias = take_floats(sums);
    if (p.normed() && p.wants_rows()) {
      normed = take_floats(rows * f.panels().layout.columns);
      statistics = reinterpret_cast<double*>(take(rows * 16));
      if (p.dnorm_weight != nullptr) dnorm_weight = take_floats(f.K);
      if (p.dnorm_bias != nullptr) dnorm_bias = take_floats(f.K);
    }
    scratches = take(0);
    bytes = static_cast<std::size_t>(end);
  }
};

void clear(float* sums, std::int64_t count) {
  if (sums != nullptr) std::fill_n(sums, count, 0.0f);
}

void write(const float* sums, std::int64_t count, std::byte* to, DType dtype) {
  if (to != nullptr) kernels().store_row(sums, count, to, dtype, 1);
}

std::string supports(const LinearBackwardProblem&) { return ""; }

double estimate(const LinearBackwardProblem& p, int workers) {
  const LinearProblem& f = p.forward;
  const Kernels& k = kernels();
  const double products = (p.activated() ? 1 : 0) + (p.wants_rows() ? 1 : 0);
  const double weights = static_cast<double>(f.N) * static_cast<double>(f.K);
  const double rows = static_cast<double>(round_up(f.M, kLanesOfRows));
  return products * weights * (2 * rows + 8 * rows / kLinearChunk) /
         ((pairs_of(f) ? k.bf16_rate : k.f32_rate) * workers);
}

std::size_t workspace(const LinearBackwardProblem& p, int workers) {
  if (p.forward.M == 0) return static_cast<std::size_t>(round_up(std::max(p.forward.N, p.forward.K) * 4, 64));
  return Place(p, nullptr).bytes + scratch_each() * static_cast<std::size_t>(workers);
}

// One chunk of rows.
void add_rows(const LinearBackwardProblem& p, const Place& place, const StagedRows* staged, std::int64_t begin,
              Executor& executor) {
  const LinearProblem& f = p.forward;
  const LinearFunctions& kernel = kernels().linear;
  const std::size_t scratch = scratch_each();
  const auto mine = [&](int worker) { return place.scratches + scratch * static_cast<std::size_t>(worker); };
  LinearGradientRows g;
  g.m_begin = begin;
  g.m_count = std::min(kLinearChunk, f.M - begin);
  g.lanes = round_up(g.m_count, kLanesOfRows);
  g.pairs = pairs_of(f);
  g.dz = place.dz;
  g.dbias = place.dbias;
  g.normed = place.normed;
  LinearTask task;
  task.m_begin = begin;
  task.m_count = g.m_count;
  if (p.activated()) {
    task = staged->task(f, begin, g.m_count);
    staged->stage(f, begin, g.m_count, executor);
  }
  parallel_for(executor, tiles_of(f), [&](std::int64_t tile, int worker) {
    LinearTask part = task;
    part.tile = tile;
    kernel.sums_gradient(p, part, g, mine(worker));
  });
  if (!p.wants_rows()) return;
  parallel_for(executor, ceil_div(f.panels().layout.columns, kGradientColumns),
               [&](std::int64_t block, int worker) { kernel.rows_gradient(p, g, block, mine(worker)); });
  if (!p.normed()) return;
  parallel_for(executor, g.m_count, [&](std::int64_t m, int) {
    std::byte* dx = p.dx.data != nullptr ? p.dx.row(begin + m) : nullptr;
    kernel.norm_gradient(staged->norm, f.x.row(begin + m), f.dtype, f.K, g.normed + m * f.panels().layout.columns, dx,
                         place.statistics + 2 * m);
  });
  if (place.dnorm_weight == nullptr && place.dnorm_bias == nullptr) return;
  parallel_for(executor, ceil_div(f.K, kNormColumns), [&](std::int64_t block, int) {
    const std::int64_t k = block * kNormColumns;
    kernel.norm_parameters_gradient(p, g, place.statistics, k, std::min(kNormColumns, f.K - k), place.dnorm_weight,
                                    place.dnorm_bias);
  });
}

std::string describe(const LinearBackwardProblem& p, int workers) {
  return text(kernels().name, ", ", kLinearChunk, " rows of x at a time, products ",
              pairs_of(p.forward) ? "of bf16 pairs" : "in f32", ", ", workers, workers == 1 ? " thread" : " threads");
}

void launch(const LinearBackwardProblem& p, const Runtime& runtime) {
  const LinearProblem& f = p.forward;
  auto* memory = static_cast<std::byte*>(runtime.workspace.data);
  if (f.M == 0) {
    auto* zeros = reinterpret_cast<float*>(memory);
    clear(zeros, std::max(f.N, f.K));
    write(zeros, f.N, p.dbias, f.dtype);
    write(zeros, f.K, p.dnorm_weight, f.dtype);
    write(zeros, f.K, p.dnorm_bias, f.dtype);
    return;
  }
  const Place place(p, memory);
  const StagedRows staged(f, place.staged);
  if (place.staged != nullptr) staged.prepare(f);
  clear(place.dbias, tiles_of(f) * kLinearTile);
  clear(place.dnorm_weight, f.K);
  clear(place.dnorm_bias, f.K);
  for (std::int64_t begin = 0; begin < f.M; begin += kLinearChunk) {
    add_rows(p, place, &staged, begin, *runtime.executor);
  }
  write(place.dbias, f.N, p.dbias, f.dtype);
  write(place.dnorm_weight, f.K, p.dnorm_weight, f.dtype);
  write(place.dnorm_bias, f.K, p.dnorm_bias, f.dtype);
}

}  // namespace

const LinearBackwardKernel kLinearBackward = {
    .name = "cpu",
    .method = "linear",
    .device = Device::cpu,
    .automatic = true,
    .supports = supports,
    .estimate = estimate,
    .workspace = workspace,
    .launch = launch,
    .describe = describe,
    .extras = kNormInFront,
};

}  // namespace heddle::cpu
