// The table of one target's kernels. targets/<name>.cc sets HWY_TARGET, HEDDLE_TARGET (its namespace),
// HEDDLE_TARGET_UNITS (what multiplies matrices: unit-inl.h) and the rates, and includes this. A translation unit has
// one target, so that each file is included once.
#pragma once

#include "cpu/adaptive_bwd-inl.h"
#include "cpu/adaptive_fwd-inl.h"
#include "cpu/adaptive_values-inl.h"
#include "cpu/attention_baseline-inl.h"
#include "cpu/attention_bwd-inl.h"
#include "cpu/attention_fwd-inl.h"
#include "cpu/bias_gradient-inl.h"
#include "cpu/decode-inl.h"
#include "cpu/kernels.h"
#include "cpu/linear-inl.h"
#include "cpu/linear_bwd-inl.h"
#include "cpu/linear_norm-inl.h"
#include "cpu/lowbit_decode-inl.h"
#include "cpu/lowbit_encode-inl.h"
#include "cpu/partial-inl.h"
#include "cpu/pool-inl.h"
#include "cpu/row_ops-inl.h"
#include "cpu/select_blocks-inl.h"
#include "cpu/simd-inl.h"
#include "cpu/sparse_bwd-inl.h"
#include "cpu/sparse_fwd-inl.h"
#include "cpu/unit-inl.h"

namespace heddle::cpu::HEDDLE_TARGET {

extern const Kernels kKernels;
const Kernels kKernels = {
    .name = HEDDLE_TARGET_NAME,
    .group = kGroup,
    .bf16_pairs = kHasBf16Unit,
    .bf16_rows = Bf16Unit::kTileM,
    .f32_rate = HEDDLE_F32_RATE,
    .bf16_rate = HEDDLE_BF16_RATE,
    .load_row = LoadRow,
    .store_row = StoreRow,
    .forward_scratch = ForwardScratch,
    .forward = Forward,
    .key_tile = KeyTile,
    .heads_together = HeadsTogether,
    .partial_floats = PartialFloats,
    .merge = Merge,
    .baseline_scratch = BaselineScratch,
    .baseline_scores = BaselineScores,
    .baseline_softmax = BaselineSoftmax,
    .baseline_output = BaselineOutput,
    .gradient_width = GradientWidth,
    .backward_scratch = BackwardScratch,
    .backward = Backward,
    .write_gradient = WriteGradient,
    .bias_scratch = BiasScratch,
    .bias_gradient = BiasGradient,
    .sparse_scratch = SparseScratch,
    .sparse_forward = SparseForward,
    .sparse_backward_scratch = SparseBackwardScratch,
    .sparse_backward = SparseBackward,
    .value_scratch = ValueScratch,
    .value_blocks = FindValueBlocks,
    .adaptive_scratch = AdaptiveScratch,
    .adaptive_forward = AdaptiveForward,
    .adaptive_backward_scratch = AdaptiveBackwardScratch,
    .adaptive_backward = AdaptiveBackward,
    .merge_partials = MergePartials,
    .merge_partials_backward = MergePartialsBackward,
    .merge_sink_gradient = MergeSinkGradient,
    .pool_keys = PoolKeys,
    .pool_keys_backward = PoolKeysBackward,
    .select_scratch = SelectScratch,
    .select_blocks = SelectBlocks,
    .model_rows = kRowKernels,
    .lowbit = {.largest = LargestWeight, .encode = EncodeRow, .decode = DecodeRow},
    .linear = {.scratch = LinearScratch,
               .forward = LinearForward,
               .norm_row = NormRow,
               .activate_row = ActivateRow,
               .gradient_scratch = LinearGradientScratch,
               .sums_gradient = SumsGradient,
               .rows_gradient = RowsGradient,
               .norm_gradient = NormGradient,
               .norm_parameters_gradient = NormParametersGradient},
};

}  // namespace heddle::cpu::HEDDLE_TARGET
