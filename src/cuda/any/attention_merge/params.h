// What a merge of partial results is told. Made on the host.
#pragma once

#include <cstddef>
#include <cstdint>

#include "problem/partial.h"

namespace heddle::cuda::any::attention_merge {

constexpr int kThreads = 256, kWarp = 32, kWarps = kThreads / kWarp;
constexpr int kMaxHeadSize = 256;

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

struct Part {
  Rows o;
  PerRow lse;
};

// Parts that travel with a launch: more than these would make its parameters larger than the 4 KB that every driver
// takes.
constexpr int kHeld = 32;
struct Held {
  Part part[kHeld];
};

struct Params {
  std::int64_t rows = 0, S = 0, H = 0;  // B S H rows, numbered (b S + i) H + h
  int Dv = 0;
  int count = 0;                // of partials
  int lanes = 1;                // that share a row's elements: a power of two, as are
  int slots = 1;                // those that share its exponentials. A warp has 32 / slots rows, 32 / lanes at a time
  const Part* parts = nullptr;  // in memory; null: in `held`. In a backward the partials' gradients come behind them
  PerRow sink;                  // [h]
  Part outer;                   // o and lse of the result; in a backward d_o and d_lse
  // Of a backward:
  bool dots = false;             // whether products of d_o and o are wanted
  double* sink_terms = nullptr;  // [h, b S + i], what rows add to dsink; null: not wanted
  Held held;
};
static_assert(sizeof(Params) <= 4096);

}  // namespace heddle::cuda::any::attention_merge
