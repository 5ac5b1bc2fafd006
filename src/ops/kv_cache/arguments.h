// The checks of rotary embedding and of appends to a cache.
#pragma once

#include "core/check.h"
#include "heddle/kv_cache.h"
#include "problem/index_rules.h"
#include "problem/kv_cache.h"

namespace heddle {

// What errors call the arguments of a rotation: an operation that rotates has its own names for them.
struct RotaryNames {
  const char* x = "x";
  IndexName offsets = IndexName::offsets;
};

// Throw Error on a bad argument. Index data is read on the CPU only.
RotaryProblem checked_rotary_problem(const Check& check, const TensorView& x, const TensorView& out,
                                     const Rotary& rotary, const TensorView& offsets, const RotaryNames& names = {});
AppendProblem checked_append_problem(const Check& check, const TensorView& k_new, const TensorView& v_new,
                                     const TensorView& k_cache, const TensorView& v_cache, const TensorView& seqlens,
                                     const AppendOptions& options, IndexName seqlens_name = IndexName::seqlens);

}  // namespace heddle
