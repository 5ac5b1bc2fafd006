// What a launch is told, which instantiation, and the launches.
#include <algorithm>
#include <bit>
#include <limits>

#include "core/check.h"
#include "cuda/any/gate_branches/host.h"
#include "cuda/any/gate_branches/kernel.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/requirements.h"

namespace heddle::cuda {
namespace {

using namespace any::gate_branches;

Rows rows_of(const Operand& x) { return {x.data, x.stride_b, x.stride_s, x.stride_h, x.stride_d}; }
PerRow per_row(const Plane& x) { return {x.as<float>(), x.stride_b, x.stride_h, x.stride_i}; }

// Elements of 16 bytes.
int wide(const GateProblem& p) { return 16 / static_cast<int>(size_of(p.o[0].dtype)); }

bool in_pieces(const Operand& x) { return !x || has_rows_of_16_bytes(x); }
bool in_pieces(const GateProblem& p) {
  return p.Dv % wide(p) == 0 && in_pieces(p.out) &&
         std::ranges::all_of(p.o, [](const Operand& x) { return in_pieces(x); });
}
bool in_pieces(const GateBackwardProblem& p) {
  return in_pieces(static_cast<const GateProblem&>(p)) &&
         std::ranges::all_of(p.d_o, [](const Operand& x) { return in_pieces(x); });
}

// Lanes that have a row's pieces, of `count` elements each.
int lanes_of(const GateProblem& p, int count) {
  const std::int64_t pieces = (p.Dv + count - 1) / count;
  return static_cast<int>(std::bit_ceil(static_cast<unsigned>(std::clamp<std::int64_t>(pieces, 1, kWarp))));
}

std::string described(const GateProblem& p, bool in_pieces) {
  const int lanes = lanes_of(p, in_pieces ? wide(p) : 1);
  return text(lanes, lanes == 1 ? " thread" : " threads", " for a row of a head, ",
              in_pieces ? "in pieces of 16 bytes" : "element by element");
}

Params params_of(const GateProblem& p, bool in_pieces) {
  Params out;
  out.rows = p.B * p.S * p.H;
  out.S = p.S;
  out.H = p.H;
  if (0 < out.rows && out.rows <= std::numeric_limits<std::int32_t>::max()) {
    out.of_S = Divisor(static_cast<unsigned>(p.S));
    out.of_H = Divisor(static_cast<unsigned>(p.H));
  }
  out.Dv = static_cast<int>(p.Dv);
  out.count = p.count;
  out.lanes_log2 = std::countr_zero(static_cast<unsigned>(lanes_of(p, in_pieces ? wide(p) : 1)));
  for (int n = 0; n < p.count; ++n) out.branch[n] = {rows_of(p.o[n]), per_row(p.gate[n])};
  out.out = rows_of(p.out);
  return out;
}

Grid grid_of(const Params& p) {
  const std::int64_t rows_of_block = std::int64_t{kWarps} * kWarp >> p.lanes_log2;
  const std::int64_t blocks = (p.rows + rows_of_block - 1) / rows_of_block;
  return {static_cast<unsigned>(std::min<std::int64_t>(blocks, std::numeric_limits<std::int32_t>::max())), kThreads};
}

template <class T, int kCount>
auto forward_of(int branches) {
  return branches == 1   ? gate_kernel<T, kCount, 1>
         : branches == 2 ? gate_kernel<T, kCount, 2>
                         : gate_kernel<T, kCount, 3>;
}
template <class T, int kCount>
auto backward_of(int branches) {
  return branches == 1   ? gate_backward_kernel<T, kCount, 1>
         : branches == 2 ? gate_backward_kernel<T, kCount, 2>
                         : gate_backward_kernel<T, kCount, 3>;
}
static_assert(kMost == 3);

// Calls visit(T()).
template <class Visit>
void with_type(DType dtype, const Visit& visit) {
  if (dtype == DType::f32) return visit(float());
  if (dtype == DType::f16) return visit(__half());
  visit(__nv_bfloat16());
}

}  // namespace

std::string describe_gated(const GateProblem& p) { return described(p, in_pieces(p)); }
std::string describe_gated(const GateBackwardProblem& p) { return described(p, in_pieces(p)); }

void sum_gated(const GateProblem& p, void* stream) {
  const bool aligned = in_pieces(p);
  const Params params = params_of(p, aligned);
  if (params.rows == 0) return;
  with_type(p.o[0].dtype, [&]<class T>(T) {
    constexpr int kWide = 16 / sizeof(T);
    start("gate_branches", aligned ? forward_of<T, kWide>(p.count) : forward_of<T, 1>(p.count), grid_of(params),
          static_cast<cudaStream_t>(stream), params);
  });
}

void sum_gated_backward(const GateBackwardProblem& p, void* stream) {
  const bool aligned = in_pieces(p);
  Params params = params_of(p, aligned);
  if (params.rows == 0) return;
  for (int n = 0; n < p.count; ++n) params.gradient[n] = {rows_of(p.d_o[n]), per_row(p.d_gate[n])};
  with_type(p.o[0].dtype, [&]<class T>(T) {
    constexpr int kWide = 16 / sizeof(T);
    start("gate_branches_backward", aligned ? backward_of<T, kWide>(p.count) : backward_of<T, 1>(p.count),
          grid_of(params), static_cast<cudaStream_t>(stream), params);
  });
}

}  // namespace heddle::cuda
