#include "kit/sparse_case.h"

#include <cstring>

#include "core/check.h"
#include "heddle/sparse.h"
#include "kit/case_rows.h"
#include "kit/under_mask.h"
#include "kit/yardstick.h"
#include "ops/sparse/sparse.h"

namespace heddle::kit {
namespace {

void fill(HostTensor& out, const std::vector<double>& values) {
  for (std::size_t n = 0; n < values.size(); ++n) out.set(static_cast<std::int64_t>(n), values[n]);
}

// Scratch of exactly the size that a call asks for; what it held before must not matter.
struct Scratch {
  Scratch(std::size_t bytes, Executor* executor) {
    runtime.executor = executor;
    if (bytes == 0) return;
    runtime.workspace = {buffer.get(bytes).data, bytes};
    std::memset(runtime.workspace.data, 0xFF, bytes);
  }
  WorkspaceBuffer buffer;
  Runtime runtime;
};

}  // namespace

AttentionCase sparse_call(DType dtype, std::int64_t B, std::int64_t H, std::int64_t Hkv, std::int64_t Sq,
                          std::int64_t Sk, std::int64_t D, void (*change)(AttentionCase&)) {
  AttentionCase c{.name = "sparse", .dtype = dtype, .B = B, .H = H, .Hkv = Hkv, .Sq = Sq, .Sk = Sk, .D = D, .Dv = D};
  if (change != nullptr) change(c);
  if (!c.stepped()) c.mask = kFull;  // which under_mask() has else
  return c;
}

const std::vector<SparseCase>& sparse_cases() {
  using enum DType;
  static const std::vector<SparseCase> all = {
      {"plain", {.entries = 4}, sparse_call(f32, 2, 4, 2, 70, 150, 32)},
      {"causal",
       {.block_size = 32, .units = 2, .entries = 5},
       sparse_call(f32, 1, 8, 2, 200, 200, 64, [](auto& c) { c.causal = Causal::top_left; })},
      {"causal_16_bits",
       {.block_size = 64, .units = 2, .entries = 4},
       sparse_call(bf16, 1, 8, 2, 300, 300, 64, [](auto& c) { c.causal = Causal::top_left; })},
      {"half",
       {.block_size = 64, .entries = 3, .counts = true},
       sparse_call(f16, 2, 3, 3, 90, 333, 40, [](auto& c) { c.causal = Causal::bottom_right; })},
      {"list_for_each_head", {.units = 6, .entries = 3, .counts = true}, sparse_call(f32, 2, 6, 2, 33, 120, 16)},
      {"one_list", {.block_size = 128, .units = 1, .entries = 2}, sparse_call(bf16, 1, 10, 2, 65, 700, 128)},
      {"rows_share", {.query_rows = 16, .units = 2, .entries = 3}, sparse_call(f32, 2, 4, 2, 75, 130, 24)},
      {"sink",
       {.units = 2, .entries = 2, .counts = true},
       sparse_call(f32, 2, 4, 2, 40, 90, 32, [](auto& c) { c.sink = true; })},
      {"window",
       {.entries = 6},
       sparse_call(f32, 2, 2, 2, 100, 140, 32, [](auto& c) { c.window_left = 50, c.window_right = 20; })},
      {"alibi_softcap",
       {.units = 2, .entries = 4},
       sparse_call(f32, 2, 4, 2, 60, 100, 32, [](auto& c) { c.alibi = Alibi::per_head, c.softcap = 7.0f; })},
      {"packed",
       {.units = 2, .entries = 3, .counts = true},
       sparse_call(f32, 5, 4, 2, 60, 90, 32,
                   [](auto& c) {
                     c.packed_q = c.packed_k = true;
                     c.causal = Causal::bottom_right;
                   })},
      {"packed_rows_share",
       {.query_rows = 8, .units = 2, .entries = 3},
       sparse_call(bf16, 5, 4, 2, 60, 90, 32, [](auto& c) { c.packed_q = c.packed_k = true; })},
      {"used",
       {.entries = 3},
       sparse_call(f32, 4, 2, 1, 50, 80, 32, [](auto& c) { c.seqused_q = c.seqused_k = true; })},
      {"paged",
       {.units = 2, .entries = 4},
       sparse_call(bf16, 3, 4, 2, 5, 96, 32,
                   [](auto& c) { c.page_size = 16, c.seqused_k = true, c.causal = Causal::bottom_right; })},
      {"paged_many_rows",
       {.block_size = 32, .units = 2, .entries = 5},
       sparse_call(bf16, 2, 4, 2, 90, 320, 64,
                   [](auto& c) { c.page_size = 64, c.seqused_k = true, c.causal = Causal::bottom_right; })},
      {"paged_rows_share",
       {.block_size = 16, .query_rows = 16, .units = 2, .entries = 9},
       sparse_call(f16, 2, 8, 2, 70, 288, 48, [](auto& c) { c.page_size = 48, c.causal = Causal::bottom_right; })},
      {"one_row",
       {.block_size = 64, .units = 2, .entries = 5},
       sparse_call(f32, 2, 8, 2, 1, 600, 64, [](auto& c) { c.causal = Causal::bottom_right; })},
      {"group_of_5",
       {.block_size = 32, .units = 3, .entries = 3},
       sparse_call(f32, 1, 15, 3, 77, 140, 48, [](auto& c) { c.Dv = 20; })},
      {"float32_out",
       {.units = 2, .entries = 3},
       sparse_call(bf16, 2, 4, 2, 40, 90, 32, [](auto& c) { c.float32_out = true; })},
      {"piece",
       {.units = 2, .entries = 4},
       sparse_call(f32, 3, 4, 2, 50, 75, 32,
                   [](auto& c) { c.q_offset = c.key_offset = true, c.causal = Causal::top_left, c.window_left = 60; })},
      {"anchors",
       {.units = 2, .entries = 4},
       sparse_call(f32, 2, 4, 2, 50, 200, 32, [](auto& c) { c.q_step = 4, c.causal = Causal::top_left; })},
      {"anchors_packed",
       {.block_size = 16, .units = 2, .entries = 4, .counts = true},
       sparse_call(bf16, 5, 4, 2, 40, 120, 32,
                   [](auto& c) {
                     c.packed_q = c.packed_k = c.q_offset = c.sink = true;
                     c.q_step = 3, c.causal = Causal::top_left, c.window_left = 60;
                   })},
      {"anchors_share",
       {.query_rows = 8, .entries = 5},
       sparse_call(f16, 2, 2, 1, 30, 700, 48, [](auto& c) { c.q_step = 24, c.window_left = 100, c.window_right = 5; })},
      {"cache_rows",
       {.units = 2, .entries = 4},
       sparse_call(f16, 3, 4, 2, 7, 96, 32, [](auto& c) { c.cache_batch_idx = c.seqused_k = c.leftpad = true; })},
      {"named_by_all",
       {.block_size = 64, .units = 1, .entries = 3},
       sparse_call(bf16, 1, 16, 1, 700, 128, 128, [](auto& c) { c.causal = Causal::bottom_right; })},
      {"long_lists",
       {.block_size = 16, .units = 2, .entries = 70},
       sparse_call(f16, 1, 4, 2, 100, 700, 64, [](auto& c) { c.causal = Causal::bottom_right, c.sink = true; })},
      {"group_of_7_16_bits",
       {.block_size = 32, .query_rows = 3, .units = 3, .entries = 5, .counts = true},
       sparse_call(bf16, 2, 21, 3, 65, 300, 72, [](auto& c) { c.Dv = 88, c.causal = Causal::bottom_right; })},
      {"list_for_each_head_16_bits",
       {.block_size = 128, .units = 6, .entries = 3},
       sparse_call(
           bf16, 2, 6, 2, 90, 420, 64,
           [](auto& c) { c.packed_q = c.packed_k = true, c.window_left = 200, c.causal = Causal::bottom_right; })},
      {"rows_share_16_bits",
       {.block_size = 64, .query_rows = 16, .units = 2, .entries = 4},
       sparse_call(bf16, 1, 8, 2, 300, 300, 128, [](auto& c) { c.causal = Causal::top_left; })},
      {"many_rows_share",
       {.block_size = 16, .query_rows = 40, .units = 1, .entries = 20, .counts = true},
       sparse_call(f16, 4, 8, 1, 130, 260, 80,
                   [](auto& c) {
                     c.packed_q = c.packed_k = c.sink = true;
                     c.causal = Causal::bottom_right, c.window_left = 90, c.Dv = 104;
                   })},
      {"rows_share_wide_blocks",
       {.block_size = 128, .query_rows = 8, .units = 2, .entries = 3},
       sparse_call(f16, 2, 8, 2, 90, 500, 64,
                   [](auto& c) { c.seqused_q = c.seqused_k = true, c.causal = Causal::bottom_right; })},
      {"step",
       {.block_size = 64, .units = 1, .entries = 12},
       sparse_call(bf16, 3, 16, 1, 1, 1500, 128, [](auto& c) { c.seqused_k = true, c.causal = Causal::bottom_right; })},
      {"step_of_small_blocks",
       {.block_size = 16, .units = 3, .entries = 40, .counts = true},
       sparse_call(f16, 2, 15, 3, 4, 900, 48, [](auto& c) { c.sink = true, c.causal = Causal::bottom_right; })},
      {"step_of_many_heads",
       {.block_size = 32, .query_rows = 2, .units = 2, .entries = 15},
       sparse_call(bf16, 2, 80, 2, 5, 700, 64,
                   [](auto& c) { c.causal = Causal::bottom_right, c.window_left = 300, c.Dv = 128; })},
      // Lists of 9 to 16 rows, which Hopper takes together.
      {"neighbours",
       {.block_size = 64, .units = 2, .entries = 12},
       sparse_call(bf16, 1, 32, 2, 500, 2100, 128, [](auto& c) { c.causal = Causal::bottom_right; })},
      {"neighbours_packed",
       {.block_size = 64, .units = 2, .entries = 5, .counts = true},
       sparse_call(bf16, 5, 26, 2, 90, 500, 128,
                   [](auto& c) {
                     c.packed_q = c.packed_k = c.sink = true;
                     c.causal = Causal::bottom_right;
                   })},
      {"neighbours_of_three_rows",
       {.block_size = 128, .query_rows = 3, .units = 2, .entries = 4},
       sparse_call(f16, 3, 8, 2, 130, 700, 48,
                   [](auto& c) {
                     c.seqused_q = c.seqused_k = true;
                     c.causal = Causal::bottom_right, c.window_left = 300, c.Dv = 64;
                   })},
      {"neighbours_in_pieces",
       {.block_size = 64, .units = 1, .entries = 7},
       sparse_call(bf16, 2, 10, 1, 150, 640, 72,
                   [](auto& c) {
                     c.q_offset = c.key_offset = c.float32_out = true;
                     c.causal = Causal::top_left, c.window_left = 400, c.Dv = 88;
                   })},
      {"neighbours_of_each_head",
       {.block_size = 128, .query_rows = 16, .units = 6, .entries = 3, .counts = true},
       sparse_call(f16, 3, 6, 2, 220, 900, 64,
                   [](auto& c) {
                     c.packed_q = c.packed_k = true, c.window_left = 500, c.causal = Causal::bottom_right;
                   })},
      // Lists that whole tiles of rows share, which Hopper's dense kernels take.
      {"tiles",
       {.block_size = 128, .query_rows = 128, .units = 2, .entries = 4},
       sparse_call(bf16, 1, 4, 2, 200, 450, 128, [](auto& c) { c.causal = Causal::bottom_right; })},
      {"tiles_of_64_keys",
       {.block_size = 64, .query_rows = 256, .units = 1, .entries = 8, .counts = true},
       sparse_call(f16, 1, 2, 2, 500, 600, 64, [](auto& c) { c.window_left = 150, c.window_right = 40; })},
      {"tiles_packed",
       {.block_size = 128, .query_rows = 128, .units = 2, .entries = 3, .counts = true},
       sparse_call(bf16, 5, 4, 2, 330, 400, 64,
                   [](auto& c) { c.packed_q = c.packed_k = c.sink = true, c.causal = Causal::bottom_right; })},
      {"tiles_of_each_head",
       {.block_size = 64, .query_rows = 128, .units = 4, .entries = 5},
       sparse_call(
           bf16, 3, 4, 2, 200, 420, 128,
           [](auto& c) { c.packed_q = c.packed_k = true, c.window_left = 200, c.causal = Causal::bottom_right; })},
      {"tiles_of_64_rows",
       {.block_size = 64, .query_rows = 64, .units = 2, .entries = 5},
       sparse_call(f16, 1, 8, 2, 330, 400, 72,
                   [](auto& c) { c.Dv = 88, c.sink = true, c.causal = Causal::top_left, c.window_left = 130; })},
      {"tiles_of_heads",
       {.block_size = 128, .query_rows = 16, .units = 1, .entries = 3},
       sparse_call(bf16, 2, 16, 2, 70, 500, 40,
                   [](auto& c) { c.seqused_q = c.seqused_k = true, c.causal = Causal::bottom_right; })},
      {"tiles_used",
       {.block_size = 128, .query_rows = 384, .units = 2, .entries = 4, .counts = true},
       sparse_call(f16, 2, 2, 2, 500, 520, 48, [](auto& c) { c.seqused_q = c.seqused_k = true; })},
      {"tiles_without_entries",
       {.block_size = 128, .query_rows = 128, .entries = 0},
       sparse_call(f16, 1, 2, 1, 150, 200, 64, [](auto& c) { c.sink = true; })},
      {"masks",
       {.block_size = 32, .query_rows = 8, .units = 2, .entries = 4, .counts = true, .masks = 6},
       sparse_call(f32, 2, 4, 2, 70, 150, 32, [](auto& c) { c.causal = Causal::bottom_right, c.sink = true; })},
      {"masks_of_each_row",
       {.block_size = 16, .units = 4, .entries = 5, .masks = 9},
       sparse_call(f32, 2, 4, 2, 75, 130, 24, [](auto& c) { c.window_left = 60, c.window_right = 20; })},
      {"masks_16_bits",
       {.block_size = 64, .query_rows = 16, .units = 1, .entries = 4, .masks = 5},
       sparse_call(bf16, 1, 10, 2, 150, 300, 64, [](auto& c) { c.causal = Causal::top_left; })},
      {"masks_packed",
       {.block_size = 128, .query_rows = 24, .units = 2, .entries = 3, .masks = 5},
       sparse_call(f16, 5, 8, 2, 60, 190, 40, [](auto& c) { c.packed_q = c.packed_k = true; })},
      {"masks_alibi_softcap",
       {.units = 2, .entries = 4, .masks = 4},
       sparse_call(f32, 2, 4, 2, 60, 100, 32, [](auto& c) { c.alibi = Alibi::per_head, c.softcap = 7.0f; })},
      {"masks_anchors",
       {.query_rows = 4, .units = 2, .entries = 4, .masks = 5},
       sparse_call(f32, 2, 4, 2, 50, 200, 32, [](auto& c) { c.q_step = 4, c.causal = Causal::top_left; })},
      {"masks_paged",
       {.units = 2, .entries = 4, .masks = 5},
       sparse_call(bf16, 3, 4, 2, 5, 96, 32,
                   [](auto& c) { c.page_size = 16, c.seqused_k = true, c.causal = Causal::bottom_right; })},
      {"no_entries_16_bits", {.entries = 0}, sparse_call(bf16, 1, 2, 1, 9, 40, 16, [](auto& c) { c.sink = true; })},
      {"no_entries", {.entries = 0}, sparse_call(f32, 1, 2, 1, 9, 40, 16)},
  };  // fmt: skip
  return all;
}

AttentionOptions sparse_options(const CaseData& data, const std::string& candidate) {
  AttentionOptions options = data.options();
  options.mask = {};
  options.force = candidate;
  return options;
}

ForwardOutputs run_sparse(const CaseData& data, const BlockLists& lists, const std::string& candidate,
                          Executor* executor) {
  ForwardOutputs out{data.new_o(), data.new_lse()};
  const AttentionOptions options = sparse_options(data, candidate);
  const TensorView &q = data.q.view(), &k = data.k.view(), &v = data.v.view();
  Runtime query;
  query.executor = executor;
  const Scratch scratch(sparse_attention_forward_workspace(q, k, v, lists, options, query), executor);
  out.seconds = seconds_of(
      [&] { sparse_attention_forward(q, k, v, lists, out.o.view(), out.lse.view(), options, scratch.runtime); });
  return out;
}

BackwardOutputs run_sparse_backward(const CaseData& data, const BlockLists& lists, const HostTensor& o,
                                    const HostTensor& lse, const std::string& candidate, Executor* executor) {
  BackwardOutputs out{data.new_gradients()};
  const AttentionOptions options = sparse_options(data, candidate);
  const TensorView &q = data.q.view(), &k = data.k.view(), &v = data.v.view();
  const AttentionGradients to = out.gradients.views();
  Runtime query;
  query.executor = executor;
  const Scratch scratch(sparse_attention_backward_workspace(q, k, v, lists, to, options, query), executor);
  out.seconds = seconds_of([&] {
    sparse_attention_backward(q, k, v, lists, o.view(), lse.view(), data.d_o.view(), data.d_lse.view(), to, options,
                              scratch.runtime);
  });
  return out;
}

SparseRunner::SparseRunner(const SparseCase& spec)
    : data(spec.call),
      lists(data, spec.lists),
      name_(text("sparse_", spec.name)),
      masked_(spec.call.stepped() ? under_mask(data) : data) {
  const HostTensor band = masked_.mask;
  lists.write_mask(masked_);
  for (std::int64_t n = 0; data.spec.stepped() && n < band.elements(); ++n) {
    if (band.get(n) == 0) masked_.mask.set(n, 0);
  }
}

SparseProblem SparseRunner::problem() const {
  const ForwardOutputs none{data.new_o(), data.new_lse()};
  return checked_sparse_problem(Check("sparse_attention_forward"), data.q.view(), data.k.view(), data.v.view(),
                                lists.views, none.o.view(), none.lse.view(), sparse_options(data));
}

SparseBackwardProblem SparseRunner::backward_problem(const Gradients& gradients) {
  const ForwardOutputs& after = rounded_forward();
  return checked_sparse_backward_problem(Check("sparse_attention_backward"), data.q.view(), data.k.view(),
                                         data.v.view(), lists.views, after.o.view(), after.lse.view(), data.d_o.view(),
                                         data.d_lse.view(), gradients.views(), sparse_options(data));
}

const reference::Forward& SparseRunner::forward() {
  if (!forward_) {
    forward_ =
        std::make_unique<reference::Forward>(reference::attention_forward(masked_.problem(), default_executor()));
  }
  return *forward_;
}

const reference::Backward& SparseRunner::backward() {
  if (!backward_) {
    const Gradients none = masked_.new_gradients();
    backward_ = std::make_unique<reference::Backward>(
        reference::attention_backward(masked_.backward_problem(none), default_executor()));
  }
  return *backward_;
}

const ForwardOutputs& SparseRunner::rounded_forward() {
  if (!rounded_) {
    rounded_ = std::make_unique<ForwardOutputs>(ForwardOutputs{data.new_o(), data.new_lse()});
    fill(rounded_->o, forward().o);
    fill(rounded_->lse, forward().lse);
  }
  return *rounded_;
}

std::vector<std::string> SparseRunner::candidates(Pass pass) const {
  const TensorView &q = data.q.view(), &k = data.k.view(), &v = data.v.view();
  return kernels_of(pass == Pass::forward
                        ? explain_sparse_attention(q, k, v, lists.views, sparse_options(data))
                        : explain_sparse_attention_backward(q, k, v, lists.views, {}, sparse_options(data)));
}

std::vector<Judged> SparseRunner::judged(const ForwardOutputs& out) {
  const double factor = allowed_factor(masked_.problem(), forward());
  if (!plain_forward_) plain_forward_ = std::make_unique<PlainForward>(plain_forward(masked_.problem()));
  return {{"o", &out.o, &forward().o, &plain_forward_->o, factor},
          {"lse", &out.lse, &forward().lse, &plain_forward_->lse, factor}};
}

std::vector<Judged> SparseRunner::judged(const BackwardOutputs& out) {
  const double factor = allowed_factor(masked_.problem(), forward());
  const reference::Backward& exact = backward();
  if (!plain_backward_) {
    const Gradients none = masked_.new_gradients();
    plain_backward_ = std::make_unique<PlainBackward>(plain_backward(masked_.backward_problem(none), forward()));
  }
  const Gradients& g = out.gradients;
  return {{"dq", &g.dq, &exact.dq, &plain_backward_->dq, factor},
          {"dk", &g.dk, &exact.dk, &plain_backward_->dk, factor},
          {"dv", &g.dv, &exact.dv, &plain_backward_->dv, factor},
          {"dsink", &g.dsink, &exact.dsink, &plain_backward_->dsink, kFactor}};
}

CaseResult SparseRunner::judge(const ForwardOutputs& out, const std::string& candidate) {
  return judged_by({.case_name = name_, .candidate = candidate, .seconds = out.seconds}, judged(out));
}

CaseResult SparseRunner::judge(const BackwardOutputs& out, const std::string& candidate) {
  return judged_by({.case_name = name_, .candidate = candidate, .pass = Pass::backward, .seconds = out.seconds},
                   judged(out));
}

CaseResult SparseRunner::check(Pass pass, const std::string& candidate, Executor* executor) {
  if (pass == Pass::forward) return judge(run_sparse(data, lists.views, candidate, executor), candidate);
  const ForwardOutputs& after = rounded_forward();
  return judge(run_sparse_backward(data, lists.views, after.o, after.lse, candidate, executor), candidate);
}

std::string SparseRunner::blind_spots(Pass pass) {
  if (pass == Pass::forward) return kit::blind_spots(judged(ForwardOutputs{data.new_o(), data.new_lse()}));
  return kit::blind_spots(judged(BackwardOutputs{data.new_gradients()}));
}

}  // namespace heddle::kit
