// The candidates "cuda" for quantisation, its undoing, and packed weights as floats.
#include <bit>
#include <cmath>
#include <limits>

#include "cuda/any/lowbit/host.h"
#include "cuda/any/moved_bytes.h"
#include "cuda/common/requirements.h"
#include "cuda/kernels.h"
#include "cuda/linear.h"
#include "lowbit/formats.h"
#include "lowbit/scale_rules.h"

namespace heddle::cuda {
namespace {

using lowbit::DequantizeProblem;
using lowbit::QuantizeCall;
using lowbit::QuantizeProblem;

// `out` is written before its weights are known: the host waits once, and reads back what was found of them.
void launch_quantize(const QuantizeCall& call, const Runtime& runtime) {
  const QuantizeProblem& p = call.problem;
  void* const memory = runtime.workspace.data;
  const QuantizeFindings found = quantize(p, memory, runtime.stream);
  if (p.importance != nullptr && found.bad_importance < p.out.K) {
    call.found->importance = {found.bad_importance, importance_at(p, found.bad_importance, runtime.stream)};
    return;
  }
  const auto largest = std::bit_cast<float>(found.largest);
  const float served = lowbit::weight_limit(p.out.format);
  if (largest <= served) return;
  const float limit = std::isfinite(largest) ? served : std::numeric_limits<float>::max();
  const FoundWeight bad = first_weight_beyond(p, limit, memory, runtime.stream);
  call.found->weight = {bad.row, bad.column, bad.value};
}

// Bytes a second as measured on an H200 of bfloat16 weights: those that are read and written once, by rule; and of the
// matrix that is read before for its own global scale.
double rate_of(const QuantizeProblem& p) {
  constexpr double kPlain = 2.6e12, kTwoScales = 0.26e12, kNeighbours = 0.07e12, kGrid = 0.02e12;
  if (p.rule == lowbit::ScaleRule::four_six) return kTwoScales;
  if (p.rule != lowbit::ScaleRule::mse) return kPlain;
  return p.out.format.element == lowbit::Element::e2m1 ? kNeighbours : kGrid;
}

double estimate_quantize(const QuantizeCall& call, int /*workers*/) {
  constexpr double kReadBack = 50e-6, kRead = 3.4e12;
  const QuantizeProblem& p = call.problem;
  const double weights = static_cast<double>(p.out.N * p.out.K) * static_cast<double>(size_of(p.weights.dtype));
  const bool own_scale = p.out.format.global_scale && p.global_scale == 0.0f;
  return kReadBack + any::seconds_of_moving(call.bytes(), rate_of(p)) + (own_scale ? weights / kRead : 0.0);
}

// The same, of codes in 4 bits and in 8.
double decode_rate(const lowbit::Format& format) { return lowbit::bits_of(format.element) == 8 ? 3.1e12 : 2.1e12; }

std::string describe_quantize(const QuantizeCall& call, int /*workers*/) {
  const QuantizeProblem& p = call.problem;
  const bool own_scale = p.out.format.global_scale && p.global_scale == 0.0f;
  return std::string(lowbit::searches(p.rule) ? "a team of threads searches each group's scale"
                                              : "a team of threads for each group") +
         (own_scale ? ", after the matrix's own global scale" : "") + "; the host waits for what was found";
}

}  // namespace

const lowbit::QuantizeKernel kQuantize = {
    .name = "cuda",
    .method = "quantize",
    .device = Device::cuda,
    .automatic = true,
    .supports = [](const QuantizeCall&) { return refuse_before_ampere(); },
    .estimate = estimate_quantize,
    .workspace = [](const QuantizeCall&, int) { return kQuantizeWorkspace; },
    .launch = launch_quantize,
    .describe = describe_quantize,
};

const lowbit::DequantizeKernel kDequantize = {
    .name = "cuda",
    .method = "dequantize",
    .device = Device::cuda,
    .automatic = true,
    .supports = [](const DequantizeProblem&) { return refuse_before_ampere(); },
    .estimate = [](const DequantizeProblem& p,
                   int) { return any::seconds_of_moving(p.bytes(), decode_rate(p.matrix.format)); },
    .workspace = no_workspace,
    .launch = [](const DequantizeProblem& p, const Runtime& runtime) { dequantize(p.matrix, p.out, runtime.stream); },
    .describe = [](const DequantizeProblem&, int) { return std::string("8 columns a thread"); },
};

const UnpackKernel kUnpackWeights = {
    .name = "cuda",
    .method = "unpack",
    .device = Device::cuda,
    .automatic = true,
    .supports = [](const UnpackProblem&) { return refuse_before_ampere(); },
    .estimate = [](const UnpackProblem& p,
                   int) { return any::seconds_of_moving(p.bytes(), decode_rate(p.weights.format)); },
    .workspace = no_workspace,
    .launch =
        [](const UnpackProblem& p, const Runtime& runtime) {
          const LayerWeights& w = p.weights;
          decode_weights(w, {.rows = w.N, .columns = w.K}, p.out, runtime.stream);
        },
    .describe = [](const UnpackProblem& p, int) -> std::string {
      const bool plain = p.weights.order == WeightOrder::matrix || p.weights.order == WeightOrder::matrix8;
      return plain ? "8 columns a thread" : "tiles of fragments, turned in shared memory";
    },
};

}  // namespace heddle::cuda
