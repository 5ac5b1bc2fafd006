// One attention call after its arguments were checked: raw pointers, strides and sizes, all of them trusted.
// Kernels and the reference see nothing else.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "heddle/attention.h"
#include "problem/band.h"
#include "problem/candidate.h"
#include "problem/int4_cache.h"
#include "problem/rotary.h"

namespace heddle {

// What a call says of a tensor and what is at its address are apart: candidates answer (supports, estimate, workspace)
// from `given`, `alignment` and strides, also before there is data; launches, and code of GPUs, read `data`, which is
// null where a tensor is not given or has no elements.

// A [batch, row, head, dim] operand. Packed operands have stride_b = 0 and are addressed through Sequence::*_begin.
struct Operand {
  std::byte* data = nullptr;
  DType dtype = DType::f32;
  bool given = false;
  std::uint16_t alignment = 1;                                          // bytes: a power of two
  std::int64_t stride_b = 0, stride_s = 0, stride_h = 0, stride_d = 0;  // elements

  explicit operator bool() const { return given; }
  constexpr std::byte* at(std::int64_t b, std::int64_t s, std::int64_t h) const {
    return data + (b * stride_b + s * stride_s + h * stride_h) * static_cast<std::int64_t>(size_of(dtype));
  }
};

// What stored f8e4m3 values are multiplied with, [batch, row, head] as their operand is addressed; broadcast extents
// have stride 0. Absent: 1.
struct Scales {
  float* data = nullptr;
  std::int64_t stride_b = 0, stride_s = 0, stride_h = 0;
  bool given = false;

  explicit operator bool() const { return given; }
  constexpr float at(std::int64_t b, std::int64_t s, std::int64_t h) const {
    return data == nullptr ? 1.0f : *place(b, s, h);
  }
  constexpr float* place(std::int64_t b, std::int64_t s, std::int64_t h) const {
    return data + (b * stride_b + s * stride_s + h * stride_h);
  }
};

// A tensor read at [b, h, i, j] (or, for lse and d_lse, at [b, h, i]); broadcast extents have stride 0.
struct Plane {
  std::byte* data = nullptr;
  DType dtype = DType::f32;
  bool given = false;
  std::uint16_t alignment = 1;                                          // bytes: a power of two
  std::int64_t stride_b = 0, stride_h = 0, stride_i = 0, stride_j = 0;  // elements

  explicit operator bool() const { return given; }
  constexpr std::int64_t offset(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j = 0) const {
    return b * stride_b + h * stride_h + i * stride_i + j * stride_j;
  }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data);
  }
};

// int32 index data of a call.
struct Indices {
  const std::int32_t* data = nullptr;
  bool given = false;

  explicit operator bool() const { return given; }
  constexpr std::int32_t operator[](std::int64_t i) const { return data[i]; }
};

// Positions lie below this: index data has 32 bits.
constexpr std::int64_t kPositions = std::numeric_limits<std::int32_t>::max();

// std::clamp by value: its references cost kernels memory.
constexpr std::int64_t clamped(std::int64_t x, std::int64_t low, std::int64_t high) {
  return x < low ? low : x > high ? high : x;
}

// One sequence of the batch.
struct Sequence {
  std::int64_t q_begin = 0, k_begin = 0;  // first row in packed (or left-padded) storage
  std::int64_t sq = 0, sk = 0;            // lengths as used
  std::int64_t q_rows = 0, k_rows = 0;  // rows stored; those from sq (sk) on hold nothing, and outputs there are empty
  std::int64_t off = 0;                 // key that row 0 is aligned with
  // Where row 0 and key 0 stand in the longer problem that the call is a piece of; 0 where it is none. Columns of bias
  // and mask, and dropout, count from there.
  std::int64_t q_offset = 0, key_offset = 0;
};

// New keys that a call writes into the cache before it attends: row i of sequence b goes to position seqused_k[b] + i,
// and nowhere if that is outside the cache.
struct Append {
  Operand k_new, v_new;  // [B, Sn, Hkv, D], [B, Sn, Hkv, Dv]
  RotaryTables rotary;   // of k_new and q
  bool by_row = false;   // q's row i stands at position seqused_k[b] + i; else each row at seqused_k[b]
  // Each new row's scale is found and written to k_scale (v_scale) rather than read from there.
  bool finds_k_scale = false, finds_v_scale = false;

  explicit operator bool() const { return static_cast<bool>(k_new); }
};

// A call without options, q, k and v drawn at random: o has q's dtype, bf16 for f8e4m3.
struct AttentionExample {
  DType q, kv;
  Precision precision;
  std::int64_t B, H, Hkv, Sq, Sk, D;
};

struct AttentionProblem {
  using Example = AttentionExample;

  std::int64_t B = 0, H = 0, Hkv = 0, G = 1;
  std::int64_t Sq = 0, Sk = 0;          // the longest sequence of each (bounds, for packed data)
  std::int64_t q_rows = 0, k_rows = 0;  // extents of q's and k's row dimension: Sq and Sk, the totals if packed, or a
                                        // page's size
  std::int64_t k_batches = 0;           // extent of k's batch dimension: B, rows of the cache, pages, or 1 if packed
  std::int64_t D = 0, Dv = 0;
  DType dtype = DType::f32;
  Device device = Device::cpu;  // where all data is, index data too

  Operand q, k, v, o;
  Plane lse;  // [b, h, i]; packed: stride_b = 0 and i counts from the packed row

  float scale = 1.0f, softcap = 0.0f;
  Causal causal = Causal::none;
  std::int64_t window_left = -1, window_right = -1;  // as the caller gave them; band() joins them with `causal`
  Plane alibi;                                       // f32 [b, h]
  Plane bias, mask;
  Plane sink;          // f32 [h]
  Indices draft_mask;  // [b, i], row stride draft_mask_stride: bits of the last sq keys
  std::int64_t draft_mask_stride = 0;
  Scales q_scale, k_scale, v_scale;
  Precision precision = Precision::f32;
  Dropout dropout;

  Indices cu_seqlens_q, cu_seqlens_k;
  Indices seqused_q, seqused_k;
  Indices page_table;  // [B, ...] row stride page_table_stride
  std::int64_t page_table_stride = 0, page_size = 0;
  Indices cache_batch_idx, cache_leftpad;

  // A piece of a longer problem (piece()): [b], where its rows and keys begin; an absent one is 0.
  // Where steps alone make it one, q_offset is given and has no data.
  Indices q_offset, key_offset;
  std::int64_t q_step = 1, key_step = 1;  // positions from a row, or key, to the next
  std::int64_t columns = -1;              // of bias and mask, those of the longer problem; -1: no more than one
  bool float32_out = false;               // o and d_o are f32, whatever q is

  // Keys in 4 bits, but for the newest. k and v are then the rings [row, kInt4Tail, head, dim], their rows chosen by
  // cache_batch_idx, and page_table holds blocks.
  Int4Blocks int4;

  std::int64_t k_appended = 0;  // keys that this call adds behind seqused_k
  Append append;                // who writes them, if it is the kernel itself

  bool batch_invariant = false, deterministic = false;

  // Reads index data, so it belongs where the data is: for problems on a GPU, inside kernels (hence constexpr). Nobody
  // has checked the data there: it is clamped, so that no row outside the tensors is named.
  constexpr Sequence stored_sequence(std::int64_t b) const {
    Sequence s;
    s.q_rows = Sq;
    s.k_rows = k_batches > 0 ? Sk : 0;
    if (cu_seqlens_q.data) {
      s.q_begin = clamped(cu_seqlens_q[b], 0, q_rows);
      s.q_rows = clamped(cu_seqlens_q[b + 1], s.q_begin, q_rows) - s.q_begin;
    }
    if (cu_seqlens_k.data) {
      s.k_begin = clamped(cu_seqlens_k[b], 0, k_rows);
      s.k_rows = clamped(cu_seqlens_k[b + 1], s.k_begin, k_rows) - s.k_begin;
    }
    s.sq = seqused_q.data ? clamped(seqused_q[b], 0, s.q_rows) : s.q_rows;
    s.sk = seqused_k.data ? clamped(seqused_k[b] + k_appended, 0, s.k_rows) : s.k_rows;
    if (cache_leftpad.data) {
      const std::int64_t skipped = clamped(cache_leftpad[b], 0, s.sk);
      s.k_begin += skipped;
      s.sk -= skipped;
    }
    s.off = causal == Causal::top_left ? 0 : s.sk - s.sq;
    return s;
  }
  // With its positions in the longer problem, if the call is a piece of one. Kernels that refuse pieces, as most of
  // GPUs do, take stored_sequence(), and do not pay for the question.
  constexpr Sequence sequence(std::int64_t b) const {
    Sequence s = stored_sequence(b);
    if (piece()) {
      s.q_offset = q_offset.data ? clamped(q_offset[b], 0, kPositions) : 0;
      s.key_offset = key_offset.data ? clamped(key_offset[b], 0, kPositions) : 0;
      s.off = s.q_offset - s.key_offset;
    }
    return s;
  }

  // Where key (and value) j of sequence b is stored: k.at(batch, row, h). Indices are clamped, as lengths are.
  struct Slot {
    std::int64_t batch, row;
  };
  constexpr Slot key_slot(std::int64_t b, const Sequence& s, std::int64_t j) const {
    const std::int64_t slot = s.k_begin + j;
    if (page_table.data) {
      return {clamped(page_table[b * page_table_stride + slot / page_size], 0, k_batches - 1), slot % page_size};
    }
    return {cache_batch_idx.data ? clamped(cache_batch_idx[b], 0, k_batches - 1) : b, slot};
  }

  // Row of the rings (and of blocks without a page table) that sequence b has.
  constexpr std::int64_t int4_row(std::int64_t b) const {
    return cache_batch_idx.data ? clamped(cache_batch_idx[b], 0, k_batches - 1) : b;
  }
  // Block n of sequence b, head h.
  constexpr std::byte* int4_block(std::int64_t b, std::int64_t n, std::int64_t h) const {
    const std::int64_t at = page_table.data ? clamped(page_table[b * page_table_stride + n], 0, int4.pages - 1) : n;
    return int4.data +
           ((page_table.data ? 0 : int4_row(b) * int4.stride_row) + at * int4.stride_block + h * int4.stride_h);
  }

  // First byte of key (or value) row j of sequence b, head h.
  constexpr std::byte* key_row(const Operand& x, std::int64_t b, const Sequence& s, std::int64_t j,
                               std::int64_t h) const {
    const Slot at = key_slot(b, s, j);
    return x.at(at.batch, at.row, h);
  }

  // Whether rows and keys have positions of their own.
  constexpr bool piece() const { return q_offset.given || key_offset.given; }
  // Whether some stand for several positions each.
  constexpr bool stepped() const { return q_step > 1 || key_step > 1; }

  // Whether scores depend on pairs in more than their distance.
  bool has_planes() const { return bias || mask || draft_mask; }

  // Whether the draft's mask keeps row i from key j.
  constexpr bool draft_removes(std::int64_t b, const Sequence& s, std::int64_t i, std::int64_t j) const {
    const std::int64_t t = j - (s.sk - s.sq);
    return draft_mask.data != nullptr && t >= 0 && (draft_mask[b * draft_mask_stride + i] >> t & 1) == 0;
  }

  // What causality and window leave of the pairs of rows [0, sq) and keys [0, sk).
  constexpr Band band(const Sequence& s) const {
    Band band = band_without_steps(s);
    band.row_step = q_step;
    band.key_step = key_step;
    return band;
  }
  // The keys that row i may attend by them, for kernels that refuse steps above 1 and so do not pay for the question.
  constexpr KeyRange key_range(const Sequence& s, std::int64_t i) const { return band_without_steps(s).keys_of(i); }

 private:
  constexpr Band band_without_steps(const Sequence& s) const {
    Band band{.off = s.off, .rows = s.sq, .keys = s.sk};
    if (window_left >= 0) band.left = window_left;
    if (window_right >= 0) band.right = window_right;
    if (causal != Causal::none && band.right > 0) band.right = 0;
    return band;
  }
};

// What a backward call adds to the problem it differentiates.
struct AttentionBackwardProblem : AttentionProblem {
  Operand d_o, dq, dk, dv;  // each of dq, dk, dv may be absent
  Plane d_lse;              // f32 [b, h, i] or absent
  Plane dbias;              // bias's dtype, broadcast strides 0, or absent
  std::int64_t bias_batch = 1, bias_heads = 1, bias_rows = 1, bias_columns = 1;  // extents of bias and dbias
  Plane dsink;                                                                   // f32 [h] or absent
  bool accumulate = false;                                                       // dq, dk and dv, f32, are added to
  bool merged = false;  // o and lse are those of the longer problem that this one is a piece of
};

// What a call may ask for and few kernels do: Kernel::extras. Those that a kernel does not name are refused for it.
enum Extra : unsigned {
  kE4m3 = 1,                // f8e4m3 operands
  kDraftMask = 2,           // draft_mask
  kAppend = 4,              // writing new keys into the cache in the same launch
  kInt4 = 8,                // a cache in 4 bits
  kInt8Qk = 16,             // Precision::int8_qk
  kPiece = 32,              // q_offset and key_offset; the backward of what was merged
  kFloat32Out = 64,         // o in f32 beside q of 16 or 8 bits
  kFloat32Gradients = 128,  // dq, dk and dv in f32 beside q of 16 bits, or added to
  kSteps = 256,             // q_step and key_step above 1
};

using AttentionForwardKernel = Kernel<AttentionProblem>;
using AttentionBackwardKernel = Kernel<AttentionBackwardProblem>;

}  // namespace heddle
