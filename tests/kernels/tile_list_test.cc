// Tasks of the CPU that walk a list of tiles: all tiles in the list give the bits of no list, and some of them the bits
// of a call that has no other keys.
#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "cpu/kernels.h"
#include "kernels/candidates.h"
#include "ops/attention/arguments.h"

namespace heddle::kit {
namespace {

using cpu::TileList;
using List = std::vector<std::int32_t>;

// A listing says which tiles of a sequence are taken, given their keys and how many there are. Null: no list.
using Listing = List (*)(std::int64_t tiles);

List all_tiles(std::int64_t tiles) {
  List list(static_cast<std::size_t>(tiles));
  std::iota(list.begin(), list.end(), 0);
  return list;
}

// 1, 2, 4, 7, 11, ...
List some_tiles(std::int64_t tiles) {
  List list;
  for (std::int32_t tile = 1, step = 1; tile < tiles; tile += step++) list.push_back(tile);
  return list;
}

List listed(Listing listing, std::int64_t keys, std::int64_t size) {
  return listing == nullptr ? List{} : listing(cpu::ceil_div(keys, size));
}
TileList view(Listing listing, const List& list) {
  return listing == nullptr ? TileList{} : TileList{list.data(), static_cast<std::int64_t>(list.size())};
}

// All tasks of a forward, with their lists, one after the other.
ForwardOutputs forward(const CaseData& data, const HostTensor& k, const HostTensor& v, Listing listing) {
  ForwardOutputs out{data.new_o(), data.new_lse()};
  const AttentionProblem p = checked_forward_problem(Check("attention_forward"), data.q.view(), k.view(), v.view(),
                                                     out.o.view(), out.lse.view(), data.options());
  const cpu::Kernels& kernels = cpu::kernels();
  WorkspaceBuffer buffer;
  auto* scratch = static_cast<std::byte*>(buffer.get(kernels.forward_scratch(p, p.Sq * p.G)).data);
  for (std::int64_t b = 0; b < p.B; ++b) {
    const Sequence s = p.sequence(b);
    const List list = listed(listing, s.sk, kernels.key_tile(p, s));
    const std::int64_t heads = kernels.heads_together(p, s), rows = s.q_rows * p.G;
    const std::int64_t tile = cpu::splits_keys(p, s) ? cpu::kSplitRows : cpu::tile_rows(p);
    for (std::int64_t head = 0; head < p.Hkv; head += heads) {
      for (std::int64_t row = 0; row < rows; row += tile) {
        kernels.forward(p,
                        {.b = b,
                         .kv_head = head,
                         .kv_heads = std::min(heads, p.Hkv - head),
                         .row_begin = row,
                         .row_end = std::min(row + tile, rows),
                         .key_end = s.sk,
                         .tiles = view(listing, list)},
                        scratch);
      }
    }
  }
  return out;
}

struct Sums {
  HostTensor dq;
  std::vector<std::vector<float>> dk, dv;  // of each sequence's kv heads, [key][gradient_width]
};

// All tasks of a backward, one for each kv head.
Sums backward(const CaseData& data, const HostTensor& k, const HostTensor& v, const ForwardOutputs& after,
              Listing listing) {
  const Gradients gradients{.dq = data.new_gradients().dq, .dk = {}, .dv = {}, .dbias = {}, .dsink = {}};
  const AttentionBackwardProblem p =
      checked_backward_problem(Check("attention_backward"), data.q.view(), k.view(), v.view(), after.o.view(),
                               after.lse.view(), data.d_o.view(), data.d_lse.view(), gradients.views(), data.options());
  const cpu::Kernels& kernels = cpu::kernels();
  WorkspaceBuffer buffer;
  auto* scratch = static_cast<std::byte*>(buffer.get(kernels.backward_scratch(p)).data);
  Sums sums;
  const std::int64_t keys = cpu::round_up(p.Sk, cpu::kKeyBlock);
  for (std::int64_t b = 0; b < p.B; ++b) {
    const Sequence s = p.sequence(b);
    const List list = listed(listing, s.sk, cpu::kKeyBlock);
    for (std::int64_t head = 0; head < p.Hkv; ++head) {
      auto& dk = sums.dk.emplace_back(static_cast<std::size_t>(keys * kernels.gradient_width(p.D)));
      auto& dv = sums.dv.emplace_back(static_cast<std::size_t>(keys * kernels.gradient_width(p.Dv)));
      kernels.backward(p, {.b = b, .kv_head = head, .dk = dk.data(), .dv = dv.data(), .tiles = view(listing, list)},
                       scratch);
      dk.resize(static_cast<std::size_t>(s.sk * kernels.gradient_width(p.D)));
      dv.resize(static_cast<std::size_t>(s.sk * kernels.gradient_width(p.Dv)));
    }
  }
  sums.dq = gradients.dq;
  return sums;
}

class TileLists : public ::testing::TestWithParam<const char*> {};

TEST_P(TileLists, AllTilesAreAsGoodAsNoList) {
  const CaseData data(attention_case(GetParam()));
  on_each_target([&] {
    const ForwardOutputs plain = forward(data, data.k, data.v, nullptr);
    const ForwardOutputs given = forward(data, data.k, data.v, all_tiles);
    EXPECT_TRUE(plain.o.same_bits(given.o)) << "o";
    EXPECT_TRUE(plain.lse.same_bits(given.lse)) << "lse";
    if (!data.spec.has_backward()) return;
    const Sums expected = backward(data, data.k, data.v, plain, nullptr);
    const Sums sums = backward(data, data.k, data.v, plain, all_tiles);
    EXPECT_TRUE(expected.dq.same_bits(sums.dq)) << "dq";
    EXPECT_EQ(expected.dk, sums.dk);
    EXPECT_EQ(expected.dv, sums.dv);
  });
}

INSTANTIATE_TEST_SUITE_P(Cases, TileLists,
                         ::testing::Values("round_s256_d64_causal_f16", "odd_q129_k257_d33_dv33_bf16",
                                           "feature_packed_all_f32", "feature_used_both_causal_f32",
                                           "feature_paged_64_f16", "feature_dropout_causal_odd_f32",
                                           "decode_1_4096_f32", "decode_gqa8_d128_f32", "decode_rows_3_batch_f32",
                                           "decode_window_bf16"));

// The same tiles of keys, one after the other, and nothing else.
HostTensor gathered(const HostTensor& x, const List& list, std::int64_t size) {
  const TensorView& from = x.view();
  const std::int64_t rows = static_cast<std::int64_t>(list.size()) * size, row = from.shape[2] * from.shape[3];
  HostTensor out = HostTensor::input(from.dtype, {1, rows, from.shape[2], from.shape[3]});
  for (std::int64_t i = 0; i < rows * row; ++i) {
    const std::int64_t key = i / row;
    out.set(i, x.get((list[static_cast<std::size_t>(key / size)] * size + key % size) * row + i % row));
  }
  return out;
}

std::vector<float> gathered(const std::vector<float>& sums, const List& list, std::int64_t width) {
  std::vector<float> out;
  for (const std::int32_t tile : list) {
    const auto* at = sums.data() + tile * cpu::kKeyBlock * width;
    out.insert(out.end(), at, at + cpu::kKeyBlock * width);
  }
  return out;
}

TEST(TileList, OthersAreNotThere) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const CaseData data({.name = "listed", .dtype = dtype, .H = 6, .Hkv = 2, .Sq = 70, .Sk = 1536, .D = 40, .Dv = 24});
    on_each_target([&] {
      const List list = some_tiles(12);
      ASSERT_EQ(list, (List{1, 2, 4, 7, 11}));
      const HostTensor k = gathered(data.k, list, cpu::kKeyBlock), v = gathered(data.v, list, cpu::kKeyBlock);
      const ForwardOutputs expected = forward(data, k, v, nullptr), out = forward(data, data.k, data.v, some_tiles);
      EXPECT_TRUE(expected.o.same_bits(out.o)) << "o";
      EXPECT_TRUE(expected.lse.same_bits(out.lse)) << "lse";
      EXPECT_FALSE(out.o.same_bits(forward(data, data.k, data.v, nullptr).o));
      const Sums expected_sums = backward(data, k, v, out, nullptr);
      const Sums sums = backward(data, data.k, data.v, out, some_tiles);
      EXPECT_TRUE(expected_sums.dq.same_bits(sums.dq)) << "dq";
      for (std::size_t head = 0; head < sums.dk.size(); ++head) {
        EXPECT_EQ(expected_sums.dk[head], gathered(sums.dk[head], list, cpu::kernels().gradient_width(40)));
        EXPECT_EQ(expected_sums.dv[head], gathered(sums.dv[head], list, cpu::kernels().gradient_width(24)));
      }
    });
  }
}

TEST(TileList, OthersAreNotThereForFewRows) {
  // Keys of one chunk, whose partial result is all.
  const CaseData data({.name = "listed", .H = 3, .Hkv = 3, .Sq = 1, .Sk = 512, .D = 40, .Dv = 24});
  on_each_target([&] {
    const AttentionProblem p = data.problem();
    const std::int64_t size = cpu::kernels().key_tile(p, p.sequence(0));
    const List list = some_tiles(512 / size);
    const HostTensor k = gathered(data.k, list, size), v = gathered(data.v, list, size);
    const ForwardOutputs expected = forward(data, k, v, nullptr), out = forward(data, data.k, data.v, some_tiles);
    EXPECT_TRUE(expected.o.same_bits(out.o)) << "o";
    EXPECT_TRUE(expected.lse.same_bits(out.lse)) << "lse";
  });
}

}  // namespace
}  // namespace heddle::kit
