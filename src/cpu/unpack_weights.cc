// Packed weights as floats, a row a task.
#include "cpu/unpack_weights.h"

#include "core/check.h"
#include "core/dtypes.h"
#include "core/parallel.h"
#include "cpu/lowbit.h"
#include "lowbit/fragments.h"
#include "lowbit/packed.h"

namespace heddle::cpu {
namespace {

bool in_matrix(const LayerWeights& weights) {
  return weights.order == WeightOrder::matrix || weights.order == WeightOrder::matrix8;
}

Refusal supports(const UnpackProblem& p) {
  const WeightOrder order = p.weights.order;
  if (in_matrix(p.weights) || order == WeightOrder::rows16 || order == WeightOrder::fragments8) return "";
  return text("weights are in order ", name_of(order),
              " on the CPU: there, orders rows16, fragments8, matrix and matrix8 are unpacked");
}

// value(n, k): weight [n, k].
template <class Value>
void unpack(const UnpackProblem& p, Executor& executor, const Value& value) {
  parallel_for(executor, p.weights.N, [&](std::int64_t n, int) {
    for (std::int64_t k = 0; k < p.weights.K; ++k) store_element(p.out.at(n, k), p.out.dtype, 0, value(n, k));
  });
}

void launch(const UnpackProblem& p, const Runtime& runtime) {
  const LayerWeights& w = p.weights;
  if (in_matrix(w)) return dequantize(w.matrix(), p.out, *runtime.executor);
  if (w.order == WeightOrder::fragments8) {
    return unpack(p, *runtime.executor, [&w](std::int64_t n, std::int64_t k) {
      return lowbit::value8(w.format, w.fragments().data, w.fragments().layout, w.gated, n, k);
    });
  }
  unpack(p, *runtime.executor, [&w](std::int64_t n, std::int64_t k) { return lowbit::packed_value(w.panels(), n, k); });
}

double estimate(const UnpackProblem& p, int workers) {
  // Bytes a second of one thread, as an Intel Xeon of 2023 has them with AVX2.
  constexpr double kRows = 12e9, kOneByOne = 0.2e9;
  return p.bytes() / ((in_matrix(p.weights) ? kRows : kOneByOne) * workers);
}

std::string describe(const UnpackProblem& p, int workers) {
  return text(in_matrix(p.weights) ? "row by row" : "weight by weight", ", ", workers,
              workers == 1 ? " thread" : " threads");
}

}  // namespace

const UnpackKernel kUnpackWeights = {
    .name = "cpu",
    .method = "unpack",
    .device = Device::cpu,
    .automatic = true,
    .supports = supports,
    .estimate = estimate,
    .workspace = no_workspace,
    .launch = launch,
    .describe = describe,
};

}  // namespace heddle::cpu
