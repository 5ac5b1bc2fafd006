// What is expected, computed on the GPU in double precision as the definitions have it. Nothing here is shared with the
// library's kernels. All on the default stream.
#pragma once

#include <cstdint>

#include "heddle/linear.h"
#include "heddle/tensor.h"

namespace heddle::soak {

// Tensors as heddle/attention.h has them, on the GPU, all contiguous; D and Dv are multiples of 8.
struct Attention {
  const void *q, *k, *v;
  DType q_dtype, k_dtype;
  int B, H, Hkv, Sq, Sk, D, Dv;  // packed: the longest; a cache: its rows' slots
  bool causal = false;           // bottom right
  int key_step = 1;              // above 1: causal is top left, and key j stands at key_step j
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

// cos and sin [positions, dims / 2] of the first `dims` numbers of a row: of 2 n and 2 n + 1, or of n and dims / 2 + n.
struct Rotation {
  const float *cos = nullptr, *sin = nullptr;
  int dims = 0;
  bool pairs = false;
};
// x [B, S, H, D], row i of sequence b at position first[b] + i, or, with `together`, all at first[b].
struct RotatedRows {
  const void* x;
  DType dtype;
  int B, S, H, D;
  const int* first;
  bool together = false;
};
void reference_rotate(const RotatedRows& rows, const Rotation& rotation, double* out);
// Divides each row by its scale as a cache in f8e4m3 has it: its largest magnitude / 448.
void take_scales(double* rows, std::int64_t count, int width, double* scales);

// y [rows, n] = activation(norm(x) w^T + bias); [rows, n / 2] with swiglu.
struct Linear {
  const void* x;
  DType dtype;  // of x, bias, norm_weight and dy
  const float* w;
  std::int64_t rows, n, k;
  Activation activation = Activation::none;  // none, silu or swiglu
  const void* bias = nullptr;
  const void* norm_weight = nullptr;  // [k]: x goes through rms_norm with an eps of 1e-5
  constexpr std::int64_t outputs() const { return activation == Activation::swiglu ? n / 2 : n; }
};
void reference_linear(const Linear& layer, double* y);
// dx [rows, k] and dbias [n]; without a norm.
void reference_linear_gradients(const Linear& layer, const void* dy, double* dx, double* dbias);

}  // namespace heddle::soak
