#include "core/overlap.h"
#include "ops/linear/arguments.h"

namespace heddle {
namespace {

struct Named {
  const char* name;
  const TensorView& view;
};

class LinearBackwardChecks {
 public:
  LinearBackwardChecks(const Check& check, const TensorView& dy, const TensorView& x, const PackedWeights& weights,
                       const LinearGradients& gradients, const LinearOptions& options)
      : check_(check), dy_(dy), x_(x), weights_(weights), gradients_(gradients), options_(options) {}

  LinearBackwardProblem problem() const {
    check_dy();
    check_x();
    LinearBackwardProblem p;
    p.forward = forward();
    p.dy = rows_of(dy_);
    if (gradients_.dx.given()) {
      const TensorView wanted = rows_like_dy(weights_.columns);
      check_.tensor(gradients_.dx, "dx", dy_.dtype, dy_.device, dy_.rank, "dy");
      check_.require(gradients_.dx.shape == wanted.shape, "dx is ", gradients_.dx, ": it must be ", wanted, ", as x");
      check_contiguous_rows(check_, gradients_.dx, "dx");
      p.dx = rows_of(gradients_.dx);
    }
    p.dbias = vector(gradients_.dbias, "dbias", "[N]", weights_.rows);
    const Norm norm = options_.norm;
    check_.require(norm != Norm::none || !gradients_.dnorm_weight.given(), "dnorm_weight is given and norm is none");
    check_.require(norm == Norm::layer_norm || !gradients_.dnorm_bias.given(), "dnorm_bias is given and norm is ",
                   name_of(norm), ": only layer_norm has one");
    p.dnorm_weight = vector(gradients_.dnorm_weight, "dnorm_weight", "[K]", weights_.columns);
    p.dnorm_bias = vector(gradients_.dnorm_bias, "dnorm_bias", "[K]", weights_.columns);
    check_apart();
    return p;
  }

 private:
  // A view with dy's leading dimensions, for its shape.
  TensorView rows_like_dy(std::int64_t width) const {
    TensorView view = dy_;
    view.shape[dy_.rank - 1] = width;
    return view;
  }

  void check_dy() const {
    check_.require(dy_.given(), "dy is missing");
    check_linear_dtype(check_, dy_, "dy");
    check_.require(dy_.device == weights_.device, "dy is on another device than weights");
    check_.addressable(dy_, "dy");
    const std::int64_t outputs = weights_.gated ? weights_.rows / 2 : weights_.rows;
    check_.require(dy_.shape[dy_.rank - 1] == outputs, "dy is ", dy_, " and weights have ", weights_.rows, " rows",
                   weights_.gated ? ", gated" : "", ": dy must be [..., ", outputs, "]");
    check_contiguous_rows(check_, dy_, "dy");
  }

  bool reads_x() const { return options_.activation != Activation::none || options_.norm != Norm::none; }

  void check_x() const {
    if (!x_.given()) {
      check_.require(!reads_x(), "x is missing: with an activation or a norm it is read again");
      return;
    }
    check_.tensor(x_, "x", dy_.dtype, dy_.device, dy_.rank, "dy");
    const TensorView wanted = rows_like_dy(weights_.columns);
    check_.require(x_.shape == wanted.shape, "x is ", x_, ": it must be ", wanted, " for dy ", dy_);
  }

  LinearProblem forward() const {
    LinearOptions options = options_;
    options.residual = {};
    if (reads_x()) return checked_linear_problem(check_, x_, weights_, {}, options);
    // Nothing is read of x, which so needs no data; the weights do as ever.
    check_packed(check_, weights_, "weights");
    if (weights_.kept.given()) check_kept(check_, weights_, "weights.kept");
    TensorView x = rows_like_dy(weights_.columns);
    x.stride = contiguous_strides(x.rank, x.shape);
    x.data = nullptr;
    LinearProblem p = checked_linear_problem(check_.without_data(), x, weights_, {}, options);
    p.x = {};
    return p;
  }

  std::byte* vector(const TensorView& view, const char* name, const char* shape, std::int64_t count) const {
    if (!view.given()) return nullptr;
    check_.tensor(view, name, dy_.dtype, dy_.device, 1, "dy");
    check_.require(view.shape[0] == count, name, " is ", view, ": it must be ", shape, " = [", count, "]");
    check_.require(count <= 1 || view.stride[0] == 1, name, " has stride ", view.stride[0], ": it must be contiguous");
    return static_cast<std::byte*>(view.data);
  }

  void check_apart() const {
    const Named written[] = {{"dx", gradients_.dx},
                             {"dbias", gradients_.dbias},
                             {"dnorm_weight", gradients_.dnorm_weight},
                             {"dnorm_bias", gradients_.dnorm_bias}};
    const Named read[] = {{"dy", dy_},
                          {"x", x_},
                          {"weights.data", weights_.data},
                          {"bias", options_.bias},
                          {"norm_weight", options_.norm_weight},
                          {"norm_bias", options_.norm_bias}};
    for (const Named& to : written) {
      if (!to.view.given()) continue;
      check_.not_overlapping(to.view, to.name);
      for (const Named& from : read) {
        check_.require(!from.view.given() || !may_share_memory(to.view, from.view), to.name, " shares memory with ",
                       from.name);
      }
      for (const Named& other : written) {
        if (&other == &to) break;
        check_.require(!other.view.given() || !may_share_memory(to.view, other.view), to.name, " shares memory with ",
                       other.name);
      }
    }
  }

  const Check& check_;
  const TensorView& dy_;
  const TensorView& x_;
  const PackedWeights& weights_;
  const LinearGradients& gradients_;
  const LinearOptions& options_;
};

}  // namespace

LinearBackwardProblem checked_linear_backward_problem(const Check& check, const TensorView& dy, const TensorView& x,
                                                      const PackedWeights& weights, const LinearGradients& gradients,
                                                      const LinearOptions& options) {
  return LinearBackwardChecks(check, dy, x, weights, gradients, options).problem();
}

}  // namespace heddle
