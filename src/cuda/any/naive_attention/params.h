// What a launch tells the kernel.
#pragma once

#include "problem/attention.h"

namespace heddle::cuda::any::naive_attention {

struct Params {
  AttentionProblem problem;
  std::uint32_t drop_below;  // a probability whose random word is less is dropped
};

}  // namespace heddle::cuda::any::naive_attention
