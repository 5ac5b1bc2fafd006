// The instantiations of the kernel, for the host.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/sm90/attention_decode/params.h"

namespace heddle::cuda::sm90::attention_decode {

// One instantiation: its tiles, and how to start it.
struct Variant {
  int size;       // of a head, at most
  int row_tiles;  // of 16 rows, for each warp
  int warps;      // that multiply as one, with neighbouring row tiles: 1, or a warpgroup's 4
  int keys;       // of such a product
  int panels;     // 128-byte wide parts of a key
  int panel_elements;
  int q_pitch, q_rows;  // bytes of a row of q in shared memory; rows of a head there are multiples of q_rows
  int control_bytes, merge_bytes;
  void (*launch)(const Params& params, int grid, cudaStream_t stream);
  // How many clusters of `size` CTAs, up to kMaxCluster, the current GPU holds at once.
  int (*clusters_at_once)(int size);
};

// Defined one file each in inst/. "Wide": two row tiles a warp. "Warpgroup": four warps multiply as one.
extern const Variant kBf16D64, kBf16D64Wide, kBf16D64Warpgroup, kBf16D128, kBf16D128Wide, kBf16D128Warpgroup;
extern const Variant kBf16D256, kBf16D256Warpgroup;
extern const Variant kF16D64, kF16D64Wide, kF16D64Warpgroup, kF16D128, kF16D128Wide, kF16D128Warpgroup;
extern const Variant kF16D256, kF16D256Warpgroup;
extern const Variant kE4m3D64, kE4m3D64Wide, kE4m3D128, kE4m3D128Wide, kE4m3D256;
// With scales that differ from key to key.
extern const Variant kE4m3D64Keys, kE4m3D64WideKeys, kE4m3D128Keys, kE4m3D128WideKeys, kE4m3D256Keys;

}  // namespace heddle::cuda::sm90::attention_decode
