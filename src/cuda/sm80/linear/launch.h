// The instantiations of the kernel, for the host.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/any/linear/plan.h"
#include "cuda/sm80/linear/params.h"

namespace heddle::cuda::sm80::linear {

struct Variant {
  TileShape tile;
  int fixed_bytes, stage_bytes;  // of shared memory
  bool table;
  void (*launch)(const Params& params, int grid, cudaStream_t stream);
};

// A decoder's: for few tokens, for many.
struct Variants {
  Variant few, many;
};
extern const Variants kBf16E2M1, kBf16Int4, kBf16Lookup, kBf16Int8, kBf16E4M3;
extern const Variants kF16E2M1, kF16Int4, kF16Lookup, kF16Int8, kF16E4M3;

// Of shared memory.
constexpr int table_bytes(int lookup_copies) { return 256 * lookup_copies * 4; }
constexpr int shared_bytes(const Variant& v, int stages, int lookup_copies) {
  return v.fixed_bytes + stages * v.stage_bytes + (v.table ? table_bytes(lookup_copies) : 0);
}

}  // namespace heddle::cuda::sm80::linear
