// A cache of keys and values in 4 bits, about 4.5 bits for each number, whose newest 64 to 127 keys stay in 16 bits.
//
// Keys are quantised in blocks of 64, K with a scale and a zero for each channel (outliers of K are channels), V with
// one for each key and 64 channels (KIVI: Liu et al., arXiv 2402.02750): a stored x stands for zero + code * scale. The
// newest keys are in a ring of 128 slots, key j in slot j % 128. A sequence of n keys has int4_cache_blocks(n) blocks;
// an append moves 64 keys into a block as soon as 64 newer ones are there. So a sequence may be cut short only as far
// as its number of blocks stays. The format to the bit: docs/kv_cache.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "heddle/attention.h"
#include "heddle/kv_cache.h"

namespace heddle {

struct Int4Cache {
  TensorView blocks;          // u8 [pages, Hkv, bytes] with page_table, else [rows, max_blocks, Hkv, bytes]
  TensorView k_tail, v_tail;  // f16 or bf16 [rows, 128, Hkv, D], [rows, 128, Hkv, Dv]: the rings
  TensorView page_table;      // int32 [B, max_blocks]: the page of each block
  TensorView row_idx;  // int32 [B]: each sequence's row of the rings, and of blocks without a table. Not given: b
};

// Bytes of a block of one kv head. D, Dv: multiples of 64 up to 256.
std::int64_t int4_cache_block_bytes(std::int64_t D, std::int64_t Dv);
// Blocks of a sequence of so many keys: (keys - 64) / 64, at least 0.
std::int64_t int4_cache_blocks(std::int64_t keys);

struct Int4AppendOptions {
  Rotary rotary = {};      // of k_new, at the positions that it goes to; not given: it is written as it is
  std::string force = {};  // a candidate's name
};

// Appends k_new [B, Sn, Hkv, D] and v_new [B, Sn, Hkv, Dv], of the rings' dtype, behind the seqlens[b] keys (int32 [B],
// not changed) that each sequence has. A sequence may have max_blocks * 64 + 127 keys. What is not finite makes its
// group NaN; what is beyond float16 saturates.
//
// Lengths, rows and pages out of range, and two sequences with one row or page to be written, throw Error before
// anything is written. On a GPU index data is not read before: a sequence that would grow too long is left as it is
// there, and rows and pages out of range are dropped.
void append_int4_cache(const TensorView& k_new, const TensorView& v_new, const Int4Cache& cache,
                       const TensorView& seqlens, const Int4AppendOptions& options = {}, const Runtime& runtime = {});

// The candidates for such a call, and which one would run. Reads no data but index data on the CPU.
std::vector<Candidate> explain_append_int4_cache(const TensorView& k_new, const TensorView& v_new,
                                                 const Int4Cache& cache, const TensorView& seqlens,
                                                 const Int4AppendOptions& options = {}, const Runtime& runtime = {});

// attention_forward over the cache: keys that a block holds are those that its codes stand for. options.seqused_k says
// how many keys each sequence has; page_table, cache_batch_idx and cu_seqlens_k are not taken.
void attention_over_int4_cache(const TensorView& q, const Int4Cache& cache, const TensorView& o, const TensorView& lse,
                               const AttentionOptions& options, const Runtime& runtime);

std::size_t attention_over_int4_cache_workspace(const TensorView& q, const Int4Cache& cache,
                                                const AttentionOptions& options, const Runtime& runtime = {});

std::vector<Candidate> explain_attention_over_int4_cache(const TensorView& q, const Int4Cache& cache,
                                                         const AttentionOptions& options, const Runtime& runtime = {});

}  // namespace heddle
