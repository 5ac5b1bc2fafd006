#include "ops/linear/arguments.h"

#include <algorithm>
#include <cmath>

#include "core/overlap.h"
#include "lowbit/formats.h"

namespace heddle {
namespace {

std::int64_t count_of(const RowsOf& rows) { return rows.shape[0] * rows.shape[1] * rows.shape[2]; }

class LinearChecks {
 public:
  LinearChecks(const Check& check, const TensorView& x, const PackedWeights& weights, const TensorView& y,
               const LinearOptions& options, const char* y_name)
      : check_(check), x_(x), weights_(weights), y_(y), options_(options), y_name_(y_name) {}

  LinearProblem problem() const {
    check_packed(check_, weights_, "weights");
    const bool for_cpu = weights_.order == WeightOrder::rows16;
    check_.require(for_cpu == (weights_.device == Device::cpu), "weights are in order ", name_of(weights_.order),
                   " on a ", for_cpu ? "GPU" : "CPU", ": order rows16 is for CPUs, the others are for GPUs");
    LinearProblem p;
    static_cast<LayerWeights&>(p) = layer_weights(weights_);
    if (weights_.kept.given()) check_kept(check_, weights_, "weights.kept");
    check_x();
    p.device = x_.device;
    p.dtype = x_.dtype;
    p.x = rows_of(x_);
    p.M = count_of(p.x);
    p.activation = options_.activation;
    const bool gated = p.activation == Activation::swiglu;
    check_.require(gated == weights_.gated, "activation is ", name_of(p.activation), " and weights are packed ",
                   weights_.gated ? "for swiglu" : "without gates", ": swiglu takes weights packed as gated, and no ",
                   "other activation does");
    p.outputs = gated ? p.N / 2 : p.N;
    if (y_.given()) {
      like_x(y_, y_name_, p.outputs);
      check_.not_overlapping(y_, y_name_);
      apart("x", x_);
      if (weights_.data.given()) apart("weights.data", weights_.data);
      if (weights_.kept.given()) apart("weights.kept", weights_.kept);
      p.y = rows_of(y_);
    }
    if (options_.bias.given()) p.bias = vector(options_.bias, "bias", "[N]", p.N);
    p.norm = norm();
    if (options_.residual.given()) p.residual = residual(p.outputs);
    p.int8_x = options_.int8_x;
    const bool dense = weights_.order == WeightOrder::dense;
    check_.require(!p.int8_x || (!dense && lowbit::has_integers(weights_.format)), "int8_x is set and weights are ",
                   dense ? "not quantised" : lowbit::name_of(weights_.format),
                   ": products in integers take nvfp4, mxfp4, e2m1_row, int4 and int8_row");
    p.batch_invariant = options_.batch_invariant;
    return p;
  }

 private:
  void check_x() const {
    check_.require(x_.given(), "x is missing");
    check_linear_dtype(check_, x_, "x");
    check_.require(x_.device == weights_.device, "x is on another device than weights");
    check_.addressable(x_, "x");
    check_.require(x_.shape[x_.rank - 1] == weights_.columns, "x is ", x_, " and weights have ", weights_.columns,
                   " columns: x must be [..., ", weights_.columns, "]");
    check_contiguous_rows(check_, x_, "x");
  }

  // [..., width], with x's leading dimensions, dtype and device.
  void like_x(const TensorView& view, const char* name, std::int64_t width) const {
    check_.tensor(view, name, x_.dtype, x_.device, x_.rank, "x");
    TensorView wanted = x_;
    wanted.shape[x_.rank - 1] = width;
    check_.require(view.shape == wanted.shape, name, " is ", view, ": it must be ", wanted, " for x ", x_,
                   " and weights of ", weights_.rows, " rows", weights_.gated ? ", gated" : "");
    check_contiguous_rows(check_, view, name);
  }

  void apart(const char* name, const TensorView& read) const {
    check_.require(!may_share_memory(y_, read), y_name_, " shares memory with ", name);
  }

  const std::byte* vector(const TensorView& given, const char* name, const char* shape, std::int64_t count) const {
    check_.tensor(given, name, x_.dtype, x_.device, 1, "x");
    check_.require(given.shape[0] == count, name, " is ", given, ": it must be ", shape, " = [", count, "]");
    check_.require(count <= 1 || given.stride[0] == 1, name, " has stride ", given.stride[0],
                   ": it must be contiguous");
    if (y_.given()) apart(name, given);
    return static_cast<const std::byte*>(given.data);
  }

  RowNorm norm() const {
    RowNorm norm;
    norm.kind = options_.norm;
    norm.eps = static_cast<double>(options_.norm_eps);
    const bool none = norm.kind == Norm::none;
    check_.require(norm.kind <= Norm::rms_norm, "norm is ", static_cast<int>(norm.kind), ": it is none of the norms");
    check_.require(!none || !options_.norm_weight.given(), "norm_weight is given and norm is none");
    check_.require(norm.kind == Norm::layer_norm || !options_.norm_bias.given(), "norm_bias is given and norm is ",
                   name_of(norm.kind), ": only layer_norm has one");
    check_.require(none || (norm.eps >= 0 && std::isfinite(norm.eps)), "norm_eps is ", norm.eps,
                   ": it must be finite and not negative");
    const std::int64_t K = weights_.columns;
    if (options_.norm_weight.given()) norm.weight = vector(options_.norm_weight, "norm_weight", "[K]", K);
    if (options_.norm_bias.given()) norm.bias = vector(options_.norm_bias, "norm_bias", "[K]", K);
    for (const TensorView* view : {&options_.norm_weight, &options_.norm_bias}) {
      if (view->given()) norm.alignment = std::min(norm.alignment, alignment_of(*view));
    }
    return norm;
  }

  RowsOf residual(std::int64_t width) const {
    const TensorView& residual = options_.residual;
    like_x(residual, "residual", width);
    if (y_.given()) {
      const bool in_place = residual.data == y_.data && residual.stride == y_.stride;
      check_.require(in_place || !may_share_memory(y_, residual), y_name_,
                     " shares memory with residual: it must be the residual itself or lie apart");
    }
    return rows_of(residual);
  }

  const Check& check_;
  const TensorView& x_;
  const PackedWeights& weights_;
  const TensorView& y_;
  const LinearOptions& options_;
  const char* y_name_;
};

}  // namespace

RowsOf rows_of(const TensorView& view) {
  RowsOf rows;
  rows.data = static_cast<std::byte*>(view.data);
  rows.dtype = view.dtype;
  rows.given = true;
  rows.alignment = static_cast<std::uint16_t>(alignment_of(view));
  for (int i = 0; i + 1 < view.rank; ++i) {
    const int at = 3 - (view.rank - 1) + i;
    rows.shape[at] = view.shape[i];
    rows.stride[at] = view.stride[i];
  }
  return rows;
}

void check_contiguous_rows(const Check& check, const TensorView& view, const char* name) {
  const int last = view.rank - 1;
  check.require(view.shape[last] <= 1 || view.stride[last] == 1, name, "'s last dimension has stride ",
                view.stride[last], ": it must be 1");
}

void check_linear_dtype(const Check& check, const TensorView& view, const char* name) {
  check.require(view.dtype == DType::f32 || view.dtype == DType::f16 || view.dtype == DType::bf16, name, " is ",
                name_of(view.dtype), ": it must be float32, float16 or bfloat16");
}

void check_kept(const Check& check, const PackedWeights& weights, const char* name) {
  const TensorView& kept = weights.kept;
  check.require(weights.device == Device::cuda, name, " is given and weights are on the CPU: it is for GPUs");
  check.require(kept.dtype == DType::f16 || kept.dtype == DType::bf16, name, " is ", heddle::name_of(kept.dtype),
                ": it must be float16 or bfloat16");
  check.tensor(kept, name, kept.dtype, weights.device, 2, "weights");
  check.require(kept.shape[0] == weights.rows && kept.shape[1] == weights.columns && kept.contiguous(), name, " is ",
                kept, ": it must be [", weights.rows, ", ", weights.columns, "], contiguous");
  check.addressable(kept, name);
}

void check_packed(const Check& check, const PackedWeights& weights, const char* name) {
  if (weights.order == WeightOrder::dense) {
    check.require(!weights.data.given(), name, ".data is given: order dense has ", name, ".kept alone");
    check.require(weights.kept.given(), name, ".kept is missing: in order dense it is W");
    check.require(!weights.gated || weights.rows % 2 == 0, name, ".rows is ", weights.rows,
                  ": gated weights have an even number of rows");
    return;
  }
  const PackedWeights wanted =
      packed_storage(weights.format, weights.rows, weights.columns, weights.gated, weights.order);
  const std::string data = std::string(name) + ".data";
  check.require(weights.data.given(), data, " is missing: it must be uint8 ", wanted.data);
  check.require(weights.data.dtype == DType::u8, data, " is ", name_of(weights.data.dtype), ": it must be uint8");
  check.require(weights.data.device == weights.device, data, " is on another device than ", name, " say");
  check.require(weights.data.rank == 1 && weights.data.shape == wanted.data.shape, data, " is ", weights.data,
                ": it must be ", wanted.data, " for ", lowbit::name_of(weights.format), " [", weights.rows, ", ",
                weights.columns, "] in order ", name_of(weights.order));
  check.require(weights.data.contiguous(), data, " is not contiguous: it must be");
  check.addressable(weights.data, data.c_str());
  check.require(weights.data.data == nullptr || alignment_of(weights.data) >= 64, data, " must be aligned to 64 bytes");
}

LayerWeights layer_weights(const PackedWeights& weights) {
  LayerWeights p;
  p.format = weights.format;
  p.order = weights.order;
  p.gated = weights.gated;
  p.N = weights.rows;
  p.K = weights.columns;
  p.device = weights.device;
  auto* const data = static_cast<std::byte*>(weights.data.data);
  switch (weights.order) {
    case WeightOrder::rows16:
      p.packed = panels_of(weights);
      break;
    case WeightOrder::matrix:
    case WeightOrder::matrix8:
      p.packed = lowbit::matrix_at(weights.format, weights.rows, weights.columns, data);
      break;
    case WeightOrder::dense:
      break;
    default:
      p.packed = Fragments{lowbit::fragment_layout(weights.format, weights.order, weights.rows, weights.columns), data};
  }
  if (weights.kept.given()) {
    p.kept = KeptWeights{static_cast<const std::byte*>(weights.kept.data), weights.kept.dtype};
  }
  return p;
}

lowbit::Panels panels_of(const PackedWeights& weights) {
  return {weights.format, lowbit::panel_layout(weights.format, weights.rows, weights.columns),
          static_cast<const std::uint8_t*>(weights.data.data)};
}

LinearProblem checked_linear_problem(const Check& check, const TensorView& x, const PackedWeights& weights,
                                     const TensorView& y, const LinearOptions& options, const char* y_name) {
  return LinearChecks(check, x, weights, y, options, y_name).problem();
}

}  // namespace heddle
