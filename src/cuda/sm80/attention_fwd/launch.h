// The instantiations of the kernel, for the host.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/sm80/attention_fwd/params.h"

namespace heddle::cuda::sm80::attention_fwd {

// One instantiation: the query rows of its tile, and how to start it.
struct Variant {
  int tile_q;
  void (*launch)(const Params& params, cudaStream_t stream);
};

// All of one dtype and head size.
struct Variants {
  Variant plain;    // scale > 0, rows of 16-byte pieces, none of the score options
  Variant options;  // any scale and all options, rows of 16-byte pieces
  Variant strided;  // everything
};

constexpr std::int64_t kMaxLength = kOpen / 2, kMaxTiles = 1 << 30;

inline std::int64_t q_tiles(const AttentionProblem& p, const Variant& v) { return (p.Sq + v.tile_q - 1) / v.tile_q; }

// What a launch of `v` is told, but for Params::codes.
Params params_for(const AttentionProblem& p, const Variant& v);

// Defined one file each in inst/, by the largest head size they take.
extern const Variants kBf16D64, kBf16D128, kBf16D256;
extern const Variants kF16D64, kF16D128, kF16D256;
extern const Variants kF32D64, kF32D128, kF32D256;     // three tf32 products
extern const Variants kTf32D64, kTf32D128, kTf32D256;  // one

// Q K^T in 8 bits; no score options, rows of v of 16-byte pieces.
extern const Variant kBf16Int8D64, kBf16Int8D128, kF16Int8D64, kF16Int8D128;

}  // namespace heddle::cuda::sm80::attention_fwd
