// What a launch tells the kernel.
#pragma once

#include "cuda/sm90/attention_fwd/params.h"

namespace heddle::cuda::sm90::attention_fwd_fp8 {

// f32 scales read at [b, s, h]; strides in elements, 0 where one number serves an extent.
struct Scales {
  const float* data;  // or null: 1
  std::int64_t stride_b, stride_s, stride_h;
};

// q, k, v: maps of e4m3, 128 bytes a row. scale_log2 is what all scores share.
struct Params : attention_fwd::Params {
  Scales q_scale, k_scale, v_scale;
  const float* v_scale_max;  // [B, Hkv], where v_scale differs between keys: the largest |v_scale| of those in use
  int kv_heads;
};

}  // namespace heddle::cuda::sm90::attention_fwd_fp8
