// The instantiations of the kernel, for the host.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/sm80/attention_decode/params.h"

namespace heddle::cuda::sm80::attention_decode {

// One instantiation: its tiles, and how to start it.
struct Variant {
  int head_size;
  int shared_bytes;
  int blocks;  // on a multiprocessor, as registers allow
  void (*launch)(const Params& params, unsigned ctas, cudaStream_t stream);
};

// Defined one file each in inst/, by the largest head size they take.
extern const Variant kBf16D64, kBf16D128, kBf16D256, kF16D64, kF16D128, kF16D256;
// Over caches in 4 bits.
extern const Variant kBf16Int4D64, kBf16Int4D128, kF16Int4D64, kF16Int4D128;
// Over e4m3 caches.
extern const Variant kBf16E4m3D128, kBf16E4m3D256, kF16E4m3D128, kF16E4m3D256;

}  // namespace heddle::cuda::sm80::attention_decode
