// A merge of partial results after its arguments were checked (include/heddle/partial.h).
#pragma once

#include <cstdint>
#include <span>

#include "heddle/partial.h"
#include "problem/attention.h"
#include "problem/candidate.h"
#include "problem/operand_of.h"

namespace heddle {

struct MergeProblem {
  std::int64_t B = 0, S = 0, H = 0, Dv = 0;  // packed results are one batch of all rows
  Device device = Device::cpu;
  std::span<const Partial> partials;
  Plane sink;  // f32 [h] or absent
  Operand o;
  Plane lse;  // [b, h, i] or absent

  // That a merge moves at least: each partial, and as much as one of them for o.
  double bytes() const {
    const double rows = static_cast<double>(B * S * H) * static_cast<double>(partials.size() + 1);
    return rows * (static_cast<double>(Dv) * static_cast<double>(size_of(partials[0].o.dtype)) + sizeof(float));
  }

  // A view of what there is for each row, [b, h, i].
  static Plane per_row(const TensorView& view) {
    const bool packed = view.rank == 2;
    const int head = packed ? 0 : 1;
    return {.data = static_cast<std::byte*>(view.data),
            .dtype = view.dtype,
            .given = true,
            .stride_b = packed ? 0 : view.stride[0],
            .stride_h = view.stride[head],
            .stride_i = view.stride[head + 1]};
  }

  float lse_of(std::size_t n, std::int64_t b, std::int64_t h, std::int64_t i) const {
    const Plane plane = per_row(partials[n].lse);
    return plane.as<const float>()[plane.offset(b, h, i)];
  }
  double sink_of(std::int64_t h) const {
    return sink ? static_cast<double>(sink.as<const float>()[sink.offset(0, h, 0)])
                : -std::numeric_limits<double>::infinity();
  }
};

struct MergeBackwardProblem : MergeProblem {  // without o and lse
  Operand d_o;
  Plane d_lse;                         // or absent
  std::span<const Partial> gradients;  // as many as partials; each view may be absent
  Plane dsink;                         // f32 [h] or absent
};

using MergeKernel = Kernel<MergeProblem>;
using MergeBackwardKernel = Kernel<MergeBackwardProblem>;

}  // namespace heddle
