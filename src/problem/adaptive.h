// Attention with a tolerance after its arguments were checked (include/heddle/adaptive.h).
#pragma once

#include <cstdint>

#include "heddle/adaptive.h"
#include "problem/attention.h"
#include "problem/candidate.h"

namespace heddle {

// Which blocks of keys are replaced, a bit each: contiguous [batch, kv head, run, byte].
struct ReplacedBlocks {
  std::uint8_t* data = nullptr;
  bool given = false;
  std::int64_t heads = 0, runs = 0, bytes = 0;  // Hkv, N, W

  explicit operator bool() const { return given; }
  // The bits of run `n` of sequence b.
  std::uint8_t* at(const AttentionProblem& p, std::int64_t b, const Sequence& s, std::int64_t kv_head,
                   std::int64_t n) const {
    const bool packed = p.cu_seqlens_q.given;
    const std::int64_t first = packed ? s.q_begin * p.G / kAdaptiveRows + b : 0;
    return data + (((packed ? 0 : b) * heads + kv_head) * runs + first + n) * bytes;
  }
  static bool bit(const std::uint8_t* bits, std::int64_t block) { return (bits[block / 8] >> (block % 8) & 1) != 0; }
  static void set(std::uint8_t* bits, std::int64_t block) {
    bits[block / 8] = static_cast<std::uint8_t>(bits[block / 8] | 1u << (block % 8));
  }
};

// Runs of rows that a call has for each kv head, over all sequences if they are packed: N of include/heddle/adaptive.h.
inline std::int64_t adaptive_runs(const AttentionProblem& p) {
  if (p.cu_seqlens_q.given) return p.q_rows * p.G / kAdaptiveRows + p.B;
  return (p.Sq * p.G + kAdaptiveRows - 1) / kAdaptiveRows;
}

struct AdaptiveProblem : AttentionProblem {
  using Example = void;

  float tol = 0;
  Plane bound;  // as lse
  ReplacedBlocks replaced;
};
struct AdaptiveBackwardProblem : AttentionBackwardProblem {
  using Example = void;

  ReplacedBlocks replaced;
};

using AdaptiveForwardKernel = Kernel<AdaptiveProblem>;
using AdaptiveBackwardKernel = Kernel<AdaptiveBackwardProblem>;

}  // namespace heddle
