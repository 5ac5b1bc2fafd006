// The GPU's candidates: the one list of them. The choice asks them (src/ops), a build without CUDA stands in for them
// (src/stubs/cuda.cc), and tests hold what each says of itself to its line here.
#pragma once

#include <type_traits>
#include <vector>

#include "problem/attention.h"
#include "problem/gate_branches.h"
#include "problem/int4_append.h"
#include "problem/kv_cache.h"
#include "problem/linear.h"
#include "problem/nsa_step.h"
#include "problem/partial.h"
#include "problem/pool.h"
#include "problem/quantize.h"
#include "problem/select_blocks.h"
#include "problem/sparse.h"
#include "problem/unpack_weights.h"

// K(problem, symbol, name, method, automatic), in the order in which `explain` lists them.
#define HEDDLE_CUDA_KERNELS(K)                                                                                \
  /* wgmma and TMA, for Hopper; with q, k and v in e4m3; for few rows, keys split */                          \
  K(AttentionProblem, kSm90AttentionForward, "sm90", "flash", true)                                           \
  K(AttentionProblem, kSm90AttentionForwardFp8, "sm90_fp8", "flash", true)                                    \
  K(AttentionProblem, kSm90AttentionDecode, "sm90_decode", "flash", true)                                     \
  /* mma.sync, every option, from Ampere on; with q and k in 8 bits, when asked for; for few rows */          \
  K(AttentionProblem, kSm80AttentionForward, "sm80", "flash", true)                                           \
  K(AttentionProblem, kSm80AttentionForwardInt8, "sm80_int8", "flash", true)                                  \
  K(AttentionProblem, kSm80AttentionDecode, "sm80_decode", "flash", true)                                     \
  /* every dtype and option, from Ampere on: the full score matrix; the four steps in their plain form */     \
  K(AttentionProblem, kAttentionForwardBaseline, "baseline_cuda", "baseline", false)                          \
  K(AttentionProblem, kNaiveAttentionForward, "naive_cuda", "naive", false)                                   \
  K(AttentionBackwardProblem, kSm90AttentionBackward, "sm90", "flash", true)                                  \
  K(AttentionBackwardProblem, kSm80AttentionBackward, "sm80", "flash", true)                                  \
  /* mma.sync: for very few rows, from global memory to registers; every format */                            \
  K(LinearProblem, kSm80Gemv, "sm80_gemv", "linear", true)                                                    \
  K(LinearProblem, kSm80Linear, "sm80_linear", "linear", true)                                                \
  /* wgmma, for Hopper: weights decoded in registers; the same with products in e4m3 */                       \
  K(LinearProblem, kSm90LinearW4A16, "sm90_w4a16", "linear", true)                                            \
  K(LinearProblem, kSm90LinearW4A8, "sm90_w4a8", "linear", true)                                              \
  /* cuBLASLt, loaded at run time: W in 16 bits, kept or decoded before the product; in int8 or e4m3 */       \
  K(LinearProblem, kCublasLtLinear, "cublaslt", "linear", true)                                               \
  K(LinearProblem, kCublasLtLinearW8A8, "cublaslt_w8a8", "linear", true)                                      \
  K(LinearBackwardProblem, kCublasLtLinearBackward, "cublaslt", "linear", true)                               \
  /* over lists of key blocks, wgmma or mma.sync: by blocks, partial results joined, or by rows   */          \
  K(SparseProblem, kSm90SparseForward, "sm90", "flash", true)                                                 \
  /* by the dense kernels for Hopper, of tiles of rows that share a list */                                   \
  K(SparseProblem, kSm90TilesForward, "sm90_tiles", "flash", true)                                            \
  K(SparseProblem, kSm80SparseForward, "sm80", "flash", true)                                                 \
  K(SparseBackwardProblem, kSm90TilesBackward, "sm90_tiles", "flash", true)                                   \
  K(SparseBackwardProblem, kSm80SparseBackward, "sm80", "flash", true)                                        \
  /* native sparse attention, from Ampere on: means of keys and their gradients, and blocks chosen by them */ \
  K(PoolProblem, kPoolKeys, "cuda", "pool", true)                                                             \
  K(PoolBackwardProblem, kPoolKeysBackward, "cuda", "pool", true)                                             \
  /* with wgmma, for Hopper, where lse is given */                                                            \
  K(SelectProblem, kSm90SelectBlocks, "sm90", "select", true)                                                 \
  K(SelectProblem, kSm80SelectBlocks, "sm80", "select", true)                                                 \
  /* a step of decoding of it in one launch, a cluster for each key/value head of a sequence, for Hopper */   \
  K(NsaStepProblem, kSm90NsaStep, "sm90", "nsa_step", true)                                                   \
  /* partial results joined, from Ampere on, and the gradients of that */                                     \
  K(MergeProblem, kMergeAttention, "cuda", "merge", true)                                                     \
  K(MergeBackwardProblem, kMergeAttentionBackward, "cuda", "merge", true)                                     \
  /* gated branches summed, from Ampere on, and the gradients of that */                                      \
  K(GateProblem, kGateBranches, "cuda", "gate", true)                                                         \
  K(GateBackwardProblem, kGateBranchesBackward, "cuda", "gate", true)                                         \
  /* caches, from Ampere on: rows rotated, rows appended, rows appended in 4 bits */                          \
  K(RotaryProblem, kRotary, "cuda", "rotary", true)                                                           \
  K(AppendProblem, kKvCacheAppend, "cuda", "append", true)                                                    \
  K(Int4AppendProblem, kInt4CacheAppend, "cuda", "append", true)                                              \
  /* low-bit weights, from Ampere on, every format: encoded, decoded, packed orders decoded */                \
  K(lowbit::QuantizeCall, kQuantize, "cuda", "quantize", true)                                                \
  K(lowbit::DequantizeProblem, kDequantize, "cuda", "dequantize", true)                                       \
  K(UnpackProblem, kUnpackWeights, "cuda", "unpack", true)

namespace heddle::cuda {

#define HEDDLE_DECLARE_KERNEL(Problem, symbol, ...) extern const Kernel<Problem> symbol;
HEDDLE_CUDA_KERNELS(HEDDLE_DECLARE_KERNEL)
#undef HEDDLE_DECLARE_KERNEL

// Calls visit(kernel) for each, whatever its problem.
template <class Visit>
void for_each_kernel(Visit visit) {
#define HEDDLE_VISIT_KERNEL(Problem, symbol, ...) visit(symbol);
  HEDDLE_CUDA_KERNELS(HEDDLE_VISIT_KERNEL)
#undef HEDDLE_VISIT_KERNEL
}

// Whether a problem's candidates are compared by costs that are measured. One that inherits another's Example, and has
// none, says void.
template <class Problem>
constexpr bool kHasExample = requires {
  requires !std::is_void_v<typename Problem::Example>;
};

// Calls visit(kernel, line) for each line of costs, of those whose problem has examples.
template <class Visit>
void for_each_cost(Visit visit) {
  for_each_kernel([&]<class Problem>(const Kernel<Problem>& kernel) {
    if constexpr (kHasExample<Problem>) {
      for (const CostLine<Problem>& line : kernel.costs) visit(kernel, line);
    }
  });
}

// Adds those for one kind of problem.
template <class Wanted>
void add_kernels(std::vector<const Kernel<Wanted>*>& list) {
  for_each_kernel([&]<class Problem>(const Kernel<Problem>& kernel) {
    if constexpr (std::is_same_v<Problem, Wanted>) list.push_back(&kernel);
  });
}

}  // namespace heddle::cuda
