// Attention over several ranks, threads here: together they are one process's call by the reference in doubles and the
// rule that judges every kernel, forward and backward, and the same bits each time.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "heddle/distributed.h"
#include "heddle/error.h"
#include "kit/case_data.h"
#include "kit/yardstick.h"
#include "ops/attention/arguments.h"

namespace heddle::kit {
namespace {

using distributed::Area;
using distributed::Communicator;
using distributed::Order;
using distributed::Plan;
using distributed::Problem;
using distributed::RankAttention;
using distributed::Scheme;
using std::int64_t;

constexpr auto kTimeout = std::chrono::seconds(60);

// What one rank does, on all of them at once. What it throws is kept for each.
std::vector<std::string> on_ranks(int ranks, std::chrono::milliseconds timeout,
                                  const std::function<void(Communicator&)>& body) {
  auto communicators = distributed::thread_communicators(ranks, timeout);
  std::vector<std::string> thrown(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      auto& own = communicators[static_cast<std::size_t>(rank)];
      try {
        body(*own);
      } catch (const std::exception& error) {
        thrown[static_cast<std::size_t>(rank)] = error.what();
        own.reset();  // the others need not wait for it
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return thrown;
}

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

void PrintTo(const DistributedCase& c, std::ostream* out) { *out << c.name; }

AttentionCase sized(int64_t B, int64_t S, int64_t H, int64_t Hkv, DType dtype = DType::f32) {
  return {.name = "distributed", .dtype = dtype, .B = B, .H = H, .Hkv = Hkv, .Sq = S, .Sk = S, .D = 24, .Dv = 16};
}

std::vector<DistributedCase> cases() {
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
  add("full", sized(2, 61, 4, 2), {.name = "full"}, as_is);
  add("causal", sized(2, 61, 4, 2), causal, as_is);
  add("causal_sink_softcap", sized(1, 97, 6, 2), causal, [](auto& c) { c.sink = true, c.softcap = 3; });
  add("causal_alibi", sized(2, 50, 4, 4), causal, [](auto& c) { c.alibi = Alibi::per_head; });
  // Of two ranks or three some have groups of query heads that are cut.
  add("causal_cut_groups", sized(1, 45, 9, 3), causal, [](auto& c) { c.sink = true, c.alibi = Alibi::per_head; });
  add("window_sink", sized(1, 90, 4, 1), window, [](auto& c) { c.sink = true; });
  add("both_bf16", sized(2, 77, 4, 2, DType::bf16), both, as_is);
  add("documents_sink", sized(1, 101, 4, 2), documents, [](auto& c) { c.sink = true; });
  add("documents_f16_unrounded", sized(1, 101, 4, 2, DType::f16), documents, [](auto& c) { c.float32_out = true; });
  add("windowed_documents", sized(1, 101, 2, 1), windowed, as_is);
  add("areas_sink", sized(1, 101, 4, 2), areas, [](auto& c) { c.sink = true; });
  add("areas_bf16", sized(2, 101, 2, 2, DType::bf16), areas, as_is);
  add("two_rows", sized(1, 2, 4, 2), causal, [](auto& c) { c.sink = true; });  // more ranks than rows
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
    return {as_packed(gradients_.dq), as_packed(gradients_.dk), as_packed(gradients_.dv), {}, gradients_.dsink.view()};
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
  HostTensor q, k, v, d_o, d_lse, o, lse, dq, dk, dv, dsink;
};

// Rows `rows` of x [B, S, H, D], or columns of x [B, H, S] where `last`.
HostTensor rows_of(const HostTensor& x, const std::vector<int64_t>& rows, bool last = false) {
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

void put_rows(const HostTensor& x, const std::vector<int64_t>& rows, int64_t S, std::vector<double>& to,
              bool last = false) {
  const TensorView& v = x.view();
  const int64_t width = last ? 1 : v.shape[2] * v.shape[3];
  const auto count = std::ssize(rows);
  for (int64_t n = 0; n < x.elements(); ++n) {
    const int64_t at = n / (count * width), row = rows[static_cast<std::size_t>(n / width % count)];
    to[static_cast<std::size_t>((at * S + row) * width + n % width)] = x.get(n);
  }
}

std::vector<int64_t> rows_of_rank(const Plan& plan, int rank) {
  const std::vector<int64_t> all = plan.permutation();
  int64_t begin = 0;
  for (int r = 0; r < rank; ++r) begin += plan.rows(r);
  return {all.begin() + begin, all.begin() + begin + plan.rows(rank)};
}

std::vector<Share> run(const Whole& whole, const Plan& plan, Scheme scheme) {
  const AttentionCase& spec = whole.data.spec;
  std::vector<Share> shares(static_cast<std::size_t>(plan.problem().ranks));
  const auto thrown = on_ranks(plan.problem().ranks, kTimeout, [&](Communicator& communicator) {
    const std::vector<int64_t> rows = rows_of_rank(plan, communicator.rank());
    const int64_t count = std::ssize(rows);
    Share& s = shares[static_cast<std::size_t>(communicator.rank())];
    s.q = rows_of(whole.data.q, rows), s.k = rows_of(whole.data.k, rows), s.v = rows_of(whole.data.v, rows);
    s.d_o = rows_of(whole.data.d_o, rows), s.d_lse = rows_of(whole.data.d_lse, rows, true);
    s.o = HostTensor::output(spec.o_dtype(), {spec.B, count, spec.H, spec.Dv});
    s.lse = HostTensor::output(DType::f32, {spec.B, spec.H, count});
    s.dq = HostTensor::output(spec.dtype, {spec.B, count, spec.H, spec.D}, Layout::padded_rows);
    s.dk = HostTensor::output(spec.dtype, {spec.B, count, spec.Hkv, spec.D});
    s.dv = HostTensor::output(DType::f32, {spec.B, count, spec.Hkv, spec.Dv});
    if (spec.sink) s.dsink = HostTensor::output(DType::f32, {spec.H});
    distributed::Options options;
    options.softcap = spec.softcap;
    options.alibi_slopes = whole.data.alibi.view();
    options.sink = whole.data.sink.view();
    RankAttention attention(plan, communicator, scheme);
    attention.forward(s.q.view(), s.k.view(), s.v.view(), s.o.view(), s.lse.view(), options);
    attention.backward(s.q.view(), s.k.view(), s.v.view(), s.o.view(), s.lse.view(), s.d_o.view(), s.d_lse.view(),
                       {s.dq.view(), s.dk.view(), s.dv.view(), s.dsink.view()}, options);
    for (const HostTensor* x : {&s.o, &s.lse, &s.dq, &s.dk, &s.dv}) EXPECT_EQ(x->damage(), "");
  });
  for (const std::string& what : thrown) EXPECT_EQ(what, "");
  return shares;
}

void expect_whole(const Whole& whole, const Plan& plan, const std::vector<Share>& shares) {
  const int64_t S = whole.data.spec.Sq;
  std::vector<double> o(whole.exact.o.size()), lse(whole.exact.lse.size()), dq(whole.exact_gradients.dq.size()),
      dk(whole.exact_gradients.dk.size()), dv(whole.exact_gradients.dv.size());
  for (int rank = 0; rank < plan.problem().ranks; ++rank) {
    const Share& s = shares[static_cast<std::size_t>(rank)];
    const std::vector<int64_t> rows = rows_of_rank(plan, rank);
    put_rows(s.o, rows, S, o);
    put_rows(s.lse, rows, S, lse, true);
    put_rows(s.dq, rows, S, dq);
    put_rows(s.dk, rows, S, dk);
    put_rows(s.dv, rows, S, dv);
  }
  const auto expect = [&](const char* name, const std::vector<double>& found, const std::vector<double>& exact,
                          const PlainTensor& plain, DType dtype, double factor) {
    const Comparison c = compare(name, found, exact, plain, {std::ssize(found)}, dtype, factor);
    EXPECT_TRUE(c.passed) << c.tensor << " is off by " << c.error << ", allowed " << c.bound << "; " << c.worst;
  };
  const AttentionCase& spec = whole.data.spec;
  expect("o", o, whole.exact.o, whole.plain.o, spec.o_dtype(), whole.factor);
  expect("lse", lse, whole.exact.lse, whole.plain.lse, DType::f32, whole.factor);
  expect("dq", dq, whole.exact_gradients.dq, whole.plain_gradients.dq, spec.dtype, whole.factor);
  expect("dk", dk, whole.exact_gradients.dk, whole.plain_gradients.dk, spec.dtype, whole.factor);
  expect("dv", dv, whole.exact_gradients.dv, whole.plain_gradients.dv, DType::f32, whole.factor);
  if (spec.sink) {
    for (const Share& s : shares) {
      expect("dsink", s.dsink.values(), whole.exact_gradients.dsink, whole.plain_gradients.dsink, DType::f32, kFactor);
      EXPECT_TRUE(s.dsink.same_bits(shares[0].dsink));
    }
  }
}

Problem problem_of(const DistributedCase& c, int ranks, Order order) {
  return {.rows = c.spec.Sq,
          .ranks = ranks,
          .cu_seqlens = c.mask.cu_seqlens,
          .causal = c.mask.causal,
          .window_left = c.mask.left,
          .window_right = c.mask.right,
          .areas = c.mask.areas,
          .order = order};
}

class DistributedAttention : public ::testing::TestWithParam<DistributedCase> {};

TEST_P(DistributedAttention, IsOneProcess) {
  const Whole whole(GetParam());
  int turn = static_cast<int>(std::hash<std::string>{}(GetParam().name) % 97);
  for (const Order order : {Order::contiguous, Order::zigzag, Order::striped, Order::per_document, Order::balanced}) {
    if (order == Order::per_document && !GetParam().mask.areas.empty()) continue;
    for (const int ranks : {1, 2, 3, 4, 8}) {
      // Gathered and passed on in all, but of eight ranks; the others in turn.
      constexpr Scheme kInTurn[] = {Scheme::needed, Scheme::ulysses, Scheme::two_dimensional};
      std::vector<Scheme> schemes = {kInTurn[++turn % 3]};
      if (ranks <= 4) schemes.insert(schemes.begin(), {Scheme::gather, Scheme::ring});
      Problem problem = problem_of(GetParam(), ranks, order);
      if (ranks == 8) problem.ulysses = turn % 2 == 0 ? 2 : 4;
      const Plan plan(problem);
      for (const Scheme scheme : schemes) {
        if (order == Order::striped && whole.data.spec.alibi != Alibi::none && plan.ulysses(scheme) < ranks) continue;
        SCOPED_TRACE(std::string(name_of(order)) + ", " + std::to_string(ranks) + " ranks, " + name_of(scheme));
        const std::vector<Share> shares = run(whole, plan, scheme);
        if (HasFailure()) return;
        expect_whole(whole, plan, shares);
        if (ranks != 3 && scheme != Scheme::two_dimensional) continue;
        const std::vector<Share> again = run(whole, plan, scheme);
        for (std::size_t rank = 0; rank < shares.size(); ++rank) {
          const Share &a = shares[rank], &b = again[rank];
          EXPECT_TRUE(a.o.same_bits(b.o) && a.lse.same_bits(b.lse) && a.dq.same_bits(b.dq) && a.dk.same_bits(b.dk) &&
                      a.dv.same_bits(b.dv) && (!a.dsink.given() || a.dsink.same_bits(b.dsink)));
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, DistributedAttention, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

// What a rank sends, but for what is compared.
class Counted : public Communicator {
 public:
  explicit Counted(Communicator& all) : all_(all) {}
  int rank() const override { return all_.rank(); }
  int size() const override { return all_.size(); }
  const char* name() const override { return all_.name(); }
  std::unique_ptr<distributed::Transfer> exchange(std::span<const std::byte> out, int to, std::span<std::byte> in,
                                                  int from, const std::string& what) override {
    if (what != "plans compared") sent += static_cast<double>(out.size());
    return all_.exchange(out, to, in, from, what);
  }
  double sent = 0;

 private:
  Communicator& all_;
};

TEST(DistributedBytes, AreThoseOfThePlan) {
  const Mask masks[] = {{.name = "full"},
                        {.name = "causal", .causal = Causal::top_left},
                        {.name = "window", .causal = Causal::top_left, .left = 7},
                        {.name = "documents", .causal = Causal::top_left, .cu_seqlens = {0, 1, 1, 12, 30, 30, 41}}};
  constexpr Scheme kAll[] = {Scheme::gather, Scheme::ring, Scheme::needed, Scheme::ulysses, Scheme::two_dimensional};
  int turn = 0;
  for (const Mask& mask : masks) {
    for (const Order order : {Order::contiguous, Order::zigzag, Order::striped, Order::per_document, Order::balanced}) {
      for (const Scheme scheme : kAll) {
        const int ranks = 2 + ++turn % 5;
        AttentionCase spec = sized(2, 41, 6, 3, DType::bf16);
        Problem problem = problem_of({"", spec, mask}, ranks, order);
        problem.batch = 2, problem.heads = 6, problem.kv_heads = 3;
        problem.head_size = spec.D, problem.head_size_v = spec.Dv;
        const Plan plan(problem);
        SCOPED_TRACE(std::string(mask.name) + ", " + name_of(order) + ", " + std::to_string(ranks) + " ranks, " +
                     name_of(scheme));
        const auto thrown = on_ranks(ranks, kTimeout, [&](Communicator& threads) {
          Counted counted(threads);
          const int64_t rows = plan.rows(threads.rank());
          const auto zeros = [&](int64_t heads, int64_t size) {
            HostTensor x = HostTensor::output(DType::bf16, {2, rows, heads, size});
            for (int64_t n = 0; n < x.elements(); ++n) x.set(n, 0);
            return x;
          };
          const HostTensor q = zeros(6, spec.D), k = zeros(3, spec.D), v = zeros(3, spec.Dv), o = zeros(6, spec.Dv),
                           dq = zeros(6, spec.D), dk = zeros(3, spec.D), dv = zeros(3, spec.Dv);
          const HostTensor lse = HostTensor::output(DType::f32, {2, 6, rows});
          RankAttention attention(plan, counted, scheme);
          attention.forward(q.view(), k.view(), v.view(), o.view(), lse.view());
          EXPECT_EQ(counted.sent, plan.bytes(scheme, threads.rank()).forward);
          counted.sent = 0;
          attention.backward(q.view(), k.view(), v.view(), o.view(), lse.view(), o.view(), {},
                             {dq.view(), dk.view(), dv.view(), {}});
          EXPECT_EQ(counted.sent, plan.bytes(scheme, threads.rank()).backward);
        });
        EXPECT_EQ(thrown, std::vector<std::string>(thrown.size()));
      }
    }
  }
}

// What a rank is refused before anything is sent, and what all are.
std::vector<std::string> refusals(Problem problem, const std::function<void(Share&, distributed::Options&)>& change,
                                  const std::function<Problem(int)>& problem_of_rank = {},
                                  Scheme scheme = Scheme::gather) {
  return on_ranks(problem.ranks, std::chrono::seconds(20), [&](Communicator& communicator) {
    const Plan plan(problem_of_rank ? problem_of_rank(communicator.rank()) : problem);
    const int64_t rows = plan.rows(communicator.rank());
    Share s;
    const auto filled = [](std::vector<int64_t> shape) {
      HostTensor x = HostTensor::output(DType::f32, std::move(shape));
      for (int64_t n = 0; n < x.elements(); ++n) x.set(n, 1);
      return x;
    };
    s.q = filled({1, rows, 4, 8});
    s.k = filled({1, rows, 2, 8});
    s.v = filled({1, rows, 2, 8});
    s.o = filled({1, rows, 4, 8});
    distributed::Options options;
    if (communicator.rank() == problem.ranks - 1) change(s, options);
    RankAttention(plan, communicator, scheme).forward(s.q.view(), s.k.view(), s.v.view(), s.o.view(), {}, options);
  });
}

TEST(DistributedRefusals, SayWhatAndWhy) {
  const Problem problem{.rows = 10, .ranks = 2, .causal = Causal::top_left};
  const auto last = [&](const auto& change) { return refusals(problem, change).back(); };
  EXPECT_EQ(last([](Share& s, auto&) {
              s.k = HostTensor::output(DType::f32, {1, 4, 2, 8});
            }),
            "[distributed.forward] k is [1, 4, 2, 8]: rank 1 of the plan has 5 rows");
  EXPECT_EQ(last([](Share& s, auto&) {
              s.o = HostTensor::output(DType::f16, {1, 5, 4, 8});
            }),
            "[distributed.forward] o is float16: it must be float32 or have q's dtype, float32");
  const HostTensor slopes = HostTensor::input(DType::f32, {3});
  EXPECT_EQ(last([&](Share&, auto& options) { options.sink = slopes.view(); }),
            "[distributed.forward] sink is [3]: it must be [H], 4");
  Problem striped = problem;
  striped.order = Order::striped;
  const HostTensor four = HostTensor::input(DType::f32, {4});
  EXPECT_EQ(refusals(striped, [&](Share&, auto& options) { options.alibi_slopes = four.view(); }).back(),
            "[distributed.forward] alibi_slopes are given and the plan's order is striped: its rows stand for several "
            "positions each, which ALiBi is not about");
  const auto communicators = distributed::thread_communicators(3, kTimeout);
  const Plan plan(problem);
  try {
    RankAttention attention(plan, *communicators[0]);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()), "[distributed.rank_attention] the plan is for 2 ranks and threads has 3");
  }
}

TEST(DistributedRefusals, RanksThatDisagreeAreToldOnEveryRank) {
  const Problem problem{.rows = 12, .ranks = 3, .causal = Causal::top_left};
  for (const std::string& what : refusals(problem, [](Share&, auto& options) { options.softcap = 2; })) {
    EXPECT_EQ(what, "[distributed] ranks do not agree: softcap is 0 on rank 0 and 2 on rank 2");
  }
  const auto thrown = refusals(
      problem, [](Share&, auto&) {},
      [&](int rank) {
        Problem other = problem;
        if (rank == 1) other.causal = Causal::none;
        return other;
      });
  for (const std::string& what : thrown) {
    EXPECT_EQ(what.find("[distributed] ranks do not agree: plan is "), 0u) << what;
    EXPECT_NE(what.find(" on rank 1"), std::string::npos) << what;
  }
  Problem four = problem;
  four.ranks = 4;
  const auto sizes = [&](int rank) {
    Problem other = four;
    other.ulysses = rank == 2 ? 4 : 2;
    return other;
  };
  for (const std::string& what : refusals(
           four, [](Share&, auto&) {}, sizes, Scheme::two_dimensional)) {
    EXPECT_EQ(what, "[distributed] ranks do not agree: ulysses is 2 on rank 0 and 4 on rank 2");
  }
}

TEST(DistributedRefusals, ALostRankIsAnErrorOfEveryScheme) {
  const std::pair<Scheme, const char*> exchanges[] = {{Scheme::gather, "keys gathered"},
                                                      {Scheme::ring, "keys passed on, step "},
                                                      {Scheme::needed, "needed keys sent"},
                                                      {Scheme::ulysses, "rows exchanged for heads"},
                                                      {Scheme::two_dimensional, ""}};
  for (const auto& [scheme, what] : exchanges) {
    for (const bool slow : {false, true}) {
      const Problem problem{.rows = 23, .ranks = 4, .causal = Causal::top_left};
      const auto timeout = std::chrono::milliseconds(slow ? 700 : 20000);
      std::atomic<int> told = 0;
      const auto thrown = on_ranks(4, timeout, [&, scheme = scheme](Communicator& communicator) {
        const Plan plan(problem);
        const int64_t rows = plan.rows(communicator.rank());
        std::vector<float> x(static_cast<std::size_t>(rows * 4 * 8), 1), o(x.size());
        const TensorView q{x.data(), DType::f32, {1, rows, 4, 8}}, out{o.data(), DType::f32, {1, rows, 4, 8}};
        RankAttention attention(plan, communicator, scheme);
        attention.forward(q, q, q, out, {});
        communicator.barrier();
        if (communicator.rank() == 3) {
          if (!slow) throw RuntimeError("lost");
          while (told < 3) std::this_thread::sleep_for(std::chrono::milliseconds(5));
          return;
        }
        try {
          attention.forward(q, q, q, out, {});
        } catch (...) {
          ++told;
          throw;
        }
      });
      bool named = false;
      for (std::size_t rank = 0; rank < 3; ++rank) {
        EXPECT_EQ(thrown[rank].find(std::string("[distributed] ") + what), 0u)
            << name_of(scheme) << ": " << thrown[rank];
        const std::string waits = ": rank " + std::to_string(rank) + " waits for rank ";
        EXPECT_NE(thrown[rank].find(waits), std::string::npos) << name_of(scheme) << ": " << thrown[rank];
        named = named || thrown[rank].find(waits + "3, ") != std::string::npos;
      }
      EXPECT_TRUE(named) << name_of(scheme);
    }
  }
}

TEST(DistributedCommunicator, SumsInTheOrderOfRanks) {
  // 1e8 + 1 is 1e8 in float32: the order shows.
  const float of_rank[] = {1e8f, 1, -1e8f, 3};
  const auto thrown = on_ranks(4, kTimeout, [&](Communicator& communicator) {
    const int rank = communicator.rank();
    std::vector<float> x = {of_rank[rank], 1}, scratch(8);
    communicator.all_reduce(x, scratch, "test");
    EXPECT_EQ(x, (std::vector<float>{3, 4}));
    // Parts of different lengths, one of them empty.
    const std::vector<float> one = {of_rank[rank]}, two = {of_rank[rank], of_rank[3 - rank]};
    const std::span<const float> parts[] = {one, {}, two, one};
    std::vector<float> sum(parts[rank].size()), space(sum.size());
    communicator.reduce_scatter(parts, sum, space, "test");
    const std::vector<float> sums[] = {{3}, {}, {3, 0}, {3}};
    EXPECT_EQ(sum, sums[rank]);
    communicator.barrier();
  });
  EXPECT_EQ(thrown, std::vector<std::string>(4));
}

TEST(DistributedCommunicator, ALostRankIsAnError) {
  const auto gone = on_ranks(3, kTimeout, [](Communicator& communicator) {
    if (communicator.rank() == 2) throw RuntimeError("lost");
    std::vector<float> x(1), scratch(3);
    communicator.all_reduce(x, scratch, "sum of the test");
  });
  EXPECT_EQ(gone[0], "[distributed] sum of the test: rank 0 waits for rank 2, which is gone");
  EXPECT_TRUE(gone[1].find("[distributed] sum of the test: rank 1 waits for rank ") == 0) << gone[1];
  const auto slow = on_ranks(2, std::chrono::milliseconds(30), [](Communicator& communicator) {
    if (communicator.rank() == 0) communicator.barrier();
    if (communicator.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(150));
  });
  EXPECT_EQ(slow[0], "[distributed] barrier: rank 0 waits for rank 1, in vain for 30 ms");
  const auto unequal = on_ranks(2, kTimeout, [](Communicator& communicator) {
    std::vector<std::byte> in(static_cast<std::size_t>(communicator.rank() + 1)), out(1);
    communicator.exchange(out, 1 - communicator.rank(), in, 1 - communicator.rank(), "test")->wait();
  });
  EXPECT_EQ(unequal[1], "[distributed] test: rank 1 waits for rank 0, which sent 1 bytes where 2 were expected");
}

}  // namespace
}  // namespace heddle::kit
