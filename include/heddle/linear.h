// Linear layers whose weights are quantised: y = activation(norm(x) W^T + bias) + residual, W decoded inside the
// product, and their gradients, of all but W. Weights are packed once, on load, into the order that a device's kernels
// read; docs/linear.md says what results promise and what they cost.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "heddle/candidate.h"
#include "heddle/lowbit.h"
#include "heddle/runtime.h"
#include "heddle/tensor.h"

namespace heddle {

// swiglu: rows 2 j and 2 j + 1 of W are gate and up of output j = silu(gate) * up, so y has N / 2 columns.
enum class Activation : std::uint8_t {
  none,
  relu,
  gelu_erf,   // x/2 (1 + erf(x / sqrt(2)))
  gelu_tanh,  // x/2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
  silu,       // x / (1 + e^-x)
  swiglu,
};
// "none", "relu", ...; Error, listing them, for another.
Activation activation_named(std::string_view name);
const char* name_of(Activation activation);

// What is done to each row of x before the product: in f64, the result rounded to f32.
//   layer_norm   (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias
//   rms_norm     x / sqrt(mean(x^2) + eps) * weight
enum class Norm : std::uint8_t { none, layer_norm, rms_norm };
// "none", "layer_norm", "rms_norm"; Error, listing them, for another.
Norm norm_named(std::string_view name);
const char* name_of(Norm norm);

// The order of packed weights.
enum class WeightOrder : std::uint8_t {
  rows16,       // for CPUs, of every instruction set: 16 rows interleaved
  fragments16,  // for GPUs, x in 16 bits
  fragments8,   // for GPUs, x rounded to e4m3, a scale for each row: mxfp4, e2m1_row and, rounded to e4m3 too, nvfp4
  matrix,       // for GPUs, products by cuBLASLt: plain storage in one piece, of every format
  matrix8,      // the same, x rounded to e4m3 with a scale for each row: fp8_row
  dense,        // for GPUs, not packed: W in 16 bits, see dense_weights()
};
// "rows16", ...; Error, listing them, for another.
WeightOrder weight_order_named(std::string_view name);
const char* name_of(WeightOrder order);

// How a layer will be called, as far as it decides how its weights are packed.
struct PackedUse {
  Device device = Device::cpu;
  bool gated = false;   // as PackedWeights::gated
  bool int8_x = false;  // LinearOptions::int8_x
  bool fp8_x = false;  // on a GPU, x rounded to e4m3 with a scale for each row; CPUs hold such weights and refuse calls
};
struct PackedOrder {
  WeightOrder order = WeightOrder::rows16;
  std::string refusal;  // why no order serves such calls, a sentence; empty if `order` does
};
// The order in which to pack weights [N, K] of a format. CPUs have one. On a GPU fragments, unless cuBLASLt alone has
// the product: rows of x or y that are no multiples of 16 bytes, int8_x, and fp8_x beside weights in e4m3.
PackedOrder packed_order_for(const lowbit::Format& format, std::int64_t rows, std::int64_t columns,
                             const PackedUse& use = {});

// Weights [N, K] of a layer as kernels read them.
struct PackedWeights {
  lowbit::Format format;
  std::int64_t rows = 0, columns = 0;  // N, K
  bool gated = false;                  // for swiglu, and for nothing else; N is even then
  Device device = Device::cpu;         // where data is: weights in an order for GPUs are packed on the CPU and copied
  WeightOrder order = WeightOrder::rows16;
  // u8 [bytes], aligned to 64 bytes. On a GPU a call's kernels begin to read it while those before them on the stream
  // may still run: copies into it are waited for, kernels that write it are not unless they have ended.
  TensorView data;
  // On a GPU, W besides in f16 or bf16, [N, K], contiguous, or not given: for calls with so many rows of x, of that
  // dtype, that 4 bits cannot win. 4 times the bytes of 4-bit codes.
  TensorView kept;
};

// What packing such a matrix needs, with null data: the caller allocates data.shape[0] bytes. Throws Error on a shape
// that the format does not have, and on a format that the order does not have.
PackedWeights packed_storage(const lowbit::Format& format, std::int64_t rows, std::int64_t columns, bool gated = false,
                             WeightOrder order = WeightOrder::rows16);

// A layer whose weights are not quantised, for the same calls: W [N, K] in f16 or bf16 on a GPU, contiguous, which the
// result views as `kept`; it has no data and no format. Products are cuBLASLt's, of x in W's dtype.
PackedWeights dense_weights(const TensorView& weights, bool gated = false);

struct PackOptions {
  bool exact = false;  // refuse what would change weights, with the place of the largest change
};

// What packing changed of the weights: of |packed - stored| / |stored|, which is 1 for a weight that became 0.
struct PackingError {
  std::int64_t changed = 0;  // weights of which it is not 0
  double max = 0;
  std::int64_t max_row = 0, max_column = 0;  // where the first largest is
};

// Writes out.data, on the CPU. Throws Error on a bad argument, and on a scale or a code that is NaN or infinite, naming
// it, before anything is written; in fragments16 zero points are at most 127. Weights keep their values to the bit but
// for these, which the result counts:
//   mxfp4 in fragments16  what is less than 2^-29 of its row's largest scale becomes 0
//   mxfp4 in fragments8   weights whose scale is less than 2^-11 of the row's largest are rounded to multiples of half
//                         that 2^-11
//   nvfp4 in fragments8   each weight is rounded to e4m3 under a scale of its row, to nearest even: by at most 2^-4 of
//                         it; where its scale is less than 2^-10 of the row's largest, by less than that 2^-10
PackingError pack_weights(const lowbit::QuantizedMatrix& matrix, const PackedWeights& out,
                          const PackOptions& options = {}, const Runtime& runtime = {});

struct UnpackOptions {
  std::string force = {};  // a candidate's name
};

// Writes W [N, K] to `out`, as the packed order has it, each weight rounded once to out's dtype: f32, f16 or bf16, any
// strides that do not overlap. So it makes PackedWeights::kept. On a GPU `out` is on it, and the call does not wait for
// the stream. On the CPU orders rows16, fragments8, matrix and matrix8, on a GPU all.
void unpack_weights(const PackedWeights& weights, const TensorView& out, const UnpackOptions& options = {},
                    const Runtime& runtime = {});

// The candidates for such a call, and which one would run. Reads no data.
std::vector<Candidate> explain_unpack_weights(const PackedWeights& weights, const TensorView& out,
                                              const UnpackOptions& options = {}, const Runtime& runtime = {});

struct LinearOptions {
  Activation activation = Activation::none;
  TensorView bias;      // [N], of x's dtype, contiguous
  TensorView residual;  // as y; may be y itself
  Norm norm = Norm::none;
  TensorView norm_weight;  // [K], of x's dtype, contiguous; not given: ones
  TensorView norm_bias;    // the same, for layer_norm only; not given: zeros
  float norm_eps = 1e-5f;  // finite, >= 0
  // x is rounded to 8 bits, a row's largest number being 127 of its scale, and multiplied in integers: faster and, with
  // x in 8 bits, less exact. For formats whose codes are integers or halves: nvfp4, mxfp4, e2m1_row, int4 and int8_row;
  // on a GPU for int8_row in order matrix.
  bool int8_x = false;
  // A row's bits then depend on that row, W and the processor alone, not on how many rows there are. Without it,
  // bfloat16 products of more than 8 rows are taken in pairs where the processor has them, W rounded to bfloat16.
  bool batch_invariant = false;
  std::string force;  // a candidate's name
};

// x: [..., K], rank 1 to 4, f32, f16 or bf16; y: [..., N], [..., N / 2] with swiglu, of x's dtype. Rows may lie
// anywhere, the last dimension is contiguous. Sums are f32 and y is rounded once. x may have no rows. On a GPU x is f16
// or bf16, rows of x, y and residual lie one stride apart, and begin at multiples of 16 bytes. There what codes stand
// for is multiplied exactly, and scales are applied to sums in f32; only the values of nf4's codes are rounded to x's
// dtype, a relative error of at most 2^-9 (bf16) or 2^-12 (f16) of each weight. The candidate "cublaslt" rounds each
// weight to x's dtype so: that of order matrix, and, where it is faster, of many rows of a bf16 x over fragments16 of
// other formats than nvfp4, mxfp4 and e2m1_row.
void linear_forward(const TensorView& x, const PackedWeights& weights, const TensorView& y,
                    const LinearOptions& options = {}, const Runtime& runtime = {});

// The same for callers that allocate when they know how much: `allocate` is called once with the bytes of workspace,
// unless there are none, and runtime.workspace is not read. Arguments are checked, and a candidate chosen, once.
void linear_forward(const TensorView& x, const PackedWeights& weights, const TensorView& y,
                    const LinearOptions& options, const Runtime& runtime,
                    const std::function<Workspace(std::size_t bytes)>& allocate);

std::size_t linear_forward_workspace(const TensorView& x, const PackedWeights& weights,
                                     const LinearOptions& options = {}, const Runtime& runtime = {});

// The candidates for such a call, and which one would run. Reads no data. On a GPU each says how it compares with a
// product of 16-bit weights (Candidate::of_16bit): where that is above 1, PackedWeights::kept would be faster.
std::vector<Candidate> explain_linear(const TensorView& x, const PackedWeights& weights,
                                      const LinearOptions& options = {}, const Runtime& runtime = {});

// Gradients to write; a view that is not given is not computed. All have x's dtype; vectors are contiguous.
struct LinearGradients {
  TensorView dx;                        // as x
  TensorView dbias;                     // [N]
  TensorView dnorm_weight, dnorm_bias;  // [K]; with layer_norm both, with rms_norm the weight's
};

// Gradients of a loss whose derivative with respect to y is dy. W has none, and the residual's is dy itself. options
// are the forward's; residual is not read. With an activation the sums x W^T + bias are computed again from x; with a
// norm x is read too; with neither it may be absent (not given), so that nothing need be kept of the forward. The
// rounding of int8_x passes gradients on as they are. Sums are f32, gradients are rounded once.
void linear_backward(const TensorView& dy, const TensorView& x, const PackedWeights& weights,
                     const LinearGradients& gradients, const LinearOptions& options = {}, const Runtime& runtime = {});

std::size_t linear_backward_workspace(const TensorView& dy, const TensorView& x, const PackedWeights& weights,
                                      const LinearGradients& gradients, const LinearOptions& options = {},
                                      const Runtime& runtime = {});

std::vector<Candidate> explain_linear_backward(const TensorView& dy, const TensorView& x, const PackedWeights& weights,
                                               const LinearGradients& gradients, const LinearOptions& options = {},
                                               const Runtime& runtime = {});

}  // namespace heddle
