// The one table of attention cases. Tests, `heddle check` and the benchmark take their rows from here.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "heddle/attention.h"
#include "kit/host_tensor.h"

namespace heddle::kit {

enum class Purpose : std::uint8_t {
  round,    // sizes that fill tiles and registers
  odd,      // sizes one off them
  corner,   // nothing to attend, one key, extreme values
  feature,  // each option, and options together
  decode,   // few rows, many keys
};
const char* name_of(Purpose purpose);

// What the numbers look like. All have outliers that make the softmax of some rows peaked.
enum class Values : std::uint8_t {
  normal,
  large_logits,  // scores in the hundreds; in tens where they are not exact (Precision)
  far_keys,      // each channel of k far from 0, about the same number
};

enum class Alibi : std::uint8_t { none, per_head, per_batch };

// Scales of f8e4m3 operands: one number, one for each head of each sequence (of each page, of each cache row), or one
// for each row of each head.
enum class Scaling : std::uint8_t { none, one, heads, rows };

// Which extents of a bias or mask are full; the others are 1.
struct Extents {
  bool given = false, batch = false, heads = false, rows = false, columns = false;
};

struct AttentionCase {
  std::string name = {};
  Purpose purpose = Purpose::feature;
  DType dtype = DType::f32;
  Precision precision = Precision::f32;  // in every row of the table: see in_tf32(), in_int8_qk()
  std::int64_t B = 1, H = 1, Hkv = 1, Sq = 1, Sk = 1, D = 1, Dv = 1;  // lengths are the longest, when packed

  std::optional<float> scale = std::nullopt;
  Causal causal = Causal::none;
  std::int64_t window_left = -1, window_right = -1;
  float softcap = 0;
  Alibi alibi = Alibi::none;
  Extents bias = {}, mask = {};
  bool bias_f32 = false;    // f32 bias beside 16-bit operands
  bool bias_holes = false;  // some -inf entries; a whole row of them where the bias has rows
  bool mask_empty = false;  // nothing may be attended
  bool sink = false;
  float dropout = 0;
  bool draft_mask = false;
  bool f8_cache = false;  // k and v in f8e4m3 beside 16-bit q
  Scaling scaling = Scaling::none;

  bool packed_q = false, packed_k = false;
  bool seqused_q = false, seqused_k = false;
  std::int64_t page_size = 0;  // 0: not paged
  bool cache_batch_idx = false, leftpad = false;
  bool q_offset = false, key_offset = false;  // a piece of a longer problem
  // Keys of a step above 1 stand, if they have offsets, where the blocks of key_step positions end: at key_step - 1 and
  // so on.
  std::int64_t q_step = 1, key_step = 1;
  bool float32_out = false;

  Layout layout_q = Layout::contiguous, layout_k = Layout::contiguous,
         layout_o = Layout::contiguous;  // layout_k: v too
  Values values = Values::normal;
  bool poison_keys = false;  // NaN also in keys that no row attends
  bool poison_rows = false;  // NaN also in rows (of q and d_o) that attend no key
  bool d_lse = false;
  bool forward_only = false;  // large for the tiles of a GPU's forward: a backward would take the CPU's tests too long

  // k's and v's.
  DType k_dtype() const { return f8_cache ? DType::f8e4m3 : dtype; }
  DType o_dtype() const { return float32_out ? DType::f32 : dtype == DType::f8e4m3 ? DType::bf16 : dtype; }
  // Of bias and mask: in a piece, those of a problem that is longer at both ends.
  bool piece() const { return q_offset || key_offset; }
  bool stepped() const { return q_step > 1 || key_step > 1; }
  bool partial() const { return piece() || (float32_out && dtype != DType::f32); }
  std::int64_t columns() const { return piece() ? kMostOffset + Sk + 5 : Sk; }
  static constexpr std::int64_t kMostOffset = 37;
  bool has_backward() const {
    return !forward_only && precision != Precision::int8_qk && page_size == 0 && !cache_batch_idx && !leftpad &&
           !draft_mask && k_dtype() != DType::f8e4m3;
  }
};

// All rows, in a fixed order, with unique names of letters, digits and underscores.
const std::vector<AttentionCase>& attention_cases();
// The f32 rows once more under Precision::tf32, "_tf32" at the end of their names: for GPUs, as the CPU does not ask.
std::vector<AttentionCase> in_tf32(const std::vector<AttentionCase>& rows);
// The rows with 16-bit q, k and v once more under Precision::int8_qk, "_int8_qk" at the end of their names, and rows of
// its own: for GPUs, as no candidate of the CPU takes it.
std::vector<AttentionCase> in_int8_qk(const std::vector<AttentionCase>& rows);
// Throws Error if there is no such row.
const AttentionCase& attention_case(const std::string& name);

}  // namespace heddle::kit
