// Gradients of one linear layer for tests: in double, plainly, and what linear_backward makes of them.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "kit/linear_layer.h"

namespace heddle::kit {

class LinearGradientLayer {
 public:
  explicit LinearGradientLayer(const LinearCase& c);

  // Runs with the target in use, for the gradients whose letter is in `wanted` (x, b: bias, w, n: the norm's weight and
  // bias), and compares. with_x: false leaves x out.
  std::vector<Comparison> run(const LinearOptions& options, const std::string& wanted = "xbwn", bool with_x = true,
                              Executor* executor = nullptr) const;

  // The gradient of that letter before the call, and compared with what a call has written.
  HostTensor output(char letter) const;
  Comparison compare(char letter, const HostTensor& found) const;
  // Of the gradients whose letter is in `wanted`, as run() writes them.
  std::string blind_spots(const std::string& wanted = "xbwn") const;

  // sum over j of dy[m, j] * y(x)[j] in double, for a row x instead of x[m].
  double loss(std::int64_t m, const std::vector<double>& x) const;
  // In double; x: [M, K].
  const std::vector<double>& exact(char letter) const { return of(exact_, letter); }

  LinearLayer layer;
  HostTensor dy;

 private:
  struct Gradients {
    std::vector<double> dx, dbias, dnorm_weight, dnorm_bias;
  };
  static const std::vector<double>& of(const Gradients& gradients, char letter);
  bool has(char letter) const;
  Judged judged(char letter, const HostTensor& found) const;
  struct Row;
  struct PlainRow;
  void leave_out_kinks();
  void compute();
  std::vector<double> exact_sums(const std::vector<double>& x) const;
  Row row(std::int64_t m) const;
  PlainRow plain_row(std::int64_t m, Order order) const;
  Gradients plainly(Order order) const;

  Gradients exact_;
  std::map<char, PlainTensor> plain_;
};

// linear_backward() with a workspace of exactly what it asks for.
void call_linear_backward(const TensorView& dy, const TensorView& x, const PackedWeights& weights,
                          const LinearGradients& gradients, const LinearOptions& options, Executor* executor = nullptr);

}  // namespace heddle::kit
