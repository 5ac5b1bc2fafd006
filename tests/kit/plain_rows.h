// One kv head's operands and one row's softmax in the plain computation; yardstick.h says how it rounds.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "core/dtypes.h"
#include "kit/ordered_sums.h"
#include "problem/attention.h"

namespace heddle::kit {

using Row = std::vector<float>;

// Mistakes for tests of the rule: what a kernel with one of them would compute.
enum class Fault : std::uint8_t {
  none,
  unsmoothed_keys,    // Precision::int8_qk: no mean is taken off k
  scores_in_tf32,     // f32 operands: q rounded to tf32 on its way into q k
  values_in_tf32,     // P on its way into P V
  gradients_in_tf32,  // dO on its way into dP = dO V
};

// One way to do the plain computation: an order of sums, and what goes with it in real programs.
struct Arithmetic {
  Order order = Order::forward;
  bool fused = false;  // powers of two, P not divided by its sum before it is rounded, delta from the rounded o
  Fault fault = Fault::none;
  bool rounds_int4_query = false;  // fused, keys in 4 bits: q times a key's scale is rounded to f16

  bool scales_query() const { return order == Order::backward || order == Order::lanes; }
};

inline float round_to(DType dtype, float value) {
  switch (dtype) {
    case DType::bf16:
      return bf16_to_f32(f32_to_bf16(value));
    case DType::f16:
      return f16_to_f32(f32_to_f16(value));
    case DType::f8e4m3:
      return f8e4m3_to_f32(f32_to_f8e4m3(value));
    default:
      return value;
  }
}

// Under Precision::tf32: x as a product takes it. Else x.
float operand(const AttentionProblem& p, const Arithmetic& how, float x);
Row operands(const AttentionProblem& p, const Arithmetic& how, Row row);
float rounded_to_tf32(float x);

// Of the products of scores and of all others.
Summation sums_of_scores(const AttentionProblem& p, const Arithmetic& how);
Summation sums_of_values(const AttentionProblem& p, const Arithmetic& how);

// A matrix of f32, its rows one after the other.
struct Rows32 {
  std::int64_t columns = 0;
  std::vector<float> values;

  Rows32(std::int64_t rows, std::int64_t width) : columns(width), values(rows * width) {}
  float* row(std::int64_t n) { return values.data() + n * columns; }
  const float* row(std::int64_t n) const { return values.data() + n * columns; }
  std::int64_t rows() const { return columns > 0 ? static_cast<std::int64_t>(values.size()) / columns : 0; }
  Rows32 transposed() const;
};

// The keys and values of one kv head of one sequence, as products take them.
struct PlainKeys {
  Sequence s;
  Rows32 k, v, k_columns, v_columns;  // [sk, D], [sk, Dv], and transposed
  Row mean;                           // that k lacks under Precision::int8_qk
  Row v_share;  // f8e4m3 and fused: v's scale over the largest of the tile, by which P is multiplied

  PlainKeys(const AttentionProblem& p, const Arithmetic& how, std::int64_t b, std::int64_t kv_head);
};

// softmax of one row, over the keys [begin, end) that causality and window leave; entries of removed pairs are 0.
struct PlainSoftmax {
  std::int64_t begin = 0, end = 0;
  Row p;      // probabilities, not rounded; fused: exponentials, which `sum` has yet to divide
  Row keep;   // dropout's factor
  Row slope;  // d s / d (q . k)
  // Fused: in units of log 2, and as FMA sees a product, not rounded.
  std::vector<double> score;
  bool fused = false;
  float sum = 1, lse = -std::numeric_limits<float>::infinity(), sink = 0;  // sink: its probability

  bool empty() const;
  // Probability of key begin + n as a fused backward has it: from the score and lse, a float32.
  float from_lse(std::int64_t n, float lse) const;
};

Row plain_query(const AttentionProblem& p, const Arithmetic& how, const Sequence& s, std::int64_t b, std::int64_t h,
                std::int64_t i);
PlainSoftmax plain_softmax(const AttentionProblem& p, const Arithmetic& how, const PlainKeys& keys, std::int64_t b,
                           std::int64_t h, std::int64_t i, const Row& query);

}  // namespace heddle::kit
