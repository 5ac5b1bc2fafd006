// What native sparse attention needs beside attention: pooled keys, and the blocks that their scores choose
// (docs/nsa.md). Attention over pooled keys and values is attention_forward's, attention over the chosen blocks
// sparse_attention_forward's.
//
// Words: as in attention.h. A pooled key c stands for the keys [c * stride, c * stride + block) of its sequence, and
// there is one for each complete block: N = (S - block) / stride + 1 of a sequence of S keys, none if S < block.
// Yuan et al. (native sparse attention), arXiv 2502.11089.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "heddle/candidate.h"
#include "heddle/runtime.h"
#include "heddle/tensor.h"

namespace heddle {

struct PoolOptions {
  std::int64_t block = 64, stride = 64;  // keys: block >= stride >= 1
  TensorView cu_seqlens = {};            // int32 [B + 1], packed sequences: they begin at 0 and end at total
  TensorView seqused = {};               // int32 [B], keys of each sequence that are used, the first ones; else all
  // Of extend_pooled_keys alone: keys of each sequence that are new, and where its pages are, int32 [B, pages of one].
  std::int64_t appended = 0;
  TensorView page_table = {};
  std::string force = {};  // a candidate's name
};

// The means of blocks of keys, or of values:
//   batched   x [B, S, Hkv, D]      pooled [B, N, Hkv, D]
//   packed    x [total, Hkv, D]     pooled [total / stride, Hkv, D]; sequence b's rows begin at cu_seqlens[b] / stride
// (divisions round down), so that attention over them takes cu_seqlens / stride as cu_seqlens_k and each sequence's N
// as seqused_k. Rows that no sequence has, and with seqused those behind its own N, are zeros. f32, f16 or bf16, both
// the same; any strides; D at least 1. Sums are f32, keys in their order, and are divided by `block`. Throws Error on a
// bad argument before anything is written. Takes no workspace.
void pool_keys(const TensorView& x, const TensorView& pooled, const PoolOptions& options, const Runtime& runtime = {});
// For a cache that grows: x [B, S, Hkv, D] with options.seqused, of whose keys the last options.appended, at least one,
// are new. Of pooled [B, N, Hkv, D] only the rows of blocks that end among these are written, as pool_keys writes them.
// With options.page_table the cache is in pages: x [pages, page_size, Hkv, D] and pooled [pages, page_size / stride,
// Hkv, D], whose page_size is a multiple of stride. Page page_table[b][n] has keys [n page_size, (n + 1) page_size) of
// sequence b and the pooled keys of the blocks that begin there; a block may end in the next page.
void extend_pooled_keys(const TensorView& x, const TensorView& pooled, const PoolOptions& options,
                        const Runtime& runtime = {});
// dx, of x's shape: the sum of d_pooled_c / block over the blocks c that hold the key, in f32, c ascending; 0 for keys
// in no complete block.
void pool_keys_backward(const TensorView& d_pooled, const TensorView& dx, const PoolOptions& options,
                        const Runtime& runtime = {});

// The candidates for such calls, and which one would run. Read no data but index data; views may be without it.
std::vector<Candidate> explain_pool_keys(const TensorView& x, const TensorView& pooled, const PoolOptions& options,
                                         const Runtime& runtime = {});
std::vector<Candidate> explain_pool_keys_backward(const TensorView& d_pooled, const TensorView& dx,
                                                  const PoolOptions& options, const Runtime& runtime = {});

// Blocks that are listed before all others, whatever their scores: of a row at position t the numbers 0,
// t / block_size - 1 and t / block_size.
struct ForcedBlocks {
  bool first = true, previous = true, current = true;
};

struct SelectOptions {
  std::optional<float> scale;           // of q.k; not given: 1 / sqrt(D)
  std::int64_t block_size = 64;         // l', keys of a block of the lists: 16, 32, 64 or 128
  std::int64_t compression_block = 0;   // l, keys of a pooled key; 0: block_size. At most 65536
  std::int64_t compression_stride = 0;  // d, from one to the next; 0: compression_block. It divides l and l'
  ForcedBlocks forced = {};
  // q_offset: int32 [B], the position of each sequence's first row, not given: 0. Row i stands at
  // q_offset[b] + q_step * i, which must be below 2^31 - 1.
  TensorView q_offset = {};
  std::int64_t q_step = 1;  // at least 1
  // Packed rows, int32 [B + 1]; packed pooled keys, int32 [B + 1], where each sequence's begin; and how many each
  // sequence has, int32 [B].
  TensorView cu_seqlens_q = {}, cu_seqlens_k = {}, seqused_k = {};
  // k_pooled lies in pages, [pages, page_size, Hkv, D]: int32 [B, pages of a sequence]; not beside cu_seqlens_k.
  TensorView page_table = {};
  std::int64_t max_seqlen_q = 0, max_seqlen_k = 0;  // bounds of packed lengths; 0: read from cu_seqlens, on the CPU
  std::string force = {};                           // a candidate's name
};

// For each row and key/value head the n blocks with the highest scores; nothing of the size [H, Sq, N] is stored.
//   batched   q [B, Sq, H, D]     k_pooled [B, N, Hkv, D]    lse [B, H, Sq]      blocks [B, Sq, Hkv, n]
//   packed    q [total_q, H, D]   k_pooled [.., Hkv, D]      lse [H, total_q]    blocks [total_q, Hkv, n]
// q and k_pooled, k here, are f32, f16 or bf16, both the same. lse is f32 and read: ln of the sum of exp(scale q.k)
// over the pooled keys that the row sees, as attention over them writes it; not given, it is found on the way, at the
// price of a second product. blocks is int32 and written: BlockLists::blocks (heddle/sparse.h) with query_rows 1 and
// these lists' block_size. Entries are contiguous, other strides free.
//
// Meaning: a row at position t sees pooled key c if c d + l - 1 <= t. With G = H / Hkv,
//   p_cmp[c] = sum over the heads h of the group of exp(scale q_h.k_c - lse_h)
//   p_slc[j] = sum over m < l' / d, n < l / d of p_cmp[(l' / d) j + m - n]    (the paper's Eq. 9, with the sign that
// lets overlapping blocks meet) over the c that the row sees; with l = d = l', p_slc is p_cmp. Listed are the forced
// blocks, the lower number first, then those that a seen pooled key touches, by falling p_slc, the lower number first
// among equals; -1 behind the last. A block whose score is NaN is not listed. The lists have no gradient.
//
// Scores are f32, so blocks whose scores differ by less than their rounding may change places. Lists do not depend on
// the number of threads, or on what else is in the batch. Throws Error on a bad argument before anything is written.
void select_blocks(const TensorView& q, const TensorView& k_pooled, const TensorView& lse, const TensorView& blocks,
                   const SelectOptions& options, const Runtime& runtime);
// Bytes of workspace: for each worker what does not grow with Sq, N or the batch: 128 pooled keys in f32, and for some
// rows (as many as 2^16 / (G D), at least three vectors' lanes) q of the group in f32 and min(n, blocks) entries of 8
// bytes, and with l > d the scores of l / l' blocks. Reads no data but index data.
std::size_t select_blocks_workspace(const TensorView& q, const TensorView& k_pooled, const TensorView& lse,
                                    const TensorView& blocks, const SelectOptions& options,
                                    const Runtime& runtime = {});
std::vector<Candidate> explain_select_blocks(const TensorView& q, const TensorView& k_pooled, const TensorView& lse,
                                             const TensorView& blocks, const SelectOptions& options,
                                             const Runtime& runtime = {});

// A step of decoding over a cache of B sequences that holds pooled keys beside the keys; rows are contiguous, and other
// strides free. All of one dtype but the gates and lengths, and all on one device.
struct NsaCache {
  TensorView k, v;                // [B, capacity, Hkv, D], [B, capacity, Hkv, Dv]; written
  TensorView k_pooled, v_pooled;  // [B, N, Hkv, D], [B, N, Hkv, Dv], N = capacity / block_size, means of whole blocks
  TensorView lengths;             // int32 [B]: keys that each sequence has before the step; read
  // Int32 [B, pages of a sequence]: the cache is in pages, k and v [pages, page_size, Hkv, D or Dv], pooled ones
  // [pages, page_size / block_size, Hkv, D or Dv], as extend_pooled_keys has it; not given: it is not.
  TensorView page_table = {};
};

// g_cmp, g_slc, g_swa [B, 1, H]: f32, f16 or bf16, any strides. Not given: no such branch, though blocks are chosen by
// the compressed scores all the same. g_slc must be given, and g_swa where window is above 0.
struct NsaGates {
  TensorView cmp, slc, swa;
};

struct NsaStepOptions {
  std::optional<float> scale;     // of q.k; not given: 1 / sqrt(D)
  std::int64_t block_size = 64;   // keys of a block of the lists, and of a pooled key: 16, 32, 64 or 128
  std::int64_t block_count = 16;  // blocks of a list, the forced ones among them
  std::int64_t window = 0;        // keys of the window, the step's own among them; 0: there is none
  ForcedBlocks forced = {};
  bool batch_invariant = false;  // a sequence's bits do not depend on how many others there are
  std::string force = {};        // a candidate's name
};

// One new row of each sequence, at position lengths[b]: appends its key and value to the cache, and the means of the
// block that they end, if they end one, as extend_pooled_keys does; then out = cmp o_cmp + slc o_slc + swa o_swa, where
// o_cmp is attention over the pooled keys of complete blocks, o_slc over the blocks that select_blocks() would list,
// o_swa over the last `window` keys. Branches are summed in f32 and rounded once; one without keys is 0.
//   q [B, 1, H, D]     k_new [B, 1, Hkv, D]     v_new [B, 1, Hkv, Dv]     out [B, 1, H, Dv]; f16 or bf16
// Does not write lengths: the caller adds 1. A length outside [0, capacity) is clamped, and that sequence's key is not
// written, as append_kv_cache leaves it out on a GPU. Served on Hopper alone. Throws Error on a bad argument before
// anything is written.
void nsa_step(const TensorView& q, const TensorView& k_new, const TensorView& v_new, const NsaCache& cache,
              const NsaGates& gates, const TensorView& out, const NsaStepOptions& options, const Runtime& runtime);
// Bytes of workspace: 4 for each query head and pooled key of the cache. Reads no data.
std::size_t nsa_step_workspace(const TensorView& q, const TensorView& k_new, const TensorView& v_new,
                               const NsaCache& cache, const NsaGates& gates, const TensorView& out,
                               const NsaStepOptions& options, const Runtime& runtime = {});
std::vector<Candidate> explain_nsa_step(const TensorView& q, const TensorView& k_new, const TensorView& v_new,
                                        const NsaCache& cache, const NsaGates& gates, const TensorView& out,
                                        const NsaStepOptions& options, const Runtime& runtime = {});

}  // namespace heddle
