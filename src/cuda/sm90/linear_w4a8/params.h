// What a launch tells the kernel.
#pragma once

#include "cuda/sm90/linear_w4a16/params.h"

namespace heddle::cuda::sm90::linear_w4a8 {

using linear_w4a16::kBlockColumns;
using linear_w4a16::kBlockRows;
using linear_w4a16::Output;
using linear_w4a16::Schedule;

using WeightBlock = lowbit::FragmentBlock8;
constexpr int kSteps = WeightBlock::kSteps, kStepColumns = kBlockColumns / kSteps;

struct Params {
  CUtensorMap x;  // e4m3 [M, K], boxes of 128 columns
  const WeightBlock* weights;
  Output out;
  Schedule schedule;
};

}  // namespace heddle::cuda::sm90::linear_w4a8
