// The instantiations of the kernel, for the host.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/sm90/attention_fwd/params.h"
#include "heddle/tensor.h"

namespace heddle::cuda::sm90::attention_fwd {

// One instantiation: its tiles, and how to start it.
struct Variant {
  DType dtype;
  int head_size, value_size;  // the largest it takes
  int consumers, tile_k;
  unsigned options;  // of ScoreOption
  int planes;        // bias and mask tiles by PlaneAccess::copies that have a place in shared memory
  void (*launch)(const Params& params, int grid, cudaStream_t stream);
};

// Defined one file each in inst/. "Keys": ALiBi, bias and mask by keys. "Planes": bias or mask with rows where they
// come in bulk. "Options": everything, slower.
extern const Variant kBf16D64, kBf16D64Wide, kBf16D96, kBf16D128, kBf16D192, kBf16D256;
extern const Variant kBf16D64Softcap, kBf16D64Keys, kBf16D64Planes, kBf16D64Options;
extern const Variant kBf16D128Softcap, kBf16D128Keys, kBf16D128Planes, kBf16D128Options;
extern const Variant kBf16D256Softcap, kBf16D256Alibi, kBf16D256Planes, kBf16D256Options;
extern const Variant kF16D64, kF16D64Wide, kF16D96, kF16D128, kF16D192, kF16D256;
extern const Variant kF16D64Softcap, kF16D64Keys, kF16D64Planes, kF16D64Options;
extern const Variant kF16D128Softcap, kF16D128Keys, kF16D128Planes, kF16D128Options;
extern const Variant kF16D256Softcap, kF16D256Alibi, kF16D256Planes, kF16D256Options;

}  // namespace heddle::cuda::sm90::attention_fwd
