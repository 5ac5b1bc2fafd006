// Backward kernels of GPUs that walk a list of query tiles: all tiles in the lists give the bits of the candidate that
// walks the band, and some of them what the reference says where the others are masked.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "gpu/device_backward.h"
#include "gpu/tile_list_kernels_bwd.h"
#include "kernels/within_rule.h"
#include "kit/yardstick.h"
#include "ops/attention/arguments.h"

namespace heddle::kit {
namespace {

// Whether the list of a tile of keys has a tile of query rows.
using Listing = bool (*)(std::int64_t b, std::int64_t kv_head, std::int64_t k_tile, std::int64_t q_tile);

bool all_tiles(std::int64_t, std::int64_t, std::int64_t, std::int64_t) { return true; }

// About half of them, and of some tiles of keys none.
bool some_tiles(std::int64_t b, std::int64_t kv_head, std::int64_t k_tile, std::int64_t q_tile) {
  return (b + kv_head + k_tile) % 4 != 1 && (3 * q_tile + 5 * k_tile + kv_head + 2 * b) % 7 < 4;
}

std::int64_t ceil_div(std::int64_t x, std::int64_t y) { return (x + y - 1) / y; }

struct Lists {
  std::vector<std::int32_t> tiles, counts;
  std::int64_t length;

  Lists(const AttentionProblem& p, const ListedBackward& kernel, Listing listing)
      : length(ceil_div(p.Sq, kernel.tile_q)) {
    for (std::int64_t b = 0; b < p.B; ++b) {
      for (std::int64_t head = 0; head < p.Hkv; ++head) {
        for (std::int64_t k_tile = 0; k_tile < ceil_div(p.Sk, kernel.tile_k); ++k_tile) {
          const std::size_t first = tiles.size();
          for (std::int32_t q_tile = 0; q_tile < length; ++q_tile) {
            if (listing(b, head, k_tile, q_tile)) tiles.push_back(q_tile);
          }
          counts.push_back(static_cast<std::int32_t>(tiles.size() - first));
          tiles.resize(first + static_cast<std::size_t>(length), -1);
        }
      }
    }
  }
};

DeviceMemory copied(const std::vector<std::int32_t>& values) {
  DeviceMemory memory(values.size() * sizeof(std::int32_t));
  memory.write(0, reinterpret_cast<const std::byte*>(values.data()), memory.bytes());
  return memory;
}

// The gradients of a call whose o and lse are given.
Gradients by_list(const CaseRunner::Inputs& in, const HostTensor& o, const HostTensor& lse, Gradients out,
                  const ListedBackward& kernel, Listing listing) {
  const DeviceTensor o_there(o), lse_there(lse), dq(out.dq), dk(out.dk), dv(out.dv);
  const AttentionBackwardProblem p =
      checked_backward_problem(Check("attention_backward"), in.q, in.k, in.v, o_there.view(), lse_there.view(), in.d_o,
                               in.d_lse, {dq.view(), dk.view(), dv.view(), {}, {}}, in.options);
  const Lists lists(p, kernel, listing);
  const DeviceMemory tiles = copied(lists.tiles), counts = copied(lists.counts), scratch(kernel.workspace(p), 0xFF);
  const DeviceStream stream;
  Runtime runtime;
  runtime.stream = stream.get();
  runtime.workspace = {scratch.data(), scratch.bytes()};
  kernel.launch(p, reinterpret_cast<const std::int32_t*>(tiles.data()),
                reinterpret_cast<const std::int32_t*>(counts.data()), lists.length, runtime);
  stream.synchronize();
  dq.read(out.dq);
  dk.read(out.dk);
  dv.read(out.dv);
  return out;
}

// Those that this GPU runs: of a candidate that takes the case.
bool runs(const CaseRunner& runner, const ListedBackward& kernel) {
  return std::ranges::count(runner.candidates(Pass::backward), kernel.candidate) > 0;
}

const ListedBackward* const kPlain[] = {&kListedBackwardSm80Plain, &kListedBackwardSm90Plain};
const ListedBackward* const kWithOptions[] = {&kListedBackwardSm80Options, &kListedBackwardSm90Planes};

class GpuTileListsBackward : public ::testing::TestWithParam<const char*> {};

// Deterministic, so that dq's sums have one order.
TEST_P(GpuTileListsBackward, AllTilesAreAsGoodAsNoList) {
  AttentionCase spec = attention_case(GetParam());
  spec.forward_only = false;  // those whose backward would take the CPU's tests too long
  CaseRunner runner(spec, 1, Device::cuda);
  runner.options().deterministic = true;
  const CaseData& data = runner.data();
  const ForwardOutputs forward = runner.run_forward("");
  int judged = 0;
  for (const ListedBackward* kernel : data.bias.given() || data.mask.given() ? kWithOptions : kPlain) {
    SCOPED_TRACE(kernel->candidate);
    if (!runs(runner, *kernel)) continue;
    ++judged;
    const Gradients expected =
        runner.run_backward_after(forward.o, forward.lse, kernel->candidate, nullptr, 0xFF, {.dbias = false}).gradients;
    const Gradients found = by_list(runner.inputs(), forward.o, forward.lse, data.new_gradients(), *kernel, all_tiles);
    EXPECT_TRUE(expected.dq.same_bits(found.dq)) << "dq";
    EXPECT_TRUE(expected.dk.same_bits(found.dk)) << "dk";
    EXPECT_TRUE(expected.dv.same_bits(found.dv)) << "dv";
  }
  EXPECT_GT(judged, 0);
}

INSTANTIATE_TEST_SUITE_P(Cases, GpuTileListsBackward,
                         ::testing::Values("round_s64_d64_bf16", "round_s256_d64_causal_bf16",
                                           "corner_bias_tiles_words_bf16", "corner_mask_bias_tiles_keys_bf16",
                                           "feature_packed_causal_bf16"));

// Pairs whose query tile is not in the list of their tile of keys are masked.
void write_mask(CaseData& data, const ListedBackward& kernel) {
  const AttentionCase& c = data.spec;
  std::int64_t n = 0;
  for (std::int64_t b = 0; b < c.B; ++b) {
    for (std::int64_t h = 0; h < c.H; ++h) {
      for (std::int64_t i = 0; i < c.Sq; ++i) {
        for (std::int64_t j = 0; j < c.Sk; ++j) {
          data.mask.set(n++, some_tiles(b, h / (c.H / c.Hkv), j / kernel.tile_k, i / kernel.tile_q) ? 1 : 0);
        }
      }
    }
  }
}

void fill(HostTensor& out, const std::vector<double>& values) {
  for (std::size_t n = 0; n < values.size(); ++n) out.set(static_cast<std::int64_t>(n), values[n]);
}

class GpuTileListBackward : public ::testing::TestWithParam<const ListedBackward*> {};

TEST_P(GpuTileListBackward, OthersAreNotThere) {
  const ListedBackward& kernel = *GetParam();
  for (const Causal causal : {Causal::none, Causal::bottom_right}) {
    const AttentionCase spec{.name = "listed",
                             .dtype = DType::bf16,
                             .B = 2,
                             .H = 4,
                             .Hkv = 2,
                             .Sq = 400,
                             .Sk = 500,
                             .D = 64,
                             .Dv = 64,
                             .causal = causal,
                             .mask = {.given = true, .batch = true, .heads = true, .rows = true, .columns = true}};
    CaseRunner runner(spec, 1, Device::cuda);
    if (!runs(runner, kernel)) GTEST_SKIP() << "this GPU does not run it";
    runner.options().mask = {};
    CaseData data(spec);
    write_mask(data, kernel);
    const reference::Forward forward = reference::attention_forward(data.problem(), default_executor());
    const Gradients outputs = data.new_gradients();
    const AttentionBackwardProblem p = data.backward_problem(outputs);
    const reference::Backward exact = reference::attention_backward(p, default_executor());
    const PlainBackward plain = plain_backward(p, forward);
    HostTensor o = data.new_o(), lse = data.new_lse();
    fill(o, forward.o);
    fill(lse, forward.lse);
    const Gradients found = by_list(runner.inputs(), o, lse, outputs, kernel, some_tiles);
    const double factor = allowed_factor(p, forward);
    expect_within_rule({"dq", &found.dq, &exact.dq, &plain.dq, factor});
    expect_within_rule({"dk", &found.dk, &exact.dk, &plain.dk, factor});
    expect_within_rule({"dv", &found.dv, &exact.dv, &plain.dv, factor});
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, GpuTileListBackward,
                         ::testing::Values(&kListedBackwardSm80Plain, &kListedBackwardSm80Options,
                                           &kListedBackwardSm90Plain, &kListedBackwardSm90Planes));

}  // namespace
}  // namespace heddle::kit
