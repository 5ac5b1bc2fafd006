// select_blocks: check, ask each candidate, choose, launch.
#include "ops/attention/problem_builder.h"
#include "ops/nsa/choice.h"
#include "ops/nsa/nsa.h"
#include "ops/sparse/sparse.h"
#include "ops/validate.h"

namespace heddle {
namespace {

constexpr std::int64_t kMostCompression = 65536;
constexpr KeyNames kPooledKeys{.k = IndexName::k_pooled, .v = IndexName::k_pooled};

// What of the options is attention's too.
AttentionOptions attention_options(const SelectOptions& options) {
  AttentionOptions out;
  out.scale = options.scale;
  out.q_offset = options.q_offset;
  out.cu_seqlens_q = options.cu_seqlens_q;
  out.cu_seqlens_k = options.cu_seqlens_k;
  out.seqused_k = options.seqused_k;
  out.page_table = options.page_table;
  out.max_seqlen_q = options.max_seqlen_q;
  out.max_seqlen_k = options.max_seqlen_k;
  return out;
}

void check_sizes(const Check& check, SelectProblem& p, const SelectOptions& options) {
  p.block_size = options.block_size;
  check_block_size(check, p.block_size);
  p.compression_block = options.compression_block == 0 ? p.block_size : options.compression_block;
  check.require(p.compression_block >= 1 && p.compression_block <= kMostCompression, "compression_block is ",
                p.compression_block, ": it must be from 1 to ", kMostCompression, ", or 0 for block_size");
  p.compression_stride = options.compression_stride == 0 ? p.compression_block : options.compression_stride;
  check.require(p.compression_stride >= 1, "compression_stride is ", p.compression_stride,
                ": it must be at least 1, or 0 for compression_block");
  const auto strides_in = [&](const char* name, std::int64_t size) {
    check.require(size % p.compression_stride == 0, name, " is ", size,
                  ": it must be a multiple of compression_stride, ", p.compression_stride);
  };
  strides_in("compression_block", p.compression_block);
  strides_in("block_size", p.block_size);
  p.forced = options.forced;
}

void check_positions(const Check& check, SelectProblem& p, const SelectOptions& options) {
  p.q_step = options.q_step;
  check.require(p.q_step >= 1 && p.q_step <= kPositions, "q_step is ", p.q_step, ": it must be from 1 to 2^31 - 1");
  for (std::int64_t b = 0; p.device == Device::cpu && b < p.B; ++b) {
    const Sequence s = p.sequence(b);
    if (s.q_rows == 0) continue;
    const std::int64_t last = p.position(s, s.q_rows - 1);
    check.require(last < kPositions, "q_step is ", p.q_step, " and the last of ", s.q_rows, " rows of sequence ", b,
                  " stands at position ", last, ": positions must be below 2^31 - 1");
  }
}

void check_lists(const Check& check, SelectProblem& p, const TensorView& blocks, const char* name) {
  const bool packed = static_cast<bool>(p.cu_seqlens_q);
  const int rank = packed ? 3 : 4, n = rank - 3;  // n: the extent of rows
  check.tensor(blocks, name, DType::i32, p.device, rank);
  check.require((packed || blocks.shape[0] == p.B) && blocks.shape[n] == p.q_rows && blocks.shape[n + 1] == p.Hkv, name,
                " is ", blocks, ": it must be ", packed ? text("[") : text("[", p.B, ", "), p.q_rows, ", ", p.Hkv,
                ", n], a list for each row of q and each key/value head");
  p.slots = blocks.shape[n + 2];
  check.require(p.slots <= 1 || blocks.stride[n + 2] == 1, name, " must have contiguous entries: the last stride is ",
                blocks.stride[n + 2]);
  check.not_overlapping(blocks, name);
  p.blocks = static_cast<std::int32_t*>(blocks.data);
  p.blocks_stride_b = packed ? 0 : blocks.stride[0];
  p.blocks_stride_n = blocks.stride[n];
  p.blocks_stride_l = blocks.stride[n + 1];
}

}  // namespace

SelectProblem checked_select_problem(const Check& check, const TensorView& q, const TensorView& k_pooled,
                                     const TensorView& lse, const TensorView& blocks, const SelectOptions& options,
                                     const char* blocks_name) {
  SelectProblem p;
  check.require(q.dtype == DType::f32 || q.dtype == DType::f16 || q.dtype == DType::bf16, "q is ", name_of(q.dtype),
                ": it must be float32, float16 or bfloat16");
  const AttentionOptions attention = attention_options(options);
  const ProblemBuilder builder(check, q, k_pooled, k_pooled, attention, {kPooledKeys});
  builder.build(p);
  check.require(k_pooled.dtype == q.dtype, "k_pooled is ", name_of(k_pooled.dtype), ": it must be ", name_of(q.dtype));
  check_sizes(check, p, options);
  check_positions(check, p, options);
  if (lse.given()) p.lse = builder.per_row(p, lse, "lse");
  check_lists(check, p, blocks, blocks_name);
  const Named outputs[] = {{blocks_name, &blocks}};
  const Named inputs[] = {{"q", &q},
                          {"k_pooled", &k_pooled},
                          {"lse", &lse},
                          {"cu_seqlens_q", &options.cu_seqlens_q},
                          {"cu_seqlens_k", &options.cu_seqlens_k},
                          {"seqused_k", &options.seqused_k},
                          {"page_table", &options.page_table},
                          {"q_offset", &options.q_offset}};
  check_apart(check, outputs, inputs);
  return p;
}

void select_blocks(const TensorView& q, const TensorView& k_pooled, const TensorView& lse, const TensorView& blocks,
                   const SelectOptions& options, const Runtime& runtime) {
  select_blocks_with(q, k_pooled, lse, blocks, options, runtime, [&](std::size_t) { return runtime.workspace; });
}

std::size_t select_blocks_workspace(const TensorView& q, const TensorView& k_pooled, const TensorView& lse,
                                    const TensorView& blocks, const SelectOptions& options, const Runtime& runtime) {
  const Check check("select_blocks", Data::to_come);
  const SelectProblem p = checked_select_problem(check, q, k_pooled, lse, blocks, options);
  const int workers = workers_of(runtime);
  return choose(check, p, wish_of<SelectProblem>(check, options.force), workers).workspace(p, workers);
}

void select_blocks_with(const TensorView& q, const TensorView& k_pooled, const TensorView& lse,
                        const TensorView& blocks, const SelectOptions& options, const Runtime& runtime,
                        const std::function<Workspace(std::size_t bytes)>& scratch, const char* blocks_name) {
  const Check check("select_blocks");
  const SelectProblem p = checked_select_problem(check, q, k_pooled, lse, blocks, options, blocks_name);
  const int workers = workers_of(runtime);
  const SelectKernel& kernel = choose(check, p, wish_of<SelectProblem>(check, options.force), workers);
  if (p.slots == 0) return;  // lists without entries may have no address
  const std::size_t needed = kernel.workspace(p, workers);
  Runtime with = runtime;
  with.workspace = needed > 0 ? scratch(needed) : Workspace{};
  AttentionProblem rows = p;
  rows.q_step = 1;  // as the host looks at them; a step's positions have a rule of their own
  check_attention_indices("select_blocks", rows, runtime, kPooledKeys);
  run(check, "select_blocks", kernel, p, with, needed);
}

std::vector<Candidate> explain_select_blocks(const TensorView& q, const TensorView& k_pooled, const TensorView& lse,
                                             const TensorView& blocks, const SelectOptions& options,
                                             const Runtime& runtime) {
  const Check check("explain_select_blocks", Data::to_come);
  return explained(checked_select_problem(check, q, k_pooled, lse, blocks, options),
                   wish_of<SelectProblem>(check, options.force), workers_of(runtime));
}

}  // namespace heddle
