// What the soak computes on the GPU itself: random tensors, an attention and a product in double precision as their
// definitions have them, and counts of rows that differ. Nothing here is shared with the library's kernels.
#pragma once

#include <cstddef>
#include <cstdint>

#include "heddle/tensor.h"

namespace heddle::soak {

// Rows that were found wrong. On the GPU while it is counted.
struct Tally {
  unsigned long long rows = 0;
  unsigned long long first = ~0ull;  // the first of them
  float worst = 0.0f;                // error over what is allowed, or 0 where bits are compared
};

// Normal numbers of this deviation, the same for a seed wherever they are made. f32, f16, bf16 or f8e4m3. On the
// default stream, as all that has no stream here.
void fill_normal(void* data, DType dtype, std::int64_t count, std::uint64_t seed, float deviation = 1.0f);

// Counts rows of `row_bytes` (a multiple of 4) that are not the same.
void count_other_rows(const void* x, const void* y, std::int64_t rows, std::int64_t row_bytes, Tally* tally,
                      void* stream);

// Counts rows of `width` numbers whose distance from `expected` is not within `tolerance` times what both the row and
// the average row have for a length. Where an infinity is expected, it must be there. NaN never passes.
void count_far_rows(const void* x, DType dtype, const double* expected, std::int64_t rows, std::int64_t width,
                    double tolerance, double average, Tally* tally, void* stream);
// The root of the mean square of `count` numbers, infinities left out.
double root_mean_square(const double* x, std::int64_t count);

// Tensors as heddle/attention.h has them, on the GPU, all contiguous; D and Dv are multiples of 8.
struct Attention {
  const void *q, *k, *v;
  DType q_dtype, k_dtype;
  int B, H, Hkv, Sq, Sk, D, Dv;  // packed: the longest; a cache: its rows' slots
  bool causal = false;           // bottom right
  int left = -1, right = -1;     // the window
  float scale = 1.0f, softcap = 0.0f;
  const float* alibi = nullptr;  // [H]
  const float* sink = nullptr;   // [H]
  const void* bias = nullptr;    // element (b, h, i, j) at b s[0] + h s[1] + i s[2] + j s[3]
  DType bias_dtype = DType::f32;
  std::int64_t bias_stride[4] = {};
  const unsigned char* mask = nullptr;
  std::int64_t mask_stride[4] = {};
  const int *cu_q = nullptr, *cu_k = nullptr;
  const int* used_k = nullptr;
  const int* page_table = nullptr;
  int page_size = 0, max_pages = 0;
  // Beside f8e4m3 operands: element (row of the tensor, head) at row s[0] + head s[1], batched [B, 1, H] if by_batch.
  const float *q_scale = nullptr, *k_scale = nullptr, *v_scale = nullptr;
  bool scales_by_head = false;  // [B, 1, H]; else [B, S, H]
  int total_q = 0;              // packed rows
  std::int64_t rows() const { return cu_q != nullptr ? total_q : std::int64_t{B} * Sq; }
};

// o [rows, H, Dv]; lse [B, H, Sq], packed [H, rows].
void reference_forward(const Attention& a, double* o, double* lse);
// dq [rows, H, D], dk [keys, Hkv, D], dv [keys, Hkv, Dv], from o and lse of reference_forward. d_o is of q's dtype.
void reference_backward(const Attention& a, const void* d_o, const double* o, const double* lse, double* dq, double* dk,
                        double* dv);

// y [rows, n] = x [rows, k] w [n, k]^T; x of `dtype`, w in f32.
void reference_product(const void* x, DType dtype, const float* w, std::int64_t rows, std::int64_t n, std::int64_t k,
                       double* y);

// On the stream.
void fill_bytes(void* to, int value, std::size_t bytes, void* stream);
void copy_bytes(void* to, const void* from, std::size_t bytes, void* stream);

// Waits for the device; throws with what went wrong on it.
void finish();

}  // namespace heddle::soak
