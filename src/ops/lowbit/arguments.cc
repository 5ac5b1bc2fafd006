#include "ops/lowbit/arguments.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>

#include "core/dtypes.h"
#include "core/overlap.h"
#include "lowbit/formats.h"
#include "lowbit/scale_rules.h"

namespace heddle::lowbit {
namespace {

void check_device(const Check& check, const TensorView& view, const char* name, Device device) {
  if (device == Device::cpu) {
    check.require(view.device == device, name,
                  " is on a GPU: ", "this operation runs on the CPU, or all of its tensors are on one GPU");
  } else {
    check.require(view.device == device, name, " is on the CPU and other tensors are on a GPU: they must be on one");
  }
}

// One tensor of a stored matrix against what it must be.
void check_stored(const Check& check, const TensorView& view, const TensorView& wanted, const char* name,
                  const std::string& format, Device device) {
  if (!wanted.given()) {
    check.require(!view.given(), name, " is given and ", format, " has none");
    return;
  }
  check.require(view.given(), name, " is missing: ", format, " has them as ", name_of(wanted.dtype), " ", wanted);
  check.require(view.dtype == wanted.dtype, name, " is ", name_of(view.dtype), ": ", format, " has ",
                name_of(wanted.dtype));
  check_device(check, view, name, device);
  check.require(view.rank == wanted.rank && view.shape == wanted.shape, name, " is ", view, ": it must be ", wanted,
                " for ", format);
  check.require(view.elements() == 0 || view.contiguous(), name, " is not contiguous: it must be");
  check.addressable(view, name);
}

}  // namespace

Weights checked_weights(const Check& check, const TensorView& view, const char* name, std::optional<Device> device) {
  check.require(view.given(), name, " is missing");
  check.require(view.dtype == DType::f32 || view.dtype == DType::f16 || view.dtype == DType::bf16, name, " is ",
                name_of(view.dtype), ": it must be float32, float16 or bfloat16");
  if (device) check_device(check, view, name, *device);
  check.require(view.rank == 2, name, " has ", view.rank, " dimensions: it must be [N, K]; found ", name, " ", view);
  check.addressable(view, name);
  return {static_cast<std::byte*>(view.data), view.dtype, view.stride[0], view.stride[1]};
}

Matrix checked_matrix(const Check& check, const QuantizedMatrix& matrix, const char* name, Device device) {
  const std::string format = name_of(matrix.format);
  const QuantizedMatrix wanted = storage(matrix.format, matrix.rows, matrix.columns);
  const auto stored = [&](const TensorView& view, const TensorView& needed, const char* part) {
    char full[32];  // a string of that length would be allocated
    std::snprintf(full, sizeof full, "%s.%s", name, part);
    check_stored(check, view, needed, full, format, device);
  };
  stored(matrix.codes, wanted.codes, "codes");
  stored(matrix.scales, wanted.scales, "scales");
  stored(matrix.zeros, wanted.zeros, "zeros");
  stored(matrix.global_scale, wanted.global_scale, "global_scale");
  Matrix out;
  out.format = matrix.format;
  out.N = matrix.rows;
  out.K = matrix.columns;
  out.groups = wanted.scales.shape[1];
  out.group = matrix.format.group > 0 ? matrix.format.group : std::max<std::int64_t>(out.K, 1);
  out.row_bytes = wanted.codes.shape[1];
  out.codes = static_cast<std::uint8_t*>(matrix.codes.data);
  out.scales = matrix.scales.data;
  out.zeros = static_cast<std::uint8_t*>(matrix.zeros.data);
  out.global_scale = static_cast<float*>(matrix.global_scale.data);
  return out;
}

const float* checked_importance(const Check& check, const TensorView& importance, ScaleRule rule, std::int64_t K,
                                Device device) {
  if (!importance.given()) return nullptr;
  check.require(searches(rule), "importance is given and rule is ", name_of(rule),
                ": it counts in the searches of four_six and mse");
  check.tensor(importance, "importance", DType::f32, device, 1, "weights");
  check.require(importance.shape[0] == K, "importance is ", importance, ": it must be [K] = [", K, "]");
  check.require(K == 0 || importance.contiguous(), "importance is not contiguous: it must be");
  const auto* values = static_cast<const float*>(importance.data);
  for (std::int64_t k = 0; device == Device::cpu && values != nullptr && k < K; ++k) {
    if (!(values[k] >= 0.0f && std::isfinite(values[k]))) refuse_importance(k, values[k]);
  }
  return values;
}

QuantizeProblem checked_problem(const Check& check, const TensorView& weights, const QuantizeOptions& options,
                                const QuantizedMatrix& out) {
  QuantizeProblem p;
  p.weights = checked_weights(check, weights, "weights", std::nullopt);
  check.require(out.rows == weights.shape[0] && out.columns == weights.shape[1], "out is for a matrix of [", out.rows,
                ", ", out.columns, "] and weights is ", weights, ": they must be equal");
  p.out = checked_matrix(check, out, "out", weights.device);
  check.require(has_rule(out.format, options.rule), "rule is ", name_of(options.rule), ", which ", name_of(out.format),
                " does not have");
  p.rule = options.rule;
  p.importance = checked_importance(check, options.importance, options.rule, p.out.K, weights.device);
  p.global_scale = options.global_scale;
  check.require(p.global_scale >= 0.0f && std::isfinite(p.global_scale), "global_scale is ", p.global_scale,
                ": it must be positive and finite, or 0 for the matrix's own");
  check.require(p.global_scale == 0.0f || out.format.global_scale, "global_scale is given and ", name_of(out.format),
                " has none");
  const TensorView* written[] = {&out.codes, &out.scales, &out.zeros, &out.global_scale};
  const char* names[] = {"out.codes", "out.scales", "out.zeros", "out.global_scale"};
  for (int i = 0; i < 4; ++i) {
    if (!written[i]->given()) continue;
    check.require(!may_share_memory(*written[i], weights), names[i], " shares memory with weights");
    check.require(!options.importance.given() || !may_share_memory(*written[i], options.importance), names[i],
                  " shares memory with importance");
    for (int j = 0; j < i; ++j) {
      check.require(!written[j]->given() || !may_share_memory(*written[i], *written[j]), names[i],
                    " shares memory with ", names[j]);
    }
  }
  return p;
}

void refuse_weight(const Format& format, std::int64_t n, std::int64_t k, float w) {
  const std::string found = text("[quantize] weights[", n, ", ", k, "] is ", w, ": ");
  if (!std::isfinite(w)) throw Error(found + "weights must be finite");
  throw Error(text(found, name_of(format), " has float16 scales, which serve weights up to ", weight_limit(format)));
}

void refuse_importance(std::int64_t k, float value) {
  throw Error(text("[quantize] importance[", k, "] is ", value, ": it must be finite and at least 0"));
}

}  // namespace heddle::lowbit
