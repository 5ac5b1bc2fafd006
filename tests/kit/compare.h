// The accuracy rule and the comparison behind every verdict.
//
// e is the largest error of the plain computation (yardstick.h, linear_layer.h) over the elements of a tensor and over
// four orders of summation, and at least half an ulp of the largest result: no kernel can do better than round it. A
// result passes if none of its elements is off by more than 4 e. e is measured, not derived, so it holds whatever
// amplifies errors in the case at hand: scores in the hundreds, whose error grows with them, make P, and through it
// every sum, as wrong in the plain computation as in a kernel. No term beside e widens the bound.
//
// e is one number for a tensor: by rows or by heads it would be the largest of a few samples only, whose luck would
// decide. So an error is seen if it is one of the tensor's largest; the cases keep magnitudes within a factor of some
// ten for that (rows 4 times as large, values 8 times).
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "kit/host_tensor.h"

namespace heddle::kit {

// Over 1000 seeds, kernels came to 10.4 e where few rows attend anything: e is then the largest of few samples.
constexpr double kFactor = 4, kFactorOfFewRows = 12;
constexpr std::int64_t kFewRows = 128;
// Precision::int8_qk: e is the error of the codes, which a kernel has in common with the plain computation. Where it is
// that of rounding, a kernel may be off by 4 of it as elsewhere.
constexpr double kFactorOfCodes = 2;

// `rows`: how many results were summed independently of each other.
constexpr double factor_of(std::int64_t rows) { return rows < kFewRows ? kFactorOfFewRows : kFactor; }

// A tensor as the plain computation has it, once in each order of summation.
struct PlainTensor {
  std::vector<std::vector<double>> values = {};
  // The largest single term that cancels in a result: where all of them do (a softmax over one key has no gradient),
  // results are 0 and the four sums may be, too, and what is left of a kernel's is half an ulp of that term, in f32.
  double largest_term = 0;
};

struct Comparison {
  std::string tensor;
  double error = 0, plain_error = 0, bound = 0;  // plain_error: e
  double largest = 0;                            // of the reference's magnitudes
  std::int64_t compared = 0;
  std::uint64_t digest = 0;  // of the values, bit by bit, and of their order
  bool passed = false;
  std::string worst;  // coordinate and values of the worst element
};

// max|out - reference| <= factor * e. NaN fails; where the reference is infinite or NaN the output must be the same,
// and the other way round. dtype: out's.
Comparison compare(const std::string& tensor, std::span<const double> out, std::span<const double> reference,
                   const PlainTensor& plain, const std::vector<std::int64_t>& shape, DType dtype, double factor);

// Where compare() could not fail on such a tensor, a sentence each; empty if nowhere: the reference, rounded to dtype,
// must pass; with one element off by 16 e it must not, nor may zeros in its place.
std::string blind_spots(const std::string& tensor, std::span<const double> reference, const PlainTensor& plain,
                        const std::vector<std::int64_t>& shape, DType dtype, double factor);

// A tensor to be judged: what kernels wrote it to, and by what. One that is not given is passed over.
struct Judged {
  std::string name;
  const HostTensor* out;
  const std::vector<double>* reference;
  const PlainTensor* plain;
  double factor;
};
Comparison compare(const Judged& x);
// Those of the tensors that are given, whatever is in them.
std::string blind_spots(std::span<const Judged> tensors);

// By a bound that was derived, element by element: |out - reference| <= allowed(reference), and NaN fails too. What is
// kept as error and bound is the element's that comes closest to its own.
Comparison compare_within(const std::string& tensor, std::span<const double> out, std::span<const double> reference,
                          const std::vector<std::int64_t>& shape, const std::function<double(double)>& allowed);

}  // namespace heddle::kit
