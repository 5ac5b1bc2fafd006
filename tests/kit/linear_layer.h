// One linear layer over packed weights for tests: its tensors, its double-precision result and the plain computation:
// normalised rows, weights, sums, activations and the sum with the residual each rounded to x's dtype, sums in f32 and
// in the orders of ordered_sums.h (blocks: as tensor cores add up 16-bit and e4m3 products).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "heddle/linear.h"
#include "kit/compare.h"
#include "kit/host_tensor.h"
#include "kit/lowbit_weights.h"
#include "kit/ordered_sums.h"

namespace heddle::kit {

// Packed weights between guard zones.
class PackedMemory {
 public:
  explicit PackedMemory(const PackedWeights& described);
  explicit PackedMemory(const lowbit::QuantizedMatrix& matrix, bool gated = false,
                        WeightOrder order = WeightOrder::rows16);

  const PackedWeights& weights() const { return weights_; }
  PackedWeights& weights() { return weights_; }
  bool guards_intact() const;
  bool untouched() const;

 private:
  static constexpr std::size_t kGuard = 64;
  static constexpr std::byte kPoison{0xA5};
  std::vector<std::byte> memory_;
  PackedWeights weights_;
};

struct LinearCase {
  std::string format = "nvfp4";
  std::vector<std::int64_t> rows = {1};  // x is [rows..., K]
  std::int64_t N = 64, K = 64;
  DType dtype = DType::f32;
  Activation activation = Activation::none;
  bool bias = false, residual = false, in_place = false;  // in_place: y is the residual
  bool int8_x = false;
  WeightOrder order = WeightOrder::rows16;  // fragments8, matrix8: x is rounded to e4m3
  Norm norm = Norm::none;
  bool norm_weight = true, norm_bias = true;  // the bias of layer_norm only
  float norm_eps = 1e-5f;
  double x_mean = 0;  // what is added to every x
  Layout layout = Layout::contiguous;
  std::uint32_t seed = 1;
  int more_zero = 0;  // what is added to every zero point after quantising
  // Binades by which scales are raised after quantising, and x is lowered: raised for every second 32 columns of mxfp4;
  // all_raised for scales, or global scales, in e8m0 or f32, x by at most 13 of them, which float16 holds.
  int raised = 0, all_raised = 0;
};

// How many times e a tensor of the case may be off: y, or the gradient of x, b: bias, w and n: the norm's weight and
// bias.
double allowed_factor(const LinearCase& c, char tensor);

class LinearLayer {
 public:
  explicit LinearLayer(const LinearCase& c);

  LinearOptions options() const;
  std::vector<std::int64_t> shape() const;  // of y
  HostTensor output() const;                // what y is before the call

  // Runs with the target in use; the verdict names the worst element and what else went wrong.
  Comparison run(const LinearOptions& options) const;
  Comparison run() const { return run(options()); }
  // What a call has written, from output().
  Comparison compare(const HostTensor& y) const;
  std::string blind_spots() const;

  const LinearCase& given() const { return c_; }
  std::int64_t rows() const { return M_; }

  // Row m of x as products take it, after the norm: in double; plainly: in f32, and rounded to x's dtype.
  std::vector<double> operands(std::int64_t m) const;
  std::vector<float> plain_operands(std::int64_t m, Order order) const;
  // Row m times the weights, rounded to x's dtype, plus the bias, rounded.
  std::vector<double> plain_sums(std::int64_t m, Order order) const;
  // Of products of x's dtype, or of e4m3.
  Summation summation(Order order) const;
  // y before it is rounded, and the largest sum of |terms| of any y.
  const std::vector<double>& exact() const { return reference_; }
  double terms() const { return terms_; }
  // The stored weights, [N, K]; in fragments8 as products have them.
  const std::vector<double>& weights() const { return weights_; }
  // [N, K], rounded to x's dtype.
  const std::vector<float>& weight_rows() const { return weight_rows_; }

  HostTensor x, bias, residual, norm_weight, norm_bias;
  QuantizedMemory quantized;
  PackedMemory packed;

 private:
  Judged judged(const HostTensor& y) const;
  void read_weights();
  void compute();
  std::vector<double> plainly(Order order) const;

  LinearCase c_;
  std::int64_t M_ = 1, outputs_ = 0;
  std::vector<double> weights_, reference_;
  std::vector<float> weight_rows_, weight_columns_;  // [N, K] and [K, N], rounded to x's dtype
  PlainTensor plain_;
  double terms_ = 0;
};

// linear_forward() with a workspace of exactly what it asks for, on `executor`.
void call_linear(const TensorView& x, const PackedWeights& weights, const TensorView& y, const LinearOptions& options,
                 Executor* executor = nullptr);

}  // namespace heddle::kit
