// GPU kernels that walk a list of key tiles: all tiles in the list give the bits of the candidate that walks the band,
// and some of them the bits of a call that has no other keys.
#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

#include "gpu/tile_list_kernels.h"
#include "kit/case_data.h"
#include "kit/cases.h"
#include "kit/device_mirror.h"
#include "ops/attention_arguments.h"

namespace heddle::kit {
namespace {

using List = std::vector<std::int32_t>;

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
        cu_seqlens_k(data.cu_seqlens_k) {}

  AttentionOptions options() const {
    AttentionOptions options = data.options();
    const std::pair<TensorView*, const DeviceTensor*> there[] = {{&options.bias, &bias},
                                                                 {&options.mask, &mask},
                                                                 {&options.alibi_slopes, &alibi},
                                                                 {&options.sink, &sink},
                                                                 {&options.cu_seqlens_q, &cu_seqlens_q},
                                                                 {&options.cu_seqlens_k, &cu_seqlens_k}};
    for (const auto& [view, tensor] : there) *view = tensor->view();
    if (data.cu_seqlens_q.given()) {
      options.max_seqlen_q = data.spec.Sq;
      options.max_seqlen_k = data.spec.Sk;
    }
    return options;
  }

  const CaseData& data;
  DeviceTensor q, k, v, bias, mask, alibi, sink, cu_seqlens_q, cu_seqlens_k;
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

Outputs by_candidate(const Mirror& m) {
  return outputs_of(m.data, [&](const TensorView& o, const TensorView& lse, const DeviceStream& stream) {
    AttentionOptions options = m.options();
    options.force = "sm80";
    Runtime runtime;
    runtime.stream = stream.get();
    attention_forward(m.q.view(), m.k.view(), m.v.view(), o, lse, options, runtime);
    stream.synchronize();
  });
}

// Every tile of rows has the same list.
Outputs by_list(const Mirror& m, const ListedForward& kernel, List (*listing)(std::int64_t)) {
  return outputs_of(m.data, [&](const TensorView& o, const TensorView& lse, const DeviceStream& stream) {
    const AttentionProblem p =
        checked_forward_problem(Check("attention_forward"), m.q.view(), m.k.view(), m.v.view(), o, lse, m.options());
    const List list = listing(ceil_div(p.Sk, kernel.tile_k));
    const auto lists = static_cast<std::size_t>(p.B * p.H * ceil_div(p.Sq, kernel.tile_q));
    List tiles, counts(lists, static_cast<std::int32_t>(list.size()));
    for (std::size_t n = 0; n < lists; ++n) tiles.insert(tiles.end(), list.begin(), list.end());
    const auto copied = [](const List& values) {
      DeviceMemory memory(values.size() * sizeof(std::int32_t));
      memory.write(0, reinterpret_cast<const std::byte*>(values.data()), memory.bytes());
      return memory;
    };
    const DeviceMemory tiles_there = copied(tiles), counts_there = copied(counts);
    kernel.launch(p, reinterpret_cast<const std::int32_t*>(tiles_there.data()),
                  reinterpret_cast<const std::int32_t*>(counts_there.data()), static_cast<std::int64_t>(list.size()),
                  stream.get());
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
  expect_same(by_candidate(m), by_list(m, options ? kListedSm80Options : kListedSm80Plain, all_tiles));
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
    const List list = some_tiles(1536 / kernel.tile_k);
    const HostTensor k = gathered(data.k, list, kernel.tile_k), v = gathered(data.v, list, kernel.tile_k);
    const Mirror all(data, data.k, data.v), few(data, k, v);
    const Outputs out = by_list(all, kernel, some_tiles);
    expect_same(by_list(few, kernel, all_tiles), out);
    EXPECT_FALSE(out.o.same_bits(by_list(all, kernel, all_tiles).o));
  }
}

}  // namespace
}  // namespace heddle::kit
