// All CPU kernels of one target. targets/<name>.cc sets HWY_TARGET, HEDDLE_TARGET (its namespace), HEDDLE_TARGET_BF16
// and the rates, and includes this once.

#include <hwy/highway.h>
#if HEDDLE_TARGET_BF16
// Highway 1.0.3 has no target with AVX512_BF16; widen its AVX-512 one.
#undef HWY_TARGET_STR
#define HWY_TARGET_STR HWY_TARGET_STR_AVX3 ",avx512bf16,avx512vnni"
#endif

#include "cpu/kernels.h"
#include "cpu/task_walk.h"

// Each file uses those above it.
// clang-format off
#include "cpu/simd-inl.h"
#include "cpu/gemm-inl.h"
#include "cpu/rows-inl.h"
#include "cpu/lowbit_elements-inl.h"
#include "cpu/lowbit_search-inl.h"
#include "cpu/lowbit_encode-inl.h"
#include "cpu/lowbit_decode-inl.h"
#include "cpu/widened_keys-inl.h"
#include "cpu/keys-inl.h"
#include "cpu/scores-inl.h"
#include "cpu/softmax-inl.h"
#include "cpu/decode_products-inl.h"
#include "cpu/decode-inl.h"
#include "cpu/attention_fwd-inl.h"
#include "cpu/attention_baseline-inl.h"
#include "cpu/attention_bwd_rows-inl.h"
#include "cpu/attention_bwd_scores-inl.h"
#include "cpu/attention_bwd-inl.h"
#include "cpu/bias_gradient-inl.h"
#include "cpu/row_ops-inl.h"
#include "cpu/linear_norm-inl.h"
#include "cpu/linear_codes-inl.h"
#include "cpu/linear_products-inl.h"
#include "cpu/linear_int8-inl.h"
#include "cpu/linear-inl.h"
#include "cpu/linear_bwd-inl.h"
// clang-format on

namespace heddle::cpu::HEDDLE_TARGET {

extern const Kernels kKernels;
const Kernels kKernels = {
    .name = HEDDLE_TARGET_NAME,
    .group = kGroup,
    .bf16_pairs = HEDDLE_TARGET_BF16 != 0,
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
