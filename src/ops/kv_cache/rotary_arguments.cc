#include "core/overlap.h"
#include "ops/kv_cache/arguments.h"
#include "ops/kv_cache/checks.h"
#include "ops/validate.h"

namespace heddle {
namespace {

bool same_view(const TensorView& a, const TensorView& b) {
  return a.data == b.data && a.shape == b.shape && a.stride == b.stride;
}

}  // namespace

RotaryProblem checked_rotary_problem(const Check& check, const TensorView& x, const TensorView& out,
                                     const Rotary& rotary, const TensorView& offsets, const RotaryNames& names) {
  const First first{names.x, x.device};
  check_data(check, x, names.x, "[B, S, H, D]", first);
  check_data(check, out, "out", "[B, S, H, D]", first);
  check.require(out.dtype == x.dtype, "out is ", name_of(out.dtype), ": it must have ", names.x, "'s dtype, ",
                name_of(x.dtype));
  check.require(out.shape == x.shape, "out is ", out, ": it must have the shape of ", names.x, ", ", x);
  check.not_overlapping(out, "out");

  RotaryProblem p;
  p.x = operand_of(x);
  p.out = operand_of(out);
  p.device = x.device;
  p.B = x.shape[0];
  p.S = x.shape[1];
  p.H = x.shape[2];
  p.D = x.shape[3];
  p.rotary = check_rotary(check, rotary, x, first);
  if (offsets.given()) p.offsets = check_indices(check, offsets, name_of(names.offsets), p.B, first);
  FirstBadIndex found;
  for (std::int64_t b = 0; first.readable() && b < p.B; ++b) {
    check_rotated(p, names.offsets, b, CheckStep::rotary, found);
  }
  require_none(check, found);
  check.require(same_view(x, out) || !may_share_memory(out, x), "out shares memory with ", names.x, " without being ",
                names.x, " itself: rotate in place or give out memory of its own");
  check_apart(check, out, "out", rotary.cos, "cos");
  check_apart(check, out, "out", rotary.sin, "sin");
  check_apart(check, out, "out", offsets, name_of(names.offsets));
  return p;
}

}  // namespace heddle
