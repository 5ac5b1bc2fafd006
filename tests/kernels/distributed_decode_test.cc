// Decoding over a cache that is spread over ranks, threads here: together they are one process's call by the reference
// in doubles and the rule that judges every kernel, and the same bits on every rank.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "heddle/distributed.h"
#include "heddle/error.h"
#include "kit/case_data.h"
#include "kit/counted.h"
#include "kit/indices.h"
#include "kit/on_ranks.h"
#include "kit/yardstick.h"

namespace heddle::kit {
namespace {

using distributed::Communicator;
using distributed::DecodeOptions;
using distributed::RankDecode;
using std::int64_t;

constexpr auto kTimeout = std::chrono::seconds(60);

struct DecodeCase {
  AttentionCase spec;    // of one process; sequences end at different lengths, one of them without keys
  bool in_turn = false;  // key j goes to rank j % P; else each rank has a range of keys, and rank 1 of several none
  bool paged = false;
};

void PrintTo(const DecodeCase& c, std::ostream* out) { *out << c.spec.name; }

std::vector<DecodeCase> cases() {
  AttentionCase base{.B = 4, .H = 6, .Hkv = 2, .Sq = 1, .Sk = 61, .D = 24, .Dv = 16, .seqused_k = true};
  const auto made = [&](const char* name, const auto& change) {
    AttentionCase spec = base;
    spec.name = name;
    change(spec);
    return spec;
  };
  const auto causal = [](AttentionCase& c) { c.Sq = 3, c.causal = Causal::bottom_right; };
  return {{made("plain", [](auto&) {})},
          {made("sink_softcap", [](auto& c) { c.sink = true, c.softcap = 3, c.Sq = 2; })},
          {made("causal_sink", [&](auto& c) { causal(c), c.sink = true, c.scale = 0.4f; })},
          {made("causal_in_turn_paged", causal), true, true},
          {made("window_sink_in_turn", [&](auto& c) { causal(c), c.sink = true, c.window_left = 9; }), true},
          {made("window", [&](auto& c) { c.Sq = 2, c.window_left = 19, c.window_right = 0; })},
          {made("alibi_bf16", [](auto& c) { c.alibi = Alibi::per_batch, c.dtype = DType::bf16; })},
          {made("paged_f16", [](auto& c) { c.dtype = DType::f16, c.sink = true; }), false, true},
          {made("unrounded_bf16", [](auto& c) { c.dtype = DType::bf16, c.float32_out = true; }), true},
          {made("cache_in_8_bits",
                [](auto& c) { c.dtype = DType::bf16, c.f8_cache = true, c.scaling = Scaling::one, c.sink = true; }),
           false, true}};
}

// What one rank holds.
struct Part {
  HostTensor k, v, seqused, page_table, q_offset, key_offset;
  int64_t key_step = 1;
};

// Of a sequence of so many keys, those of a rank.
std::vector<int64_t> keys_of(const DecodeCase& c, int64_t length, int rank, int ranks) {
  std::vector<int64_t> out;
  if (c.in_turn) {
    for (int64_t j = rank; j < length; j += ranks) out.push_back(j);
    return out;
  }
  const int holders = ranks > 1 ? ranks - 1 : 1, at = rank > 1 ? rank - 1 : rank;
  if (rank == 1) return out;
  // Ranges of different lengths.
  const int64_t begin = length * at * (at + 1) / (holders * (holders + 1));
  const int64_t end = length * (at + 1) * (at + 2) / (holders * (holders + 1));
  for (int64_t j = begin; j < end; ++j) out.push_back(j);
  return out;
}

Part part_of(const DecodeCase& c, const CaseData& data, int rank, int ranks) {
  const AttentionCase& spec = c.spec;
  std::vector<std::vector<int64_t>> keys;
  int64_t longest = 0;
  std::vector<int64_t> seqused, q_offset, key_offset;
  for (int64_t b = 0; b < spec.B; ++b) {
    const auto length = static_cast<int64_t>(data.seqused_k.get(b));
    keys.push_back(keys_of(c, length, rank, ranks));
    const auto count = std::ssize(keys.back());
    longest = std::max(longest, count);
    seqused.push_back(count);
    // Row Sq - 1 stands at the last key; positions are moved on, so that rows in front of all keys have one, too.
    q_offset.push_back(length);
    key_offset.push_back(spec.Sq + (count > 0 ? keys.back()[0] : 0));
  }
  constexpr int64_t kPage = 4;
  const int64_t pages = (longest + kPage - 1) / kPage;
  const int64_t outer = c.paged ? spec.B * pages : spec.B, slots = c.paged ? kPage : longest > 0 ? longest + 3 : 0;
  Part out;
  out.k = HostTensor::input(spec.k_dtype(), {outer, slots, spec.Hkv, spec.D});
  out.v = HostTensor::input(spec.k_dtype(), {outer, slots, spec.Hkv, spec.Dv});
  // Pages from the last to the first. What holds no key is NaN.
  const auto slot_of = [&](int64_t b, int64_t n) {
    return c.paged ? (outer - 1 - (b * pages + n / kPage)) * kPage + n % kPage : b * slots + n;
  };
  for (const auto& [from, to, width] :
       {std::tuple{&data.k, &out.k, spec.Hkv * spec.D}, {&data.v, &out.v, spec.Hkv * spec.Dv}}) {
    for (int64_t b = 0; b < spec.B; ++b) {
      const std::vector<int64_t>& own = keys[static_cast<std::size_t>(b)];
      for (int64_t n = 0; n < std::ssize(own) * width; ++n) {
        const int64_t key = own[static_cast<std::size_t>(n / width)];
        to->set(slot_of(b, n / width) * width + n % width, from->get((b * spec.Sk + key) * width + n % width));
      }
    }
  }
  if (c.paged) {
    out.page_table = HostTensor::input(DType::i32, {spec.B, pages});
    for (int64_t n = 0; n < spec.B * pages; ++n) out.page_table.set(n, static_cast<double>(outer - 1 - n));
  }
  out.seqused = indices(seqused);
  out.q_offset = indices(q_offset);
  out.key_offset = indices(key_offset);
  out.key_step = c.in_turn ? ranks : 1;
  return out;
}

DecodeOptions options_of(const DecodeCase& c, const CaseData& data, const Part& part) {
  DecodeOptions options;
  options.seqused_k = part.seqused.view();
  options.page_table = part.page_table.view();
  options.k_scale = data.k_scale.view();
  options.v_scale = data.v_scale.view();
  options.scale = c.spec.scale;
  options.softcap = c.spec.softcap;
  options.alibi_slopes = data.alibi.view();
  options.sink = data.sink.view();
  options.causal = c.spec.causal == Causal::none ? Causal::none : Causal::top_left;
  options.window_left = c.spec.window_left;
  options.window_right = c.spec.window_right;
  options.q_offset = part.q_offset.view();
  options.key_offset = part.key_offset.view();
  options.key_step = part.key_step;
  return options;
}

class DistributedDecode : public ::testing::TestWithParam<DecodeCase> {};

TEST_P(DistributedDecode, IsOneProcess) {
  const DecodeCase& c = GetParam();
  const AttentionCase& spec = c.spec;
  const CaseData data(spec);
  const AttentionProblem problem = data.problem();
  const reference::Forward exact = reference::attention_forward(problem, default_executor());
  const PlainForward plain = plain_forward(problem);
  const double factor = allowed_factor(problem, exact);
  for (const int ranks : {1, 2, 3, 4}) {
    SCOPED_TRACE(std::to_string(ranks) + " ranks");
    std::vector<HostTensor> o(static_cast<std::size_t>(ranks)), lse(o.size());
    const auto thrown = on_ranks(ranks, kTimeout, [&](Communicator& threads) {
      Counted communicator(threads);
      const int rank = communicator.rank();
      const Part part = part_of(c, data, rank, ranks);
      HostTensor &own_o = o[static_cast<std::size_t>(rank)], &own_lse = lse[static_cast<std::size_t>(rank)];
      own_o = HostTensor::output(spec.o_dtype(), {spec.B, spec.Sq, spec.H, spec.Dv}, Layout::padded_rows);
      own_lse = HostTensor::output(DType::f32, {spec.B, spec.H, spec.Sq});
      const HostTensor again = own_o;
      RankDecode decode(communicator);
      const DecodeOptions options = options_of(c, data, part);
      decode.forward(data.q.view(), part.k.view(), part.v.view(), again.view(), {}, options);
      decode.forward(data.q.view(), part.k.view(), part.v.view(), own_o.view(), own_lse.view(), options);
      EXPECT_TRUE(again.same_bits(own_o));
      EXPECT_EQ(own_o.damage() + own_lse.damage(), "");
      EXPECT_EQ(communicator.messages, 2 * (ranks - 1));
      EXPECT_EQ(communicator.bytes, 2 * (ranks - 1) * spec.B * spec.Sq * spec.H * (spec.Dv + 1) * 4);
    });
    ASSERT_EQ(thrown, std::vector<std::string>(thrown.size()));
    const auto expect = [&](const char* name, const HostTensor& found, const std::vector<double>& right,
                            const PlainTensor& of, DType dtype) {
      const std::vector<double> values = found.values();
      const Comparison result = compare(name, values, right, of, {std::ssize(values)}, dtype, factor);
      EXPECT_TRUE(result.passed) << name << " is off by " << result.error << ", allowed " << result.bound << "; "
                                 << result.worst;
    };
    expect("o", o[0], exact.o, plain.o, spec.o_dtype());
    expect("lse", lse[0], exact.lse, plain.lse, DType::f32);
    for (std::size_t rank = 1; rank < o.size(); ++rank) {
      EXPECT_TRUE(o[rank].same_bits(o[0]) && lse[rank].same_bits(lse[0])) << "rank " << rank;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, DistributedDecode, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.spec.name; });

// A rank's tensors for refusals, all of ones.
struct Tensors {
  HostTensor q = ones({2, 1, 4, 8}), k = ones({2, 5, 2, 8}), v = ones({2, 5, 2, 8}), o = ones({2, 1, 4, 8}), lse;
  DecodeOptions options;

  static HostTensor ones(std::vector<int64_t> shape, DType dtype = DType::f32) {
    HostTensor x = HostTensor::output(dtype, std::move(shape));
    for (int64_t n = 0; n < x.elements(); ++n) x.set(n, 1);
    return x;
  }
};

// What the last of two ranks, which changes its tensors, throws, and what the other one does.
template <class Change>
std::vector<std::string> refusals(const Change& change) {
  return on_ranks(2, kTimeout, [&](Communicator& communicator) {
    Tensors t;
    if (communicator.rank() == 1) change(t);
    RankDecode decode(communicator);
    decode.forward(t.q.view(), t.k.view(), t.v.view(), t.o.view(), t.lse.view(), t.options);
  });
}

TEST(DistributedDecodeRefusals, SayWhatAndWhy) {
  const auto last = [](const auto& change) { return refusals(change).back(); };
  const HostTensor three = Tensors::ones({3}), offsets = indices({4, 4}), table = indices({0, 1});
  EXPECT_EQ(last([](Tensors& t) {
              t.k = Tensors::ones({2, 5, 3, 8});
            }),
            "[distributed.decode] q is [2, 1, 4, 8], k_cache [2, 5, 3, 8] and v_cache [2, 5, 2, 8]: they must be [B, "
            "Sq, H, D], [..., Hkv, D] and [..., Hkv, Dv] with H a multiple of Hkv");
  EXPECT_EQ(last([](Tensors& t) {
              t.o = Tensors::ones({2, 1, 4, 8}, DType::f16);
            }),
            "[distributed.decode] o is float16: it must be float32 or have q's dtype, float32");
  EXPECT_EQ(last([](Tensors& t) {
              t.o = Tensors::ones({2, 1, 4, 7});
            }),
            "[distributed.decode] o is [2, 1, 4, 7]: it must be [B, Sq, H, Dv] of q [2, 1, 4, 8] and v_cache [2, 5, 2, "
            "8]");
  EXPECT_EQ(last([](Tensors& t) {
              t.lse = Tensors::ones({2, 1, 4});
            }),
            "[distributed.decode] lse is [2, 1, 4]: it must be [B, H, Sq] of q, [2, 1, 4, 8]");
  EXPECT_EQ(last([&](Tensors& t) { t.options.sink = three.view(); }),
            "[distributed.decode] sink is [3]: it must be [H], 4");
  EXPECT_EQ(last([&](Tensors& t) { t.options.page_table = table.view(); }),
            "[distributed.decode] page_table is given without seqused_k: how many keys lie in the pages must be said");
  const std::string apart =
      " is given without q_offset and key_offset: a part of the keys does not know where in the sequence it lies";
  EXPECT_EQ(last([](Tensors& t) { t.options.causal = Causal::top_left; }), "[distributed.decode] causal" + apart);
  EXPECT_EQ(last([&](Tensors& t) {
              t.options.window_left = 3;
              t.options.q_offset = offsets.view();
            }),
            "[distributed.decode] a window" + apart);
  EXPECT_EQ(last([&](Tensors& t) { t.options.alibi_slopes = three.view(); }),
            "[distributed.decode] alibi_slopes" + apart);
  // Attention's own, before anything is sent.
  const std::vector<std::string> of_attention = refusals([&](Tensors& t) {
    t.options.causal = Causal::bottom_right;
    t.options.q_offset = t.options.key_offset = offsets.view();
  });
  EXPECT_NE(of_attention[1].find("causal is bottom_right"), std::string::npos) << of_attention[1];
  EXPECT_NE(
      of_attention[0].find("[distributed.decode] plans compared: rank 0 waits for rank 1, within 60 s: it is gone"),
      std::string::npos)
      << of_attention[0];
}

TEST(DistributedDecodeRefusals, RanksThatDisagreeAreToldOnEveryRank) {
  for (const std::string& what : refusals([](Tensors& t) { t.options.softcap = 2; })) {
    EXPECT_EQ(what, "[distributed.decode] ranks do not agree: softcap is 0 on rank 0 and 2 on rank 1");
  }
}

TEST(DistributedDecodeRefusals, ALostRankIsAnError) {
  const auto thrown = on_ranks(2, kTimeout, [](Communicator& communicator) {
    Tensors t;
    RankDecode decode(communicator);
    decode.forward(t.q.view(), t.k.view(), t.v.view(), t.o.view(), {});
    if (communicator.rank() == 1) throw RuntimeError("lost");
    decode.forward(t.q.view(), t.k.view(), t.v.view(), t.o.view(), {});
  });
  EXPECT_EQ(thrown[0],
            "[distributed.decode] partial results gathered: rank 0 waits for rank 1, within 60 s: it is gone");
}

TEST(DistributedDecodeEdges, NoRowsAndNoSequences) {
  const auto thrown = on_ranks(2, kTimeout, [](Communicator& communicator) {
    RankDecode decode(communicator);
    for (const auto& [batch, rows] : {std::pair<int64_t, int64_t>{0, 1}, {2, 0}}) {
      const HostTensor q = Tensors::ones({batch, rows, 4, 8}), k = Tensors::ones({batch, 5, 2, 8});
      decode.forward(q.view(), k.view(), k.view(), q.view(), {});
    }
  });
  EXPECT_EQ(thrown, std::vector<std::string>(2));
}

}  // namespace
}  // namespace heddle::kit
