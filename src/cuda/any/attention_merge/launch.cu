// What a launch is told, which instantiation, and the launches.
#include <algorithm>
#include <bit>
#include <limits>

#include "core/check.h"
#include "cuda/any/attention_merge/backward.cuh"
#include "cuda/any/attention_merge/host.h"
#include "cuda/any/attention_merge/kernel.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/requirements.h"

namespace heddle::cuda {
namespace {

using namespace any::attention_merge;

constexpr const char* kForward = "merge_attention";
constexpr const char* kBackward = "merge_attention_backward";

Rows rows_of(const Operand& x) { return {x.data, x.stride_b, x.stride_s, x.stride_h, x.stride_d}; }
PerRow per_row(const Plane& x) { return {x.as<float>(), x.stride_b, x.stride_h, x.stride_i}; }
Part part_of(const Partial& x) {
  return {x.o.given() ? rows_of(operand_of(x.o)) : Rows(),
          x.lse.given() ? per_row(MergeProblem::per_row(x.lse)) : PerRow()};
}

// Whether the rows of `x`, if it is given, can be moved in pieces of 16 bytes.
bool in_pieces(const TensorView& x) {
  if (!x.given()) return true;
  Operand rows = operand_of(x);
  rows.alignment = static_cast<std::uint16_t>(alignment_of(x));
  return has_rows_of_16_bytes(rows);
}
bool in_pieces(Operand x) {
  x.alignment = reinterpret_cast<std::uintptr_t>(x.data) % 16 == 0 ? 16 : 1;
  return has_rows_of_16_bytes(x);
}
bool in_pieces(std::span<const Partial> parts) {
  return std::ranges::all_of(parts, [](const Partial& part) { return in_pieces(part.o); });
}

// Elements of a piece that is 16 bytes of the partials.
int wide(const MergeProblem& p) { return 16 / static_cast<int>(size_of(p.partials[0].o.dtype)); }

// Lanes that have a row's pieces, of `count` elements each.
int lanes_of(const MergeProblem& p, int count) {
  return static_cast<int>(std::bit_ceil(static_cast<unsigned>(std::clamp<std::int64_t>(p.Dv / count, 1, kWarp))));
}

// Lanes for a row's exponentials. With fewer, a warp finds those of several rows at once, which costs as much as those
// of one, but has more rows one after the other: not where there are few.
int slots_of(const Params& p) {
  const std::int64_t enough = std::int64_t{16} * current_device().multiprocessors * kWarp;
  int rows = 1;
  while (rows < 4 && p.lanes / (2 * rows) >= p.count && p.rows * p.lanes >= 2 * rows * enough) rows *= 2;
  return p.lanes / rows;
}

std::size_t bytes_of_parts(std::int64_t count) { return count <= kHeld ? 0 : count * sizeof(Part); }
std::int64_t parts_of(const MergeBackwardProblem& p) { return 2 * std::ssize(p.partials); }

Params params_of(const MergeProblem& p, const Operand& o, const Plane& lse, bool in_pieces) {
  Params out;
  out.rows = p.B * p.S * p.H;
  out.S = p.S;
  out.H = p.H;
  out.Dv = static_cast<int>(p.Dv);
  out.count = static_cast<int>(p.partials.size());
  out.lanes = out.slots = lanes_of(p, in_pieces ? wide(p) : 1);
  out.sink = per_row(p.sink);
  out.outer = {rows_of(o), per_row(lse)};
  return out;
}

// Names parts 0 to count, part(n), in the launch or, through others before it, in `memory`.
template <class PartAt>
void name_parts(const char* operation, Params& p, std::int64_t count, const PartAt& part, void* memory,
                cudaStream_t stream) {
  if (count <= kHeld) {
    for (std::int64_t n = 0; n < count; ++n) p.held.part[n] = part(n);
    return;
  }
  auto* const parts = static_cast<Part*>(memory);
  p.parts = parts;
  for (std::int64_t begin = 0; begin < count; begin += kHeld) {
    const int here = static_cast<int>(std::min<std::int64_t>(kHeld, count - begin));
    for (int n = 0; n < here; ++n) p.held.part[n] = part(begin + n);
    start(operation, write_parts_kernel, {1, kHeld}, stream, p.held, parts + begin, here);
  }
}

Grid grid_of(const Params& p) {
  const std::int64_t rows_of_block = std::int64_t{kWarps} * (kWarp / p.slots);
  const std::int64_t blocks = (p.rows + rows_of_block - 1) / rows_of_block;
  return {static_cast<unsigned>(std::min<std::int64_t>(blocks, std::numeric_limits<std::int32_t>::max())), kThreads};
}

// Calls visit(T(), Other()) with the partials' type, and that of what is on the other side of them: of partials in f32
// a merge has any.
template <bool kMerge, class Visit>
void with_types(DType parts, DType other, const Visit& visit) {
  if constexpr (kMerge) {
    if (parts == DType::f32 && other == DType::f16) return visit(float(), __half());
    if (parts == DType::f32 && other == DType::bf16) return visit(float(), __nv_bfloat16());
  }
  const auto beside = [&]<class T>(T x) {
    if (other == DType::f32) return visit(x, float());
    visit(x, x);
  };
  if (parts == DType::f32) return visit(float(), float());
  if (parts == DType::f16) return beside(__half());
  beside(__nv_bfloat16());
}

}  // namespace

std::size_t merge_workspace(const MergeProblem& p) { return bytes_of_parts(std::ssize(p.partials)); }

// The terms of dsink come first.
std::size_t merge_backward_workspace(const MergeBackwardProblem& p) {
  return bytes_of_parts(parts_of(p)) + (p.dsink ? p.B * p.S * p.H * sizeof(double) : 0);
}

std::string describe_merge(const MergeProblem& p) {
  const bool aligned = p.Dv % wide(p) == 0 && in_pieces(p.partials);
  const int lanes = lanes_of(p, aligned ? wide(p) : 1);
  return text(lanes, lanes == 1 ? " thread" : " threads", " for a row of a head, ",
              aligned ? "in pieces of 16 bytes" : "element by element");
}

void merge_partials(const MergeProblem& p, void* workspace, void* stream) {
  const bool aligned = p.Dv % wide(p) == 0 && in_pieces(p.partials) && in_pieces(p.o);
  Params params = params_of(p, p.o, p.lse, aligned);
  if (params.rows == 0) return;
  const auto on = static_cast<cudaStream_t>(stream);
  params.slots = slots_of(params);
  name_parts(
      kForward, params, params.count, [&](std::int64_t n) { return part_of(p.partials[n]); }, workspace, on);
  with_types<true>(p.partials[0].o.dtype, p.o.dtype, [&]<class T, class Out>(T, Out) {
    constexpr int kWide = 16 / sizeof(T);
    start(kForward, aligned ? merge_kernel<T, Out, kWide> : merge_kernel<T, Out, 1>, grid_of(params), on, params);
  });
}

void merge_partials_backward(const MergeBackwardProblem& p, void* workspace, void* stream) {
  const bool aligned = p.Dv % wide(p) == 0 && in_pieces(p.partials) && in_pieces(p.gradients) && in_pieces(p.d_o);
  Params params = params_of(p, p.d_o, p.d_lse, aligned);
  const auto on = static_cast<cudaStream_t>(stream);
  const PerRow dsink = per_row(p.dsink);
  if (params.rows > 0) {
    const auto wanted = [&](auto view) { return std::ranges::any_of(p.gradients, view); };
    const bool of_lse = wanted([](const Partial& x) { return x.lse.given(); });
    params.dots = of_lse || p.dsink;
    if (!params.dots && !wanted([](const Partial& x) { return x.o.given(); })) return;
    auto* memory = static_cast<std::byte*>(workspace);
    if (p.dsink) {
      params.sink_terms = reinterpret_cast<double*>(memory);
      memory += params.rows * sizeof(double);
    }
    const auto part = [&](std::int64_t n) {
      return part_of(n < params.count ? p.partials[n] : p.gradients[n - params.count]);
    };
    name_parts(kBackward, params, parts_of(p), part, memory, on);
    with_types<false>(p.partials[0].o.dtype, p.d_o.dtype, [&]<class T, class Gradient>(T, Gradient) {
      constexpr int kWide = 16 / sizeof(T);
      const auto kernel = aligned ? merge_backward_kernel<T, Gradient, kWide> : merge_backward_kernel<T, Gradient, 1>;
      start(kBackward, kernel, grid_of(params), on, params);
    });
  }
  if (p.dsink) {
    start(kBackward, sink_gradient_kernel, {static_cast<unsigned>(p.H), kThreads}, on, params.sink_terms, p.B * p.S,
          dsink);
  }
}

}  // namespace heddle::cuda
