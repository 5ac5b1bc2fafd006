// Causality and a window as kernels take them: row i attends keys j with i + off - left <= j <= i + off + right. For
// host and device.
#pragma once

#include "problem/attention.h"

namespace heddle::cuda {

constexpr int kOpen = 1 << 30;  // a side without an edge

struct Window {
  int left, right;  // 0 .. kOpen
};

constexpr Window window_of(const AttentionProblem& p) {
  const auto side = [](std::int64_t keys) { return static_cast<int>(keys < 0 || keys > kOpen ? kOpen : keys); };
  return {side(p.window_left), p.causal != Causal::none ? 0 : side(p.window_right)};
}

// Whether causality or a window may remove pairs.
constexpr bool has_band(const AttentionProblem& p) {
  return p.causal != Causal::none || p.window_left >= 0 || p.window_right >= 0;
}

}  // namespace heddle::cuda
