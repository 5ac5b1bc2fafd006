// A cache of keys and values: rows rotated and appended to it, and decoding over it in one call.
//
// A cache is contiguous, [rows, Smax, Hkv, D], or in pages, [pages, page_size, Hkv, D], of which page_table lists each
// sequence's. docs/kv_cache.md. The cache in 4 bits is heddle/int4_cache.h.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "heddle/attention.h"
#include "heddle/candidate.h"
#include "heddle/runtime.h"
#include "heddle/tensor.h"

namespace heddle {

// Rotary embedding (Su et al., arXiv 2104.09864). The first R dimensions of a row, in pairs, are turned by the angles
// of the row's position; the others stay as they are.
struct Rotary {
  TensorView cos = {}, sin = {};  // f32 or the data's dtype, [positions, R / 2]; R is even and at most D
  bool interleaved = false;       // pairs (0, 1), (2, 3), ...; else (0, R / 2), (1, R / 2 + 1), ...
};

struct RotaryOptions {
  TensorView offsets = {};  // int32 [B]: the position of each sequence's first row. Not given: 0
  std::string force = {};   // a candidate's name
};

// Rotates x [B, S, H, D], f32, f16 or bf16, into `out`, which may be x itself. Row i of sequence b stands at position
// offsets[b] + i. A position outside the tables throws Error before anything is written; on a GPU positions are not
// read before, and the table's nearest row serves it.
void apply_rotary(const TensorView& x, const TensorView& out, const Rotary& rotary, const RotaryOptions& options = {},
                  const Runtime& runtime = {});

// The candidates for such a call, and which one would run. Reads no data but index data on the CPU.
std::vector<Candidate> explain_apply_rotary(const TensorView& x, const TensorView& out, const Rotary& rotary,
                                            const RotaryOptions& options = {}, const Runtime& runtime = {});

struct AppendOptions {
  Rotary rotary = {};               // of k_new, at the positions that it goes to; not given: it is written as it is
  TensorView page_table = {};       // int32 [B, max_pages]: the cache is in pages
  TensorView cache_batch_idx = {};  // int32 [B]: each sequence's row of a contiguous cache. Not given: b
  // f32, of a cache in f8e4m3, which holds x / scale, rounded to nearest even and saturating. By their shape they are
  //   read       [1, 1, Hkv] or [1, 1, 1]: one scale for each head, or one for all. Not given: 1
  //   or written the cache's shape without its last extent: one for each slot and head, the largest magnitude of the
  //   new
  //              row there / 448. A row's NaN stay NaN, and its infinities become the largest finite numbers.
  // attention_forward takes them as they are.
  TensorView k_scale = {}, v_scale = {};
  std::string force = {};  // a candidate's name
};

// Writes k_new [B, Sn, Hkv, D] and v_new [B, Sn, Hkv, Dv] to the cache, behind the seqlens[b] keys (int32 [B]) that
// each sequence has: at positions seqlens[b] .. seqlens[b] + Sn - 1. seqlens is not changed. The cache has the dtype of
// the new rows, or f8e4m3 beside f16 or bf16.
//
// Positions, rows and pages out of range, and two new rows for one slot, throw Error before anything is written. On a
// GPU index data is not read before: rows out of range are dropped there, and which of two rows for one slot stays is
// not said.
void append_kv_cache(const TensorView& k_new, const TensorView& v_new, const TensorView& k_cache,
                     const TensorView& v_cache, const TensorView& seqlens, const AppendOptions& options = {},
                     const Runtime& runtime = {});

// The candidates for such a call, and which one would run. Reads no data but index data on the CPU.
std::vector<Candidate> explain_append_kv_cache(const TensorView& k_new, const TensorView& v_new,
                                               const TensorView& k_cache, const TensorView& v_cache,
                                               const TensorView& seqlens, const AppendOptions& options = {},
                                               const Runtime& runtime = {});

// Decoding in one call: appends k_new and v_new as append_kv_cache does, rotates q [B, Sq, H, D], and attends the
// cache. options.seqused_k (int32 [B]) has the lengths before the append; sequence b attends seqused_k[b] + Sn keys.
// options also says where the cache's rows are (page_table, cache_batch_idx), and has its scales, which are read or
// written as AppendOptions says. With cache_leftpad it counts slots, and positions are slots.
//
// If rotary is given, q's row i is rotated to position seqused_k[b] + i with causality or a window, and all rows to
// seqused_k[b] without.
//
// On a GPU the host does not read lengths: new rows that would fall outside the cache are dropped there. One launch
// where a candidate can.
void attention_with_kv_cache(const TensorView& q, const TensorView& k_new, const TensorView& v_new,
                             const TensorView& k_cache, const TensorView& v_cache, const TensorView& o,
                             const TensorView& lse, const Rotary& rotary, const AttentionOptions& options,
                             const Runtime& runtime);

std::size_t attention_with_kv_cache_workspace(const TensorView& q, const TensorView& k_new, const TensorView& v_new,
                                              const TensorView& k_cache, const TensorView& v_cache,
                                              const Rotary& rotary, const AttentionOptions& options,
                                              const Runtime& runtime = {});

}  // namespace heddle
