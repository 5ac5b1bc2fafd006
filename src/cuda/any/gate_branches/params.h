// What a sum of gated branches is told. Made on the host.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/common/divisor.h"
#include "problem/gate_branches.h"

namespace heddle::cuda::any::gate_branches {

constexpr int kThreads = 256, kWarp = 32, kWarps = kThreads / kWarp;
constexpr int kMaxHeadSize = 256;
constexpr int kMost = GateProblem::kMost;

// Rows [b, i, h, d] of whatever dtype; strides in elements.
struct Rows {
  std::byte* data = nullptr;  // null: not there
  std::int64_t stride_b = 0, stride_i = 0, stride_h = 0, stride_d = 0;
};

// What there is for each row, [b, h, i].
struct PerRow {
  float* data = nullptr;  // null: not there
  std::int64_t stride_b = 0, stride_h = 0, stride_i = 0;
};

struct Branch {
  Rows o;
  PerRow gate;
};

struct Params {
  std::int64_t rows = 0, S = 0, H = 0;  // B S H rows, numbered (b S + i) H + h
  Divisor of_S, of_H;                   // for less than 2^31 rows
  int Dv = 0;
  int count = 0;       // of branches
  int lanes_log2 = 0;  // of the lanes that share a row
  Branch branch[kMost];
  Rows out;                // d_out in a backward
  Branch gradient[kMost];  // of a backward
};

}  // namespace heddle::cuda::any::gate_branches
