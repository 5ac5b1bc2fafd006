// What a launch tells the kernel.
#pragma once

#include "cuda/sm90/attention/params.h"
#include "problem/attention.h"

namespace heddle::cuda::sm90::attention_fwd_fp8 {

// q, k, v: maps of bytes, 128 in a row. Scales of q belong to rows of heads, those of k and v to heads or to keys of
// heads.
struct Params : attention::Params {
  Scales q_scale, k_scale, v_scale;
};

}  // namespace heddle::cuda::sm90::attention_fwd_fp8
