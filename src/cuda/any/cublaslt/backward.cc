// The gradients' candidate "cublaslt": dz of dy and, with an activation, of the sums computed again; then dx = dz W, W
// in 16 bits a part of its columns at a time, or the copy of it that was kept.
#include "core/check.h"
#include "cuda/any/cublaslt/host.h"
#include "cuda/any/linear/host.h"
#include "cuda/common/device.h"
#include "cuda/kernels.h"
#include "cuda/linear.h"
#include "lowbit/formats.h"

namespace heddle::cuda {
namespace {

using namespace cublaslt;

constexpr std::int64_t kPartBytes = std::int64_t{256} << 20, kColumnStep = 128;

std::string supports(const LinearBackwardProblem& p) {
  const LinearProblem& f = p.forward;
  if (std::string reason = refuse(f); !reason.empty()) return reason;
  if (f.order == WeightOrder::dense && !has_kept(f)) {
    return "weights in order dense are of another dtype than x, and are not converted";
  }
  for (const RowsOf* rows : {&p.dy, &p.dx}) {
    if (rows->given && !linear::row_stride(*rows)) {
      return text(rows == &p.dy ? "dy" : "dx", "'s rows must lie one stride apart");
    }
  }
  // Of a sum's gradient, say, all rows are one.
  if (f.M > 1 && linear::row_stride(p.dy).value_or(0) < f.outputs) return "dy's rows overlap or run backwards";
  return refuse_library();
}

// Rows of x, and columns of W for dx or its rows for z, that one part has.
struct Parts {
  std::int64_t rows = 0, columns = 0, sums_rows = 0, sums_columns = 0;
};
std::int64_t fitting(std::int64_t each, std::int64_t most, std::int64_t step) {
  return std::min(most, std::max(kPartBytes / each / step, std::int64_t{1}) * step);
}
Parts parts_of(const LinearBackwardProblem& p) {
  const LinearProblem& f = p.forward;
  if (f.M == 0 || f.N == 0) return {};
  Parts parts{.rows = f.M, .columns = f.K, .sums_rows = 0, .sums_columns = 0};
  if (p.activated()) {
    const Part sums = part_of(f.M, f.N, true, has_kept(f) ? 0 : 2 * round_up(f.K, 8));
    parts.rows = fitting(2 * round_up(f.N, 8), f.M, 256);
    parts.sums_rows = std::min(sums.rows, parts.rows);
    parts.sums_columns = sums.columns;
  }
  if (!has_kept(f)) parts.columns = fitting(2 * f.N, f.K, kColumnStep);
  return parts;
}

struct Place {
  std::byte *dz, *weights, *sums, *library;
  float* dbias;
  std::size_t bytes;
  Place(const LinearBackwardProblem& p, void* memory) {
    const LinearProblem& f = p.forward;
    const Parts parts = parts_of(p);
    Arena arena(memory);
    dz = arena.take(p.activated() ? 2 * parts.rows * round_up(f.N, 8) : 0);
    const std::int64_t of_columns = p.dx.given ? 2 * f.N * round_up(parts.columns, 8) : 0;
    weights = arena.take(has_kept(f) ? 0 : std::max(of_columns, 2 * parts.sums_columns * round_up(f.K, 8)));
    sums = arena.take(4 * parts.sums_rows * round_up(parts.sums_columns, 4));
    dbias = arena.take<float>(p.dbias != nullptr ? 4 * kSlices * f.N : 0);
    library = arena.take(kWorkspace);
    bytes = arena.taken();
  }
};

constexpr CostLine<LinearBackwardProblem> kBackwardCosts[] = {
    {"cublaslt_bwd", {13.0e-6, 805e12, 0}, {"", WeightOrder::dense, DType::bf16, 4096, 8192, 8192}},
};

double estimate(const LinearBackwardProblem& p, int /*workers*/) {
  const LinearProblem& f = p.forward;
  const double products = (p.activated() ? 1 : 0) + (p.dx.given ? 1 : 0);
  const double decoded = has_kept(f) ? 0 : memory_seconds(2.5 * static_cast<double>(f.N) * static_cast<double>(f.K));
  return cost_of(kBackwardCosts[0]).fixed + products * (product_seconds(f, 2, named(kBackwardCosts[0])) + decoded);
}

std::size_t workspace(const LinearBackwardProblem& p, int /*workers*/) {
  return p.forward.M == 0 || p.forward.N == 0 ? 0 : Place(p, nullptr).bytes;
}

// dz of rows [begin, begin + rows), [rows, N] with that stride.
void sums_gradient(const LinearBackwardProblem& p, const Place& place, std::int64_t begin, std::int64_t rows,
                   std::int64_t dz_stride, cudaStream_t stream) {
  const LinearProblem& f = p.forward;
  const Parts parts = parts_of(p);
  const std::int64_t x_stride = linear::row_stride(f.x).value_or(0);
  const std::int64_t dy_stride = linear::row_stride(p.dy).value_or(0), pitch = round_up(f.K, 8);
  for (std::int64_t n = 0; n < f.N; n += parts.sums_columns) {
    Product product{.in = type_of(f.dtype), .out = CUDA_R_32F, .m = std::min(parts.sums_columns, f.N - n), .k = f.K};
    product.w = has_kept(f) ? shifted(f.kept->data, n * f.K) : place.weights;
    product.w_stride = has_kept(f) ? f.K : pitch;
    if (!has_kept(f)) {
      decode_weights(f, {.row = n, .rows = product.m, .columns = f.K},
                     {.data = place.weights, .dtype = f.dtype, .stride_n = pitch, .stride_k = 1}, stream);
    }
    product.x_stride = x_stride;
    product.d = place.sums;
    product.d_stride = round_up(product.m, 4);
    const std::int64_t j = f.activation == Activation::swiglu ? n / 2 : n;
    for (std::int64_t m = 0; m < rows; m += parts.sums_rows) {
      product.n = std::min(parts.sums_rows, rows - m);
      product.x = shifted(f.x.data, (begin + m) * x_stride);
      multiply(product, place.library, stream);
      slopes({.sums = {.data = place.sums,
                       .rows = product.n,
                       .columns = product.m,
                       .stride = product.d_stride,
                       .bias = shifted(f.bias, n),
                       .dtype = f.dtype,
                       .activation = f.activation},
              .dy = shifted(p.dy.data, (begin + m) * dy_stride + j),
              .dy_stride = dy_stride,
              .dz = shifted(place.dz, m * dz_stride + n),
              .dz_stride = dz_stride},
             stream);
    }
  }
}

void rows_gradient(const LinearBackwardProblem& p, const Place& place, const std::byte* dz, std::int64_t dz_stride,
                   std::int64_t begin, std::int64_t rows, cudaStream_t stream) {
  const LinearProblem& f = p.forward;
  const std::int64_t dx_stride = linear::row_stride(p.dx).value_or(0), columns = parts_of(p).columns;
  for (std::int64_t k = 0; k < f.K; k += columns) {
    Product product{
        .in = type_of(f.dtype), .out = type_of(f.dtype), .m = std::min(columns, f.K - k), .n = rows, .k = f.N};
    product.by_rows = false;
    product.w = has_kept(f) ? shifted(f.kept->data, k) : place.weights;
    product.w_stride = has_kept(f) ? f.K : round_up(product.m, 8);
    if (!has_kept(f)) {
      decode_weights(f, {.column = k, .rows = f.N, .columns = product.m},
                     {.data = place.weights, .dtype = f.dtype, .stride_n = product.w_stride, .stride_k = 1}, stream);
    }
    product.x = dz;
    product.x_stride = dz_stride;
    product.d = shifted(p.dx.data, begin * dx_stride + k);
    product.d_stride = dx_stride;
    multiply(product, place.library, stream);
  }
}

void clear(std::byte* to, std::int64_t elements, cudaStream_t stream) {
  if (to != nullptr) check(cudaMemsetAsync(to, 0, static_cast<std::size_t>(2 * elements), stream), "linear_backward");
}

std::string describe(const LinearBackwardProblem& p, int /*workers*/) {
  const LinearProblem& f = p.forward;
  const Parts parts = parts_of(p);
  return text(has_kept(f) ? "over W in 16 bits, " : "over W as it is decoded to 16 bits, ", parts.rows,
              " rows of x and ", parts.columns, " columns of W at a time",
              p.activated() ? ", the sums computed again" : "");
}

void launch(const LinearBackwardProblem& p, const Runtime& runtime) {
  const LinearProblem& f = p.forward;
  const auto stream = static_cast<cudaStream_t>(runtime.stream);
  if (f.M == 0) return clear(p.dbias, f.N, stream);
  if (f.N == 0) {
    for (std::int64_t m = 0; p.dx.given && m < f.M; ++m) clear(p.dx.row(m), f.K, stream);
    return;
  }
  const Place place(p, runtime.workspace.data);
  const Parts parts = parts_of(p);
  for (std::int64_t m = 0; m < f.M; m += parts.rows) {
    const std::int64_t rows = std::min(parts.rows, f.M - m), dy_stride = linear::row_stride(p.dy).value_or(0);
    const std::int64_t dz_stride = p.activated() ? round_up(f.N, 8) : dy_stride;
    const std::byte* const dz = p.activated() ? place.dz : shifted(p.dy.data, m * dy_stride);
    if (p.activated()) sums_gradient(p, place, m, rows, dz_stride, stream);
    const ColumnSums columns{
        .data = dz, .dtype = f.dtype, .rows = rows, .columns = f.N, .stride = dz_stride, .partial = place.dbias};
    if (p.dbias != nullptr) add_columns(columns, m == 0, stream);
    if (p.dbias != nullptr && m + rows == f.M) write_columns(columns, p.dbias, stream);
    if (p.dx.given) rows_gradient(p, place, dz, dz_stride, m, rows, stream);
  }
}

}  // namespace

const LinearBackwardKernel kCublasLtLinearBackward = {.name = "cublaslt",
                                                      .method = "linear",
                                                      .device = Device::cuda,
                                                      .automatic = true,
                                                      .supports = supports,
                                                      .estimate = estimate,
                                                      .workspace = workspace,
                                                      .launch = launch,
                                                      .describe = describe,
                                                      .costs = kBackwardCosts};

}  // namespace heddle::cuda
