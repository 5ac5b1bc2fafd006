// What a launch tells kernels that compute scores.
#pragma once

#include <cstdint>

#include "cuda/any/attention_int8_qk/layout.h"
#include "cuda/common/attention/window.h"
#include "cuda/common/divisor.h"
#include "problem/attention.h"
#include "problem/tile_lists.h"

namespace heddle::cuda::sm80::attention {

struct Params {
  AttentionProblem problem;
  Divisor heads, group;   // H, G
  int units;              // B * H
  int q_tiles;            // of the longest sequence
  Divisor section;        // heads whose keys and values the L2 cache holds together
  Divisor section_tiles;  // section * q_tiles
  Divisor page_size;
  // Row i attends keys j with row_step i + off - left <= key_step j <= row_step i + off + right.
  int left, right, row_step;
  Divisor key_step;
  bool stepped;                         // one of them is not 1
  bool gaps;                            // rows stand so far apart that there may be keys between which none meets
  float scale_log2;                     // scale * log2(e)
  bool bias_pairs, mask_pairs;          // two columns may be read at once
  bool o_aligned;                       // rows of o may be written in pieces of 16 bytes
  std::uint32_t drop_below;             // a probability whose random word is less is dropped
  any::attention_int8_qk::Codes codes;  // of q and k, where they are multiplied in 8 bits
  TileLists lists;
};

// What every kernel must know of the scores of p: all but what counts its tiles, and where codes and lists lie.
Params score_params(const AttentionProblem& p);

// The longest sequence; and the most positions of sequences and windows of a piece of a longer problem, whose rows and
// keys may stand 2^31 apart.
constexpr std::int64_t kMaxLength = kOpen / 2, kMaxPiece = kOpen / 4;

// Whether scores are products times the scale and nothing else, under causality and window that leave each row keys
// without gaps. Plain rows take their maximum before the scale and multiply -inf by it, so that it must be positive.
bool plain_scores(const AttentionProblem& p);

// Whether there may be keys between two rows' windows that no row meets.
bool has_gaps(const AttentionProblem& p);

// Whether float32 operands are rounded to tf32; and how many products of the tensor cores one of elements takes.
inline bool uses_tf32(const AttentionProblem& p) { return p.dtype == DType::f32 && p.precision == Precision::tf32; }
inline int products_of(const AttentionProblem& p) { return p.dtype == DType::f32 && !uses_tf32(p) ? 3 : 1; }

}  // namespace heddle::cuda::sm80::attention
