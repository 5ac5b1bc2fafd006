// The candidate "cublaslt": products of 16 bits over a copy of W that was kept, or over W as it is decoded, a part of
// its rows at a time.
#include "core/check.h"
#include "cuda/any/cublaslt/host.h"
#include "cuda/any/linear/host.h"
#include "cuda/any/linear/rows.h"
#include "cuda/common/device.h"
#include "cuda/kernels.h"
#include "cuda/linear.h"
#include "lowbit/formats.h"

namespace heddle::cuda {
namespace {

using namespace cublaslt;

bool normed(const LinearProblem& p) { return p.norm.kind != Norm::none; }

// What cuBLASLt does itself: bias and residual; or, without a residual, which it would add before, bias and then relu,
// or gelu with an approximate tanh, which bfloat16 does not show.
bool fused(const LinearProblem& p) {
  if (p.activation == Activation::none) return true;
  if (p.residual.given) return false;
  return p.activation == Activation::relu || (p.activation == Activation::gelu_tanh && p.dtype == DType::bf16);
}
bool finishes(const LinearProblem& p) { return !fused(p); }
After after_of(const LinearProblem& p) {
  return p.activation == Activation::relu        ? After::relu
         : p.activation == Activation::gelu_tanh ? After::gelu_tanh
                                                 : After::nothing;
}

std::int64_t pitch_of(const LinearProblem& p) { return round_up(p.K, 8); }
Part part_of(const LinearProblem& p) {
  return cublaslt::part_of(p.M, p.N, finishes(p), has_kept(p) ? 0 : 2 * pitch_of(p));
}

std::string supports(const LinearProblem& p) {
  if (!has_kept(p)) {
    if (p.kept) {
      return text("the kept copy of W is ", name_of(p.kept->dtype), " and x is ", name_of(p.dtype));
    }
    // For E2M1 there are kernels as fast, which round no weight; and float16 would not hold every weight that the
    // others' kernel multiplies.
    const bool decodes = p.order == WeightOrder::fragments16 && p.dtype == DType::bf16 && !lowbit::is_e2m1(p.format);
    if (p.order != WeightOrder::matrix && !decodes) {
      return text(
          "it takes weights in order matrix, in fragments16 where they are not nvfp4, mxfp4 or e2m1_row and x is "
          "bfloat16, or with a copy in 16 bits that was kept (keep_16bit); these are ",
          lowbit::name_of(p.format), " in ", name_of(p.order), ", and x is ", name_of(p.dtype));
    }
  }
  if (p.order == WeightOrder::fragments8 || p.order == WeightOrder::matrix8) {
    return text("weights in order ", name_of(p.order), " are for x rounded to float8_e4m3fn");
  }
  if (p.int8_x) return "it has no products in integers";
  if (std::string reason = refuse(p); !reason.empty()) return reason;
  if (normed(p)) {
    if (std::string reason = refuse_pass(p); !reason.empty()) return reason;
  }
  return refuse_library();
}

// Over weights in 16 bits that are there.
double seconds_over_16bit(const LinearProblem& p) {
  const double sums = static_cast<double>(p.M) * static_cast<double>(p.N);
  double seconds = cost_of(kCosts[0]).fixed + product_seconds(p, 2, named(kCosts[0]));
  if (finishes(p)) seconds += kLaunchSeconds + memory_seconds(8 * sums);
  return normed(p) ? seconds + linear::rows_seconds(p) : seconds;
}

double estimate(const LinearProblem& p, int /*workers*/) {
  if (p.empty()) return 0.0;
  const double seconds = seconds_over_16bit(p);
  if (has_kept(p)) return seconds;
  // Decoding goes at half of the memory's rate.
  const double weights = static_cast<double>(p.N) * static_cast<double>(p.K);
  return seconds + kLaunchSeconds + 2 * memory_seconds(weights * (2 + lowbit::bits_of(p.format.element) / 8.0));
}

struct Place {
  std::byte *normed, *weights, *sums, *library;
  std::size_t bytes;
  Place(const LinearProblem& p, void* memory) {
    const Part part = part_of(p);
    Arena arena(memory);
    normed = arena.take(::heddle::cuda::normed(p) ? 2 * p.M * pitch_of(p) : 0);
    weights = arena.take(has_kept(p) ? 0 : 2 * part.columns * pitch_of(p));
    sums = arena.take(finishes(p) ? 4 * part.rows * round_up(part.columns, 4) : 0);
    library = arena.take(kWorkspace);
    bytes = arena.taken();
  }
};

std::size_t workspace(const LinearProblem& p, int /*workers*/) { return p.empty() ? 0 : Place(p, nullptr).bytes; }

std::string describe(const LinearProblem& p, int /*workers*/) {
  if (p.empty()) return "nothing to launch";
  const Part part = part_of(p);
  return text(has_kept(p) ? "over W in 16 bits, " : "over W as it is decoded to 16 bits, ", part.columns,
              " rows of W and ", part.rows, " of x at a time", normed(p) ? ", after a pass for the norm" : "",
              finishes(p) ? ", before one that finishes the sums" : "");
}

void launch(const LinearProblem& p, const Runtime& runtime) {
  if (p.empty()) return;
  const auto stream = static_cast<cudaStream_t>(runtime.stream);
  const Place place(p, runtime.workspace.data);
  const Part part = part_of(p);
  const std::byte* x = p.x.data;
  std::int64_t x_stride = linear::row_stride(p.x).value_or(0);
  if (normed(p)) {
    run_rows_pass(linear::rows_pass(p, pitch_of(p), place.normed, nullptr), stream);
    x = place.normed;
    x_stride = pitch_of(p);
  }
  const std::int64_t y_stride = linear::row_stride(p.y).value_or(0);
  const std::int64_t residual_stride = linear::row_stride(p.residual).value_or(0);
  for (std::int64_t n = 0; n < p.N; n += part.columns) {
    Product product{.in = type_of(p.dtype), .out = type_of(p.dtype), .m = std::min(part.columns, p.N - n), .k = p.K};
    if (has_kept(p)) {
      product.w = shifted(p.kept->data, n * p.K);
      product.w_stride = p.K;
    } else {
      decode_weights(p, {.row = n, .rows = product.m, .columns = p.K},
                     {.data = place.weights, .dtype = p.dtype, .stride_n = pitch_of(p), .stride_k = 1}, stream);
      product.w = place.weights;
      product.w_stride = pitch_of(p);
    }
    product.x_stride = x_stride;
    for (std::int64_t m = 0; m < p.M; m += part.rows) {
      product.n = std::min(part.rows, p.M - m);
      product.x = shifted(x, m * x_stride);
      if (!finishes(p)) {
        product.bias = shifted(p.bias, n);
        product.c = shifted(p.residual.data, m * residual_stride + n);
        product.c_stride = residual_stride;
        product.d = shifted(p.y.data, m * y_stride + n);
        product.d_stride = y_stride;
        product.after = after_of(p);
        multiply(product, place.library, stream);
        continue;
      }
      product.out = CUDA_R_32F;
      product.d = place.sums;
      product.d_stride = round_up(product.m, 4);
      multiply(product, place.library, stream);
      const std::int64_t j = p.activation == Activation::swiglu ? n / 2 : n;
      finish({.sums = {.data = place.sums,
                       .rows = product.n,
                       .columns = product.m,
                       .stride = product.d_stride,
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

double seconds_of_16bit(const LinearProblem& p) {
  return current_device().major < 8 || p.empty() ? 0.0 : seconds_over_16bit(p);
}

const LinearKernel kCublasLtLinear = {.name = "cublaslt",
                                      .method = "linear",
                                      .device = Device::cuda,
                                      .automatic = true,
                                      .supports = supports,
                                      .estimate = estimate,
                                      .workspace = workspace,
                                      .launch = launch,
                                      .describe = describe,
                                      .extras = kNormInFront,
                                      .costs = kCosts};

}  // namespace heddle::cuda
