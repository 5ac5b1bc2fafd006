// The cache in 4 bits: check, then append, or attend as attention_forward does.
#include "heddle/int4_cache.h"

#include <algorithm>
#include <array>
#include <utility>

#include "core/overlap.h"
#include "ops/attention/arguments.h"
#include "ops/attention/choice.h"
#include "ops/kv_cache/checks.h"
#include "ops/kv_cache/choice.h"
#include "ops/kv_cache/int4_cache.h"
#include "ops/written_indices.h"

namespace heddle {
namespace {

constexpr std::int64_t kMaxHeadSize = 256, kAlignment = 16;

// What append and attention need of a cache alike.
struct CheckedCache {
  Int4Blocks blocks;
  const std::int32_t* page_table = nullptr;
  std::int64_t page_table_stride = 0, max_blocks = 0, capacity = 0;
};

// Everything about the cache but its lengths. first: the call's first tensor; batch: its sequences.
CheckedCache check_cache(const Check& check, const Int4Cache& cache, const First& first, std::int64_t batch) {
  check_data(check, cache.k_tail, "k_tail", "[rows, 128, Hkv, D]", first);
  check_data(check, cache.v_tail, "v_tail", "[rows, 128, Hkv, Dv]", first);
  const TensorView &k = cache.k_tail, &v = cache.v_tail, &blocks = cache.blocks;
  check.require(k.dtype != DType::f32, "k_tail is float32: it must be float16 or bfloat16");
  check.require(v.dtype == k.dtype, "v_tail is ", name_of(v.dtype), " and k_tail is ", name_of(k.dtype),
                ": they must be equal");
  check.require(k.shape[1] == kInt4Tail, "k_tail is ", k, ": it must have ", kInt4Tail, " slots");
  for (int i = 0; i < 3; ++i) {
    check.require(v.shape[i] == k.shape[i], "v_tail is ", v, " and k_tail is ", k, ": dimension ", i, " must be equal");
  }
  for (const auto& [view, name] : {std::pair{&k, "k_tail"}, std::pair{&v, "v_tail"}}) {
    check.require(view->shape[3] >= kInt4Channels && view->shape[3] % kInt4Channels == 0, name, " has head size ",
                  view->shape[3], ": in 4 bits it must be a multiple of ", kInt4Channels);
    check.not_overlapping(*view, name);
  }

  const bool paged = cache.page_table.given();
  check.tensor(blocks, "blocks", DType::u8, first.device, paged ? 3 : 4, first.name);
  check.addressable(blocks, "blocks");
  const Int4Block format{k.shape[3], v.shape[3]};
  const int at = blocks.rank - 2;
  check.require(blocks.shape[at] == k.shape[2] && blocks.shape[at + 1] == format.bytes(), "blocks is ", blocks,
                ": its last extents must be Hkv and the bytes of a block, ", k.shape[2], " and ", format.bytes());
  bool aligned = blocks.stride[at + 1] == 1 && (blocks.elements() == 0 || alignment_of(blocks) % kAlignment == 0);
  for (int i = 0; i <= at; ++i) aligned &= blocks.stride[i] % kAlignment == 0;
  check.require(aligned, "blocks must be contiguous, each beginning at a multiple of ", kAlignment, " bytes");
  check.not_overlapping(blocks, "blocks");
  CheckedCache out;
  out.blocks = {static_cast<std::byte*>(blocks.data), paged ? 0 : blocks.stride[0],
                blocks.stride[paged ? 0 : 1],         blocks.stride[at],
                paged ? blocks.shape[0] : 0,          true};
  if (paged) {
    const TensorView& table = cache.page_table;
    check.tensor(table, "page_table", DType::i32, first.device, 2, first.name);
    check.require(table.shape[0] == batch, "page_table is ", table, ": it must have one row for each of ", batch,
                  " sequences");
    check.require(table.stride[1] == 1 || table.shape[1] <= 1, "page_table's rows must be contiguous");
    check.readable_indices(table, "page_table");
    out.page_table = static_cast<const std::int32_t*>(table.data);
    out.page_table_stride = table.stride[0];
  } else {
    check.require(blocks.shape[0] == k.shape[0], "blocks has ", blocks.shape[0], " rows and k_tail has ", k.shape[0],
                  ": they must be equal");
  }
  out.max_blocks = paged ? cache.page_table.shape[1] : blocks.shape[1];
  // On a GPU a table may name pages where there are none.
  if (paged && blocks.shape[0] == 0) out.max_blocks = 0;
  constexpr std::int64_t kMostBlocks = (std::int64_t{1} << 31) / kInt4Keys - 3;
  check.require(out.max_blocks <= kMostBlocks, paged ? "page_table" : "blocks", " has ", out.max_blocks,
                " blocks for a sequence: it must have at most ", kMostBlocks);
  out.capacity = out.max_blocks * kInt4Keys + kInt4Tail - 1;
  if (!cache.row_idx.given()) {
    check.require(k.shape[0] == batch, "k_tail has ", k.shape[0], " rows and ", first.name, " has ", batch,
                  " sequences: without row_idx they must be equal");
  }
  return out;
}

AttentionProblem checked_problem(const Check& check, const TensorView& q, const Int4Cache& cache, const TensorView& o,
                                 const TensorView& lse, const AttentionOptions& options,
                                 const OutputNames& outputs = {}) {
  check.require(q.given(), "q is missing");
  check.require(!options.page_table.given() && !options.cache_batch_idx.given(),
                "page_table and cache_batch_idx are taken from the cache, not from the options");
  check.require(!options.cu_seqlens_q.given() && !options.cu_seqlens_k.given(),
                "cu_seqlens_q and cu_seqlens_k are not taken: q is [B, Sq, H, D] and keys are in a cache");
  check.require(!options.q_offset.given() && !options.key_offset.given(),
                "q_offset and key_offset are not taken: positions are those of the cache");
  check.require(options.q_step == 1 && options.key_step == 1, "q_step is ", options.q_step, " and key_step is ",
                options.key_step, ": both must be 1, as positions are those of the cache");
  check.require(options.seqused_k.given(), "seqused_k is missing: it says how many keys each sequence has");
  check.require(q.rank == 4, "q has ", q.rank, " dimensions: it must be [B, Sq, H, D]; found q ", q);
  const CheckedCache checked = check_cache(check, cache, {"q", q.device}, q.shape[0]);
  AttentionOptions with = options;
  with.cache_batch_idx = cache.row_idx;
  AttentionProblem p = checked_forward_problem(check, q, cache.k_tail, cache.v_tail, o, lse, with,
                                               {kInt4Names, checked.capacity}, outputs);
  check_apart(check, std::array{Named{outputs.o, &o}, Named{outputs.lse, &lse}},
              std::array{Named{"blocks", &cache.blocks}, Named{"page_table", &cache.page_table}});
  p.int4 = checked.blocks;
  p.page_table = {checked.page_table, cache.page_table.given()};
  p.page_table_stride = checked.page_table_stride;
  p.page_size = kInt4Keys;
  FirstBadIndex found;
  for (std::int64_t b = 0; q.device == Device::cpu && b < p.B; ++b) check_int4_pages(p, b, {}, found);
  require_none(check, found);
  return p;
}

}  // namespace

Int4AppendProblem checked_int4_append_problem(const Check& check, const TensorView& k_new, const TensorView& v_new,
                                              const Int4Cache& cache, const TensorView& seqlens,
                                              const Int4AppendOptions& options) {
  const Rotary& rotary = options.rotary;
  const First first{"k_new", k_new.device};
  check_data(check, k_new, "k_new", "[B, Sn, Hkv, D]", first);
  check_data(check, v_new, "v_new", "[B, Sn, Hkv, Dv]", first);
  const CheckedCache checked = check_cache(check, cache, first, k_new.shape[0]);
  for (const auto& [view, name, tail, tail_name] :
       {std::tuple{&k_new, "k_new", &cache.k_tail, "k_tail"}, std::tuple{&v_new, "v_new", &cache.v_tail, "v_tail"}}) {
    check.require(view->dtype == tail->dtype, name, " is ", name_of(view->dtype), " and ", tail_name, " is ",
                  name_of(tail->dtype), ": they must be equal");
    check.require(view->shape[2] == tail->shape[2] && view->shape[3] == tail->shape[3], tail_name, " is ", *tail,
                  " and ", name, " is ", *view, ": heads and head size must be equal");
    check.require(view->shape[0] == k_new.shape[0] && view->shape[1] == k_new.shape[1], "v_new is ", v_new,
                  " and k_new is ", k_new, ": sequences and rows must be equal");
  }
  Int4AppendProblem p;
  p.device = first.device;
  p.k_new = operand_of(k_new), p.v_new = operand_of(v_new);
  p.k_tail = operand_of(cache.k_tail), p.v_tail = operand_of(cache.v_tail);
  p.B = k_new.shape[0], p.S = k_new.shape[1], p.Hkv = k_new.shape[2], p.D = k_new.shape[3], p.Dv = v_new.shape[3];
  p.seqlens = check_indices(check, seqlens, "seqlens", p.B, first);
  p.blocks = checked.blocks;
  p.page_table = checked.page_table;
  p.page_table_stride = checked.page_table_stride;
  p.max_blocks = checked.max_blocks;
  p.rows = cache.k_tail.shape[0];
  p.capacity = checked.capacity;
  if (cache.row_idx.given()) p.row_idx = check_indices(check, cache.row_idx, "row_idx", p.B, first);
  if (rotary.cos.given() || rotary.sin.given()) p.rotary = check_rotary(check, rotary, k_new, first);
  if (first.readable()) check_written_indices(check, p, IndexName::seqlens);
  const std::array<std::pair<const TensorView*, const char*>, 3> written{
      {{&cache.blocks, "blocks"}, {&cache.k_tail, "k_tail"}, {&cache.v_tail, "v_tail"}}};
  for (std::size_t i = 0; i < written.size(); ++i) {
    const auto& [view, name] = written[i];
    for (const auto& [read, read_name] :
         {std::pair{&k_new, "k_new"}, std::pair{&v_new, "v_new"}, std::pair{&seqlens, "seqlens"},
          std::pair{&cache.page_table, "page_table"}, std::pair{&cache.row_idx, "row_idx"},
          std::pair{&rotary.cos, "cos"}, std::pair{&rotary.sin, "sin"}}) {
      check_apart(check, *view, name, *read, read_name);
    }
    for (std::size_t j = 0; j < i; ++j) {
      check.require(!may_share_memory(*view, *written[j].first), name, " shares memory with ", written[j].second,
                    ": both are written");
    }
  }
  return p;
}

std::int64_t int4_cache_block_bytes(std::int64_t D, std::int64_t Dv) {
  const Check check("int4_cache_block_bytes");
  for (const std::int64_t size : {D, Dv}) {
    check.require(size >= kInt4Channels && size <= kMaxHeadSize && size % kInt4Channels == 0, "a head size is ", size,
                  ": in 4 bits it must be a multiple of ", kInt4Channels, " up to ", kMaxHeadSize);
  }
  return Int4Block{D, Dv}.bytes();
}

std::int64_t int4_cache_blocks(std::int64_t keys) { return int4_blocks(keys); }

void append_int4_cache(const TensorView& k_new, const TensorView& v_new, const Int4Cache& cache,
                       const TensorView& seqlens, const Int4AppendOptions& options, const Runtime& runtime) {
  const Check check("append_int4_cache");
  const Int4AppendProblem p = checked_int4_append_problem(check, k_new, v_new, cache, seqlens, options);
  const Int4AppendKernel& kernel =
      choose(check, p, wish_of<Int4AppendProblem>(check, options.force), workers_of(runtime));
  if (validates(runtime, p.device)) {
    cuda::check_indices("append_int4_cache", Int4AppendIndices{p, IndexName::seqlens}, runtime.stream);
  }
  run(check, "append_int4_cache", kernel, p, runtime, kernel.workspace(p, workers_of(runtime)));
}

std::vector<Candidate> explain_append_int4_cache(const TensorView& k_new, const TensorView& v_new,
                                                 const Int4Cache& cache, const TensorView& seqlens,
                                                 const Int4AppendOptions& options, const Runtime& runtime) {
  const Check check("explain_append_int4_cache", Data::to_come);
  return explained(checked_int4_append_problem(check, k_new, v_new, cache, seqlens, options),
                   wish_of<Int4AppendProblem>(check, options.force), workers_of(runtime));
}

void attention_over_int4_cache(const TensorView& q, const Int4Cache& cache, const TensorView& o, const TensorView& lse,
                               const AttentionOptions& options, const Runtime& runtime) {
  attention_over_int4_cache_with(q, cache, o, lse, options, runtime, [&](std::size_t) { return runtime.workspace; });
}

void attention_over_int4_cache_with(const TensorView& q, const Int4Cache& cache, const TensorView& o,
                                    const TensorView& lse, const AttentionOptions& options, const Runtime& runtime,
                                    const std::function<Workspace(std::size_t bytes)>& scratch,
                                    const OutputNames& outputs) {
  const Check check("attention_over_int4_cache");
  check.require(o.given(), "o is missing");
  const AttentionProblem p = checked_problem(check, q, cache, o, lse, options, outputs);
  const AttentionForwardKernel& kernel =
      choose(check, p, attention_wish<AttentionProblem>(check, options), workers_of(runtime));
  const std::size_t needed = kernel.workspace(p, workers_of(runtime));
  Runtime with = runtime;
  with.workspace = needed > 0 ? scratch(needed) : Workspace{};
  if (validates(runtime, q.device)) {
    cuda::check_indices("attention_over_int4_cache", AttentionIndices{p, kInt4Names}, runtime.stream);
  }
  run(check, "attention_over_int4_cache", kernel, p, with, needed);
}

std::size_t attention_over_int4_cache_workspace(const TensorView& q, const Int4Cache& cache,
                                                const AttentionOptions& options, const Runtime& runtime) {
  const Check check("attention_over_int4_cache", Data::to_come);
  const AttentionProblem p = checked_problem(check, q, cache, {}, {}, options);
  return choose(check, p, attention_wish<AttentionProblem>(check, options), workers_of(runtime))
      .workspace(p, workers_of(runtime));
}

std::vector<Candidate> explain_attention_over_int4_cache(const TensorView& q, const Int4Cache& cache,
                                                         const AttentionOptions& options, const Runtime& runtime) {
  const Check check("explain_attention_over_int4_cache", Data::to_come);
  return explained(checked_problem(check, q, cache, {}, {}, options), attention_wish<AttentionProblem>(check, options),
                   workers_of(runtime));
}

AttentionProblem checked_int4_problem(const TensorView& q, const Int4Cache& cache, const AttentionOptions& options) {
  return checked_problem(Check("attention_over_int4_cache", Data::to_come), q, cache, {}, {}, options);
}

}  // namespace heddle
