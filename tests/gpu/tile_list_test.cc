// GPU kernels that walk a list of key tiles: all tiles in the list give the bits of the candidate that walks the band,
// and some of them the bits of a call that has no other keys, or what the reference gives with the others masked.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "gpu/tile_list_kernels.h"
#include "heddle/runtime.h"
#include "kernels/within_rule.h"
#include "kit/case_data.h"
#include "kit/case_rows.h"
#include "kit/cases.h"
#include "kit/device_mirror.h"
#include "kit/yardstick.h"
#include "ops/attention/arguments.h"

namespace heddle::kit {
namespace {

using List = std::vector<std::int32_t>;
// The list of a tile of rows, by its number in its sequence, among so many tiles of keys.
using Listing = List (*)(std::int64_t tiles, std::int64_t of_rows);

List all_tiles(std::int64_t tiles, std::int64_t /*of_rows*/) {
  List list(static_cast<std::size_t>(tiles));
  std::iota(list.begin(), list.end(), 0);
  return list;
}

// 1, 2, 4, 7, 11, ...
List some_tiles(std::int64_t tiles, std::int64_t /*of_rows*/) {
  List list;
  for (std::int32_t tile = 1, step = 1; tile < tiles; tile += step++) list.push_back(tile);
  return list;
}

// Every other tile, none, and the others.
List alternate_tiles(std::int64_t tiles, std::int64_t of_rows) {
  List list;
  if (of_rows % 3 == 1) return list;
  for (std::int32_t tile = of_rows % 3 == 0 ? 0 : 1; tile < tiles; tile += 2) list.push_back(tile);
  return list;
}

std::int64_t ceil_div(std::int64_t x, std::int64_t y) { return (x + y - 1) / y; }

struct Outputs {
  HostTensor o, lse;
};

// The call's tensors on the GPU.
struct Mirror {
  explicit Mirror(const CaseData& given, const HostTensor& k_rows, const HostTensor& v_rows)
      : data(given),
        q(data.q),
        k(k_rows),
        v(v_rows),
        bias(data.bias),
        mask(data.mask),
        alibi(data.alibi),
        sink(data.sink),
        cu_seqlens_q(data.cu_seqlens_q),
        cu_seqlens_k(data.cu_seqlens_k),
        q_scale(data.q_scale),
        k_scale(data.k_scale),
        v_scale(data.v_scale) {}

  AttentionOptions options() const {
    AttentionOptions options = data.options();
    const std::pair<TensorView*, const DeviceTensor*> there[] = {{&options.bias, &bias},
                                                                 {&options.mask, &mask},
                                                                 {&options.alibi_slopes, &alibi},
                                                                 {&options.sink, &sink},
                                                                 {&options.cu_seqlens_q, &cu_seqlens_q},
                                                                 {&options.cu_seqlens_k, &cu_seqlens_k},
                                                                 {&options.q_scale, &q_scale},
                                                                 {&options.k_scale, &k_scale},
                                                                 {&options.v_scale, &v_scale}};
    for (const auto& [view, tensor] : there) *view = tensor->view();
    if (data.cu_seqlens_q.given()) {
      options.max_seqlen_q = data.spec.Sq;
      options.max_seqlen_k = data.spec.Sk;
    }
    return options;
  }

  const CaseData& data;
  DeviceTensor q, k, v, bias, mask, alibi, sink, cu_seqlens_q, cu_seqlens_k, q_scale, k_scale, v_scale;
};

// call(o, lse, stream)
template <class Call>
Outputs outputs_of(const CaseData& data, const Call& call) {
  Outputs out{data.new_o(), data.new_lse()};
  const DeviceTensor o(out.o), lse(out.lse);
  const DeviceStream stream;
  call(o.view(), lse.view(), stream);
  stream.synchronize();
  o.read(out.o);
  lse.read(out.lse);
  return out;
}

Outputs by_candidate(const Mirror& m, const ListedForward& kernel) {
  return outputs_of(m.data, [&](const TensorView& o, const TensorView& lse, const DeviceStream& stream) {
    AttentionOptions options = m.options();
    options.force = kernel.candidate;
    const DeviceMemory scratch(attention_forward_workspace(m.q.view(), m.k.view(), m.v.view(), options), 0xFF);
    Runtime runtime;
    runtime.stream = stream.get();
    runtime.workspace = {scratch.data(), scratch.bytes()};
    attention_forward(m.q.view(), m.k.view(), m.v.view(), o, lse, options, runtime);
    stream.synchronize();
  });
}

Outputs by_list(const Mirror& m, const ListedForward& kernel, Listing listing) {
  return outputs_of(m.data, [&](const TensorView& o, const TensorView& lse, const DeviceStream& stream) {
    const AttentionProblem p =
        checked_forward_problem(Check("attention_forward"), m.q.view(), m.k.view(), m.v.view(), o, lse, m.options());
    const std::int64_t k_tiles = ceil_div(p.Sk, kernel.tile_k), q_tiles = ceil_div(p.Sq, kernel.tile_q);
    List tiles, counts;
    for (std::int64_t n = 0; n < p.B * p.H * q_tiles; ++n) {
      List list = listing(k_tiles, n % q_tiles);
      counts.push_back(static_cast<std::int32_t>(list.size()));
      list.resize(static_cast<std::size_t>(k_tiles), std::numeric_limits<std::int32_t>::max());  // nobody reads these
      tiles.insert(tiles.end(), list.begin(), list.end());
    }
    const auto copied = [](const List& values) {
      DeviceMemory memory(values.size() * sizeof(std::int32_t));
      memory.write(0, reinterpret_cast<const std::byte*>(values.data()), memory.bytes());
      return memory;
    };
    const DeviceMemory tiles_there = copied(tiles), counts_there = copied(counts);
    kernel.launch(p, reinterpret_cast<const std::int32_t*>(tiles_there.data()),
                  reinterpret_cast<const std::int32_t*>(counts_there.data()), k_tiles, stream.get());
    stream.synchronize();
  });
}

void expect_same(const Outputs& expected, const Outputs& found) {
  EXPECT_TRUE(expected.o.same_bits(found.o)) << "o";
  EXPECT_TRUE(expected.lse.same_bits(found.lse)) << "lse";
}

class GpuTileLists : public ::testing::TestWithParam<const char*> {};

TEST_P(GpuTileLists, AllTilesAreAsGoodAsNoList) {
  const CaseData data(attention_case(GetParam()));
  const Mirror m(data, data.k, data.v);
  const bool options = data.bias.given() || data.mask.given() || data.alibi.given();
  const ListedForward& kernel = options ? kListedSm80Options : kListedSm80Plain;
  expect_same(by_candidate(m, kernel), by_list(m, kernel, all_tiles));
}

INSTANTIATE_TEST_SUITE_P(Cases, GpuTileLists,
                         ::testing::Values("round_s64_d64_bf16", "round_s256_d64_causal_bf16",
                                           "corner_bias_tiles_words_bf16", "corner_mask_bias_tiles_keys_bf16",
                                           "feature_packed_causal_bf16"));

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

TEST(GpuTileList, OthersAreNotThere) {
  const CaseData data(
      {.name = "listed", .dtype = DType::bf16, .H = 6, .Hkv = 2, .Sq = 300, .Sk = 1536, .D = 64, .Dv = 64});
  for (const ListedForward& kernel : {kListedSm80Plain, kListedSm80Options}) {
    SCOPED_TRACE(kernel.name);
    const List list = some_tiles(1536 / kernel.tile_k, 0);
    const HostTensor k = gathered(data.k, list, kernel.tile_k), v = gathered(data.v, list, kernel.tile_k);
    const Mirror all(data, data.k, data.v), few(data, k, v);
    const Outputs out = by_list(all, kernel, some_tiles);
    expect_same(by_list(few, kernel, all_tiles), out);
    EXPECT_FALSE(out.o.same_bits(by_list(all, kernel, all_tiles).o));
  }
}

// A case of a Hopper kernel, whose candidate runs this variant for it. Without groups of heads, which may share tiles
// of rows and then have other lists.
struct HopperCase {
  std::string variant;
  AttentionCase spec;
};

std::vector<HopperCase> hopper_cases() {
  std::vector<HopperCase> cases;
  const auto with = [&](const std::string& variant, std::int64_t d, DType dtype, const char* name, auto change) {
    AttentionCase c{.name = name, .dtype = dtype, .B = 1, .H = 3, .Hkv = 3, .Sq = 400, .Sk = 520, .D = d, .Dv = d};
    change(c);
    std::string full = (dtype == DType::bf16 ? "bf16_" : "e4m3_") + variant + "_" + c.name;
    std::ranges::replace(full, ' ', '_');
    c.name = full;
    cases.push_back({variant, c});
  };
  const auto plain = [](auto&) {};
  const auto causal = [](auto& c) { c.Sq = c.Sk = 520, c.causal = Causal::bottom_right; };
  const auto window = [](auto& c) { c.window_left = 70, c.window_right = 30, c.poison_keys = true; };
  const auto no_keys = [](auto& c) { c.Sk = 200, c.causal = Causal::bottom_right; };  // for the first rows
  const auto packed = [](auto& c) { c.B = 3, c.packed_q = c.packed_k = true, c.causal = Causal::bottom_right; };
  for (const std::int64_t d : {64, 128, 256}) {
    const std::string variant = "d" + std::to_string(d);
    with(variant, d, DType::bf16, "plain", plain);
    with(variant, d, DType::bf16, "causal", causal);
    with(variant, d, DType::bf16, "window", window);
    with(variant, d, DType::bf16, "no_keys", no_keys);
    with(variant, d, DType::bf16, "packed", packed);
    if (d == 256) continue;
    with(variant, d, DType::f8e4m3, "plain", plain);
    with(variant, d, DType::f8e4m3, "causal", causal);
    with(variant, d, DType::f8e4m3, "window", window);
    with(variant, d, DType::f8e4m3, "no_keys", no_keys);
    with(variant, d, DType::f8e4m3, "packed", packed);
    with(variant, d, DType::f8e4m3, "repeated", [](auto& c) { c.values = Values::large_logits; });
  }
  with("d128 tokens", 128, DType::f8e4m3, "causal", [&](auto& c) { causal(c), c.scaling = Scaling::rows; });
  with("d128 tokens", 128, DType::f8e4m3, "window", [&](auto& c) { window(c), c.scaling = Scaling::rows; });
  with("d64 keys", 64, DType::bf16, "alibi", [&](auto& c) { causal(c), c.alibi = Alibi::per_head; });
  // Not finite values in keys that a mask removes: tiles come again, careful.
  with("d64 keys", 64, DType::bf16, "repeated",
       [](auto& c) { c.bias = kColumns, c.bias_holes = c.poison_keys = true, c.mask = kBatchColumns; });
  with("d128 planes", 128, DType::bf16, "bias", [&](auto& c) { causal(c), c.bias = kFull; });
  with("d128 planes", 128, DType::bf16, "mask", [](auto& c) { c.Sk = 528, c.mask = kFull; });
  with("d128 planes", 128, DType::bf16, "repeated",
       [](auto& c) { c.Sk = 528, c.bias = kFull, c.mask = kBatchColumns, c.poison_keys = true; });
  with("d256 planes", 256, DType::bf16, "bias", [](auto& c) { c.bias = kFull; });
  with("d256 planes", 256, DType::bf16, "repeated", [](auto& c) { c.mask = kBatchColumns, c.poison_keys = true; });
  return cases;
}

class GpuTileListsOnHopper : public ::testing::TestWithParam<HopperCase> {
 protected:
  void SetUp() override {
    if (current_gpu().major != 9) GTEST_SKIP() << "the GPU is no Hopper";
  }

  static const ListedForward& kernel() {
    const char* candidate = GetParam().spec.dtype == DType::bf16 ? "sm90" : "sm90_fp8";
    return *std::ranges::find_if(listed_on_hopper(), [&](const ListedForward& x) {
      return x.candidate == std::string_view(candidate) && x.name == GetParam().variant;
    });
  }
};

TEST_P(GpuTileListsOnHopper, AllTilesAreAsGoodAsNoList) {
  const CaseData data(GetParam().spec);
  const Mirror m(data, data.k, data.v);
  for (const Candidate& c : explain_attention(m.q.view(), m.k.view(), m.v.view(), m.options())) {
    if (c.name != kernel().candidate) continue;
    ASSERT_TRUE(c.plan.starts_with(GetParam().variant + ":")) << c.plan;
  }
  expect_same(by_candidate(m, kernel()), by_list(m, kernel(), all_tiles));
}

// The case's mask, if it has one, without the pairs that are in no listed tile.
HostTensor listed_mask(const CaseData& data, const ListedForward& kernel, Listing listing) {
  const AttentionCase& c = data.spec;
  HostTensor mask = HostTensor::input(DType::boolean, {c.B, c.H, c.Sq, c.Sk});
  const auto open = [&](const std::array<std::int64_t, 4>& at) {
    if (!data.mask.given()) return true;
    std::int64_t natural = 0;
    for (std::size_t n = 0; n < 4; ++n) {
      const std::int64_t extent = data.mask.view().shape[n];
      natural = natural * extent + (extent == 1 ? 0 : at[n]);
    }
    return data.mask.get(natural) != 0;
  };
  std::int64_t natural = 0;
  for (std::int64_t bh = 0; bh < c.B * c.H; ++bh) {
    for (std::int64_t i = 0; i < c.Sq; ++i) {
      const List list = listing(ceil_div(c.Sk, kernel.tile_k), i / kernel.tile_q);
      for (std::int64_t j = 0; j < c.Sk; ++j) {
        const bool listed = std::ranges::binary_search(list, static_cast<std::int32_t>(j / kernel.tile_k));
        mask.set(natural++, listed && open({bh / c.H, bh % c.H, i, j}) ? 1 : 0);
      }
    }
  }
  return mask;
}

TEST_P(GpuTileListsOnHopper, OthersAreMasked) {
  const CaseData data(GetParam().spec);
  const Outputs out = by_list(Mirror(data, data.k, data.v), kernel(), alternate_tiles);
  const HostTensor mask = listed_mask(data, kernel(), alternate_tiles);
  AttentionOptions options = data.options();
  options.mask = mask.view();
  const HostTensor o = data.new_o(), lse = data.new_lse();
  const AttentionProblem p = checked_forward_problem(Check("attention_forward"), data.q.view(), data.k.view(),
                                                     data.v.view(), o.view(), lse.view(), options);
  const reference::Forward exact = reference::attention_forward(p, default_executor());
  const PlainForward plain = plain_forward(p);
  const double factor = allowed_factor(p, exact);
  expect_within_rule({"o", &out.o, &exact.o, &plain.o, factor});
  expect_within_rule({"lse", &out.lse, &exact.lse, &plain.lse, factor});
  // Rows that meet no key, by an empty list or by the band, are exactly 0. lse: [B, H, Sq], packed [H, total].
  const std::vector<double> found_o = out.o.values(), found_lse = out.lse.values();
  const std::int64_t H = data.spec.H, Dv = data.spec.Dv;
  const std::int64_t batches = data.spec.packed_q ? 1 : data.spec.B;
  const std::int64_t rows = static_cast<std::int64_t>(found_lse.size()) / (batches * H);
  std::int64_t empty = 0;
  for (std::int64_t n = 0; n < batches * H * rows; ++n) {
    if (found_lse[static_cast<std::size_t>(n)] != -std::numeric_limits<double>::infinity()) continue;
    const std::int64_t b = n / (H * rows), h = n / rows % H, i = n % rows;
    const auto row = found_o.begin() + ((b * rows + i) * H + h) * Dv;
    EXPECT_TRUE(std::all_of(row, row + Dv, [](double x) { return x == 0; })) << "row " << i << " of head " << h;
    ++empty;
  }
  EXPECT_GT(empty, 0);
}

INSTANTIATE_TEST_SUITE_P(Cases, GpuTileListsOnHopper, ::testing::ValuesIn(hopper_cases()),
                         [](const auto& info) { return info.param.spec.name; });

}  // namespace
}  // namespace heddle::kit
