// Attention over ranks: the cases, one process's call of each by the reference in doubles, and the judgement of what
// ranks wrote by the rule that judges every kernel.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "heddle/distributed.h"
#include "kernels/within_rule.h"
#include "kit/case_data.h"
#include "kit/yardstick.h"
#include "ops/attention/arguments.h"

namespace heddle::kit::over_ranks {

using distributed::Area;
using distributed::Order;
using distributed::Plan;
using distributed::Problem;
using std::int64_t;

struct Mask {
  const char* name;
  Causal causal = Causal::none;
  int64_t left = -1, right = -1;
  std::vector<int64_t> cu_seqlens = {};
  std::vector<Area> areas = {};
};

struct DistributedCase {
  std::string name;
  AttentionCase spec;  // of the whole, not packed: its causality and window are the mask's
  Mask mask;
};

inline void PrintTo(const DistributedCase& c, std::ostream* out) { *out << c.name; }

inline AttentionCase distributed_case_of(int64_t B, int64_t S, int64_t H, int64_t Hkv, DType dtype = DType::f32) {
  return {.name = "distributed", .dtype = dtype, .B = B, .H = H, .Hkv = Hkv, .Sq = S, .Sk = S, .D = 24, .Dv = 16};
}

inline std::vector<DistributedCase> distributed_cases() {
  const Mask causal{.name = "causal", .causal = Causal::top_left};
  const Mask window{.name = "window", .causal = Causal::bottom_right, .left = 17};
  const Mask both{.name = "both", .left = 9, .right = 13};
  // One document of a row, two empty ones, one that is most of it.
  const Mask documents{.name = "documents", .causal = Causal::top_left, .cu_seqlens = {0, 1, 1, 12, 80, 80, 101}};
  const Mask windowed{.name = "windowed", .left = 5, .right = 4, .cu_seqlens = {0, 30, 37, 101}};
  // A prefix that all see, and rows that see nothing.
  const Mask areas{.name = "areas",
                   .areas = {{0, 40, 0, 40}, {40, 90, 0, 40}, {40, 90, 40, 90, Causal::top_left}, {60, 70, 90, 101}}};
  std::vector<DistributedCase> out;
  const auto add = [&](const std::string& name, AttentionCase spec, const Mask& mask, const auto& change) {
    change(spec);
    spec.d_lse = true;
    spec.causal = mask.causal;
    spec.window_left = mask.left;
    spec.window_right = mask.right;
    out.push_back({name, spec, mask});
  };
  const auto as_is = [](AttentionCase&) {};
  add("full", distributed_case_of(2, 61, 4, 2), {.name = "full"}, as_is);
  add("causal", distributed_case_of(2, 61, 4, 2), causal, as_is);
  add("causal_sink_softcap", distributed_case_of(1, 97, 6, 2), causal, [](auto& c) { c.sink = true, c.softcap = 3; });
  add("causal_alibi", distributed_case_of(2, 50, 4, 4), causal, [](auto& c) { c.alibi = Alibi::per_head; });
  // Of two ranks or three some have groups of query heads that are cut.
  add("causal_cut_groups", distributed_case_of(1, 45, 9, 3), causal,
      [](auto& c) { c.sink = true, c.alibi = Alibi::per_head; });
  add("causal_bias_of_heads", distributed_case_of(2, 61, 4, 2), causal, [](auto& c) {
    c.bias = {true, false, true, true, true}, c.bias_holes = true;
  });
  add("window_bias_sink_f16", distributed_case_of(2, 47, 4, 4, DType::f16), window, [](auto& c) {
    c.bias = {true, true, false, true, true}, c.bias_f32 = c.sink = true;
  });
  add("window_sink", distributed_case_of(1, 90, 4, 1), window, [](auto& c) { c.sink = true; });
  add("both_bf16", distributed_case_of(2, 77, 4, 2, DType::bf16), both, as_is);
  add("documents_sink", distributed_case_of(1, 101, 4, 2), documents, [](auto& c) { c.sink = true; });
  add("documents_f16_unrounded", distributed_case_of(1, 101, 4, 2, DType::f16), documents,
      [](auto& c) { c.float32_out = true; });
  add("windowed_documents", distributed_case_of(1, 101, 2, 1), windowed, as_is);
  add("areas_sink", distributed_case_of(1, 101, 4, 2), areas, [](auto& c) { c.sink = true; });
  add("areas_bf16", distributed_case_of(2, 101, 2, 2, DType::bf16), areas, as_is);
  add("two_rows", distributed_case_of(1, 2, 4, 2), causal, [](auto& c) { c.sink = true; });  // more ranks than rows
  return out;
}

// One process's call of the case, and the judgement of what ranks wrote.
class Whole {
 public:
  explicit Whole(const DistributedCase& c) : mask_(c.mask), data(c.spec) {
    options_ = data.options();
    if (!mask_.cu_seqlens.empty()) {
      const auto count = std::ssize(mask_.cu_seqlens);
      cu_seqlens_ = HostTensor::input(DType::i32, {count});
      for (int64_t n = 0; n < count; ++n)
        cu_seqlens_.set(n, static_cast<double>(mask_.cu_seqlens[static_cast<std::size_t>(n)]));
      options_.cu_seqlens_q = options_.cu_seqlens_k = cu_seqlens_.view();
    }
    if (!mask_.areas.empty()) {
      const int64_t S = data.spec.Sq;
      pairs_ = HostTensor::input(DType::boolean, {1, 1, S, S});
      for (int64_t n = 0; n < S * S; ++n) pairs_.set(n, 0);
      for (const Area& a : mask_.areas) {
        for (int64_t row = a.q_begin; row < a.q_end; ++row) {
          for (int64_t key = a.key_begin; key < a.key_end; ++key) {
            if (a.causal == Causal::none || key - a.key_begin <= row - a.q_begin) pairs_.set(row * S + key, 1);
          }
        }
      }
      options_.mask = pairs_.view();
    }
    gradients_ = data.new_gradients();
    problem_ = checked_backward_problem(Check("test"), as_packed(data.q), as_packed(data.k), as_packed(data.v), {}, {},
                                        as_packed(data.d_o), lse_as_packed(data.d_lse), packed_gradients(), options_);
    forward_ = checked_forward_problem(Check("test"), as_packed(data.q), as_packed(data.k), as_packed(data.v), {}, {},
                                       options_);
    exact = reference::attention_forward(forward_, default_executor());
    exact_gradients = reference::attention_backward(problem_, default_executor());
    plain = plain_forward(forward_);
    plain_gradients = plain_backward(problem_, exact);
    factor = allowed_factor(forward_, exact);
  }

 private:
  bool packed() const { return !mask_.cu_seqlens.empty(); }
  // Documents are packed: [1, S, H, D] is [S, H, D].
  TensorView as_packed(const HostTensor& x) const {
    const TensorView& v = x.view();
    if (!packed() || !x.given()) return v;
    return {v.data, v.dtype, {v.shape[1], v.shape[2], v.shape[3]}};
  }
  TensorView lse_as_packed(const HostTensor& x) const {
    const TensorView& v = x.view();
    if (!packed()) return v;
    return {v.data, v.dtype, {v.shape[1], v.shape[2]}};
  }
  AttentionGradients packed_gradients() const {
    return {as_packed(gradients_.dq), as_packed(gradients_.dk), as_packed(gradients_.dv), gradients_.dbias.view(),
            gradients_.dsink.view()};
  }

  Mask mask_;
  AttentionOptions options_;
  HostTensor cu_seqlens_, pairs_;
  Gradients gradients_;
  AttentionBackwardProblem problem_;
  AttentionProblem forward_;

 public:
  const CaseData data;
  reference::Forward exact;
  reference::Backward exact_gradients;
  PlainForward plain;
  PlainBackward plain_gradients;
  double factor = 0;
};

// A rank's tensors: rows of the whole's, and what it writes.
struct Share {
  HostTensor q, k, v, d_o, d_lse, bias, o, lse, dq, dk, dv, dsink, dbias;

  distributed::Gradients gradients() const { return {dq.view(), dk.view(), dv.view(), dsink.view(), dbias.view()}; }
};

// Whether attention over ranks is defined for the case by this order and scheme.
inline bool is_served(const AttentionCase& spec, const Plan& plan, distributed::Scheme scheme) {
  const bool striped = plan.problem().order == Order::striped;
  if (striped && spec.alibi != Alibi::none && plan.ulysses(scheme) < plan.problem().ranks) return false;
  const bool heads = scheme == distributed::Scheme::ulysses || scheme == distributed::Scheme::two_dimensional;
  return !spec.bias.given || !(striped || heads);
}

// Rows `rows` of x [B, S, H, D], or columns of x [B, H, S] where `last`.
inline HostTensor rows_of(const HostTensor& x, const std::vector<int64_t>& rows, bool last = false) {
  const TensorView& v = x.view();
  const int64_t outer = last ? v.shape[0] * v.shape[1] : v.shape[0], S = last ? v.shape[2] : v.shape[1];
  const int64_t width = last ? 1 : v.shape[2] * v.shape[3];
  const auto count = std::ssize(rows);
  HostTensor out = last ? HostTensor::input(v.dtype, {v.shape[0], v.shape[1], count})
                        : HostTensor::input(v.dtype, {v.shape[0], count, v.shape[2], v.shape[3]});
  for (int64_t n = 0; n < outer * count * width; ++n) {
    const int64_t at = n / (count * width), row = rows[static_cast<std::size_t>(n / width % count)];
    out.set(n, x.get((at * S + row) * width + n % width));
  }
  return out;
}

// Rows `rows` of a bias [B or 1, H or 1, S, S].
inline HostTensor rows_of_bias(const HostTensor& x, const std::vector<int64_t>& rows) {
  const TensorView& v = x.view();
  const int64_t S = v.shape[2], count = std::ssize(rows);
  HostTensor out = HostTensor::input(v.dtype, {v.shape[0], v.shape[1], count, S});
  for (int64_t n = 0; n < out.elements(); ++n) {
    const int64_t at = n / (count * S), row = rows[static_cast<std::size_t>(n / S % count)];
    out.set(n, x.get((at * S + row) * S + n % S));
  }
  return out;
}

inline void put_rows(const HostTensor& x, const std::vector<int64_t>& rows, int64_t S, std::vector<double>& to,
                     bool last = false) {
  const TensorView& v = x.view();
  const int64_t width = last ? 1 : v.shape[2] * v.shape[3];
  const auto count = std::ssize(rows);
  for (int64_t n = 0; n < x.elements(); ++n) {
    const int64_t at = n / (count * width), row = rows[static_cast<std::size_t>(n / width % count)];
    to[static_cast<std::size_t>((at * S + row) * width + n % width)] = x.get(n);
  }
}

inline std::vector<int64_t> rows_of_rank(const Plan& plan, int rank) {
  const std::vector<int64_t> all = plan.permutation();
  int64_t begin = 0;
  for (int r = 0; r < rank; ++r) begin += plan.rows(r);
  return {all.begin() + begin, all.begin() + begin + plan.rows(rank)};
}

inline Share share_of(const CaseData& data, const Plan& plan, int rank) {
  const AttentionCase& spec = data.spec;
  const std::vector<int64_t> rows = rows_of_rank(plan, rank);
  const int64_t count = std::ssize(rows);
  Share s;
  s.q = rows_of(data.q, rows), s.k = rows_of(data.k, rows), s.v = rows_of(data.v, rows);
  s.d_o = rows_of(data.d_o, rows), s.d_lse = rows_of(data.d_lse, rows, true);
  s.o = HostTensor::output(spec.o_dtype(), {spec.B, count, spec.H, spec.Dv});
  s.lse = HostTensor::output(DType::f32, {spec.B, spec.H, count});
  s.dq = HostTensor::output(spec.dtype, {spec.B, count, spec.H, spec.D}, Layout::padded_rows);
  s.dk = HostTensor::output(spec.dtype, {spec.B, count, spec.Hkv, spec.D});
  s.dv = HostTensor::output(DType::f32, {spec.B, count, spec.Hkv, spec.Dv});
  if (spec.sink) s.dsink = HostTensor::output(DType::f32, {spec.H});
  if (spec.bias.given) {
    s.bias = rows_of_bias(data.bias, rows);
    const auto& shape = s.bias.view().shape;
    s.dbias = HostTensor::output(DType::f32, {shape[0], shape[1], shape[2], shape[3]});
  }
  return s;
}

inline void expect_same_bits(const std::vector<Share>& shares, const std::vector<Share>& again) {
  for (std::size_t rank = 0; rank < shares.size(); ++rank) {
    const Share &a = shares[rank], &b = again[rank];
    EXPECT_TRUE(a.o.same_bits(b.o) && a.lse.same_bits(b.lse) && a.dq.same_bits(b.dq) && a.dk.same_bits(b.dk) &&
                a.dv.same_bits(b.dv) && (!a.dsink.given() || a.dsink.same_bits(b.dsink)) &&
                (!a.dbias.given() || a.dbias.same_bits(b.dbias)))
        << "rank " << rank;
  }
}

inline void expect_whole(const Whole& whole, const Plan& plan, const std::vector<Share>& shares) {
  const int64_t S = whole.data.spec.Sq;
  std::vector<double> dbias(whole.exact_gradients.dbias.size()), o(whole.exact.o.size()), lse(whole.exact.lse.size()),
      dq(whole.exact_gradients.dq.size()), dk(whole.exact_gradients.dk.size()), dv(whole.exact_gradients.dv.size());
  for (int rank = 0; rank < plan.problem().ranks; ++rank) {
    const Share& s = shares[static_cast<std::size_t>(rank)];
    const std::vector<int64_t> rows = rows_of_rank(plan, rank);
    put_rows(s.o, rows, S, o);
    put_rows(s.lse, rows, S, lse, true);
    put_rows(s.dq, rows, S, dq);
    put_rows(s.dk, rows, S, dk);
    put_rows(s.dv, rows, S, dv);
    for (int64_t n = 0; s.dbias.given() && n < s.dbias.elements(); ++n) {
      const int64_t count = std::ssize(rows), at = n / (count * S), row = rows[static_cast<std::size_t>(n / S % count)];
      dbias[static_cast<std::size_t>((at * S + row) * S + n % S)] = s.dbias.get(n);
    }
  }
  const auto expect = [](const char* name, const std::vector<double>& found, const std::vector<double>& exact,
                         const PlainTensor& plain, DType dtype, double factor) {
    expect_within_rule(name, found, exact, plain, {std::ssize(found)}, dtype, factor);
  };
  const AttentionCase& spec = whole.data.spec;
  expect("o", o, whole.exact.o, whole.plain.o, spec.o_dtype(), whole.factor);
  expect("lse", lse, whole.exact.lse, whole.plain.lse, DType::f32, whole.factor);
  expect("dq", dq, whole.exact_gradients.dq, whole.plain_gradients.dq, spec.dtype, whole.factor);
  expect("dk", dk, whole.exact_gradients.dk, whole.plain_gradients.dk, spec.dtype, whole.factor);
  expect("dv", dv, whole.exact_gradients.dv, whole.plain_gradients.dv, DType::f32, whole.factor);
  if (shares[0].dbias.given()) {
    expect("dbias", dbias, whole.exact_gradients.dbias, whole.plain_gradients.dbias, DType::f32, whole.factor);
  }
  if (spec.sink) {
    // It has a sum over all rows of exp(sink - lse) times delta. The plain computation has exact o and lse, rounded
    // once; ranks have their own, which every merge rounds.
    constexpr double kOfOwnForward = 2;
    for (const Share& s : shares) {
      expect("dsink", s.dsink.values(), whole.exact_gradients.dsink, whole.plain_gradients.dsink, DType::f32,
             kOfOwnForward * kFactor);
      EXPECT_TRUE(s.dsink.same_bits(shares[0].dsink));
    }
  }
}

// Whether a run that takes one in `of` has this: by a hash (FNV-1a) of its name. With HEDDLE_EVERY_SCHEME, which
// scripts/test_ranks.sh sets, all are taken.
inline bool in_turn(const std::string& name, unsigned of) {
  static const bool every = std::getenv("HEDDLE_EVERY_SCHEME") != nullptr;
  std::uint32_t hash = 2166136261u;
  for (const char letter : name) hash = (hash ^ static_cast<unsigned char>(letter)) * 16777619u;
  return every || (hash >> 8) % of == 0;
}

inline Problem problem_of(const DistributedCase& c, int ranks, Order order) {
  return {.rows = c.spec.Sq,
          .ranks = ranks,
          .cu_seqlens = c.mask.cu_seqlens,
          .causal = c.mask.causal,
          .window_left = c.mask.left,
          .window_right = c.mask.right,
          .areas = c.mask.areas,
          .order = order};
}

}  // namespace heddle::kit::over_ranks
