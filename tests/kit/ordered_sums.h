// Sums of products in float32 in the orders that kernels use, for the plain computation.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "heddle/tensor.h"

namespace heddle::kit {

enum class Order : std::uint8_t {
  forward,   // one term after the other, as loops and FMA chains of a register tile do
  backward,  // the same from the last term on
  blocks,    // 4 terms at a time, their sums one after the other, as steps of tiles do
  lanes,     // every 16th term, and those 16 sums in pairs, as SIMD lanes and split sums do
};
inline constexpr std::array kOrders = {Order::forward, Order::backward, Order::blocks, Order::lanes};

// How one computation sums: in f32, each addition rounded to nearest, or as tensor cores do (bits > 0): `group`
// products and what was summed before are cut off, towards zero, at 2^-bits of the largest of them; sums of `flush`
// products are added in f32.
struct Summation {
  Order order = Order::forward;
  int bits = 0, group = 16, flush = 1 << 30;
  bool fma = false;  // Order::forward: products are not rounded before they are added
};

// out[c] = sum over n of a[n * a_stride] * b[n * b_stride + c], for c in [0, columns). Terms with a = 0 are not looked
// at: what stands beside them in b may be anything.
void sum_products(const Summation& how, std::int64_t terms, const float* a, std::int64_t a_stride, const float* b,
                  std::int64_t b_stride, std::int64_t columns, float* out);
// In double, where no order is asked for.
void sum_products(const Summation& how, std::int64_t terms, const double* a, std::int64_t a_stride, const double* b,
                  std::int64_t b_stride, std::int64_t columns, double* out);
// Of numbers, in f32.
float sum(Order order, const std::vector<float>& values);
double sum(Order order, const std::vector<double>& values);

// Sums of many elements, whose terms come from one row after the other. The owner visits rows in `order` (backward: the
// last first); blocks: an element's terms between two calls of flush() are summed on their own.
class ElementSums {
 public:
  ElementSums(Order order, std::int64_t elements);
  void add(std::int64_t element, std::int64_t row, float term) {
    sums_[order_ == Order::lanes ? row % kLanes : 0][element] += term;
  }
  void flush();
  std::vector<float> finish();

 private:
  static constexpr std::int64_t kLanes = 8;
  Order order_;
  std::vector<std::vector<float>> sums_;
  std::vector<float> total_;
};

}  // namespace heddle::kit
