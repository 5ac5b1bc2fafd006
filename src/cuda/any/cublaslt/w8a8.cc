// The candidate "cublaslt_w8a8": products in int8 or e4m3 over 8-bit weights as they lie, x rounded a row at a time.
#include "core/check.h"
#include "cuda/any/cublaslt/host.h"
#include "cuda/any/linear/host.h"
#include "cuda/any/linear/rows.h"
#include "cuda/common/device.h"
#include "cuda/kernels.h"
#include "lowbit/formats.h"
#include "lowbit/matrix_order.h"

namespace heddle::cuda {
namespace {

using namespace cublaslt;

// Sums of int8 products that 32 bits hold.
constexpr std::int64_t kMostInt8Columns = std::int64_t{1} << 17;
// Rows of x beyond M that products have for their alignment: nothing reads their sums.
constexpr std::int64_t kRowStep = 16;

bool in_int8(const LinearProblem& p) { return p.format.element == lowbit::Element::int8; }
Part part_of(const LinearProblem& p) { return cublaslt::part_of(p.M, p.N, true, 0); }
std::int64_t rows_of_x(const LinearProblem& p) { return round_up(p.M, kRowStep); }

std::string supports(const LinearProblem& p) {
  const bool int8 = in_int8(p) && p.order == WeightOrder::matrix, e4m3 = p.order == WeightOrder::matrix8;
  if (p.order == WeightOrder::dense) return "it takes quantised weights; these are in order dense";
  if (!int8 && !e4m3) {
    return text("it takes int8_row in order matrix and fp8_row in order matrix8; found ", lowbit::name_of(p.format),
                " in ", name_of(p.order));
  }
  if (int8 && !p.int8_x) return "int8_x is not set: it rounds x to 8 bits";
  if (std::string reason = refuse(p); !reason.empty()) return reason;
  const DeviceProperties& device = current_device();
  if (e4m3 && device.major == 8 && device.minor < 9) {
    return text("products in e4m3 need compute capability 8.9; this GPU has ", device.major, ".", device.minor);
  }
  if (int8 && p.K > kMostInt8Columns) return text("K must be at most ", kMostInt8Columns, "; found ", p.K);
  if (std::string reason = refuse_pass(p); !reason.empty()) return reason;
  return refuse_library();
}

constexpr CostLine<LinearProblem> kW8A8Costs[] = {
    {"cublaslt_w8a8", {8.0e-6, 1207.5e12, 0}, {"int8_row", WeightOrder::matrix, DType::bf16, 4096, 8192, 8192, true}},
};

double estimate(const LinearProblem& p, int /*workers*/) {
  if (p.empty()) return 0.0;
  const double sums = static_cast<double>(p.M) * static_cast<double>(p.N);
  // Few rows take its products of 8 bits some 15 us and twice what reading W takes, at 28672 x 8192 as at 8192 x 8192.
  constexpr double kFewRows = 15e-6;
  return cost_of(kW8A8Costs[0]).fixed + kFewRows + linear::rows_traffic_seconds(p) +
         product_seconds(p, 1.5, named(kW8A8Costs[0])) + memory_seconds(8 * sums);
}

struct Place {
  std::byte *x, *sums, *library;
  float* scales;
  std::size_t bytes;
  Place(const LinearProblem& p, void* memory) {
    const Part part = part_of(p);
    Arena arena(memory);
    x = arena.take(rows_of_x(p) * p.matrix().row_bytes);
    scales = arena.take<float>(4 * rows_of_x(p));
    sums = arena.take(4 * round_up(part.rows, kRowStep) * round_up(part.columns, 16));
    library = arena.take(kWorkspace);
    bytes = arena.taken();
  }
};

std::size_t workspace(const LinearProblem& p, int /*workers*/) { return p.empty() ? 0 : Place(p, nullptr).bytes; }

std::string describe(const LinearProblem& p, int /*workers*/) {
  if (p.empty()) return "nothing to launch";
  const Part part = part_of(p);
  return text("products in ", in_int8(p) ? "int8" : "e4m3", ", ", part.columns, " rows of W and ", part.rows,
              " of x at a time, after a pass that rounds x, before one that finishes the sums");
}

void launch(const LinearProblem& p, const Runtime& runtime) {
  if (p.empty()) return;
  const auto stream = static_cast<cudaStream_t>(runtime.stream);
  const Place place(p, runtime.workspace.data);
  const Part part = part_of(p);
  const std::int64_t pitch = p.matrix().row_bytes;
  (in_int8(p) ? linear::run_rows_pass_to_int8 : linear::run_rows_pass_to_e4m3)(
      linear::rows_pass(p, pitch, place.x, place.scales), stream);
  const std::int64_t y_stride = linear::row_stride(p.y).value_or(0);
  const std::int64_t residual_stride = linear::row_stride(p.residual).value_or(0);
  const bool gated = p.activation == Activation::swiglu;
  for (std::int64_t n = 0; n < p.N; n += part.columns) {
    const std::int64_t columns = std::min(part.columns, p.N - n);
    Product product{.in = in_int8(p) ? CUDA_R_8I : CUDA_R_8F_E4M3,
                    .out = in_int8(p) ? CUDA_R_32I : CUDA_R_32F,
                    .m = round_up(columns, 16),  // the weights have as many rows
                    .k = pitch};
    product.w = p.matrix().codes + n * pitch;
    product.w_stride = product.x_stride = pitch;
    product.d = place.sums;
    product.d_stride = product.m;
    for (std::int64_t m = 0; m < p.M; m += part.rows) {
      const std::int64_t rows = std::min(part.rows, p.M - m);
      product.n = round_up(rows, kRowStep);
      product.x = place.x + m * pitch;
      multiply(product, place.library, stream);
      const std::int64_t j = gated ? n / 2 : n;
      finish({.sums = {.data = place.sums,
                       .integers = in_int8(p),
                       .rows = rows,
                       .columns = columns,
                       .stride = product.d_stride,
                       .row_scales = static_cast<const float*>(p.matrix().scales) + n,
                       .token_scales = place.scales + m,
                       .bias = shifted(p.bias, n),
                       .dtype = p.dtype,
                       .activation = p.activation},
              .residual = shifted(p.residual.data, m * residual_stride + j),
              .residual_stride = residual_stride,
              .y = shifted(p.y.data, m * y_stride + j),
              .y_stride = y_stride},
             stream);
    }
  }
}

}  // namespace

const LinearKernel kCublasLtLinearW8A8 = {.name = "cublaslt_w8a8",
                                          .method = "linear",
                                          .device = Device::cuda,
                                          .automatic = true,
                                          .supports = supports,
                                          .estimate = estimate,
                                          .workspace = workspace,
                                          .launch = launch,
                                          .describe = describe,
                                          .extras = kNormInFront,
                                          .costs = kW8A8Costs};

}  // namespace heddle::cuda
