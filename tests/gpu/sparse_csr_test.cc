// Lists one behind the other on the GPU: what lists of one length give, to the bit where both go the same way, whatever
// the offsets say.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gpu/sparse_calls.h"
#include "kit/sparse_case.h"

namespace heddle::kit {
namespace {

struct DeviceCsr {
  explicit DeviceCsr(const CsrLists& lists) : blocks(lists.blocks), offsets(lists.offsets), views(lists.views) {
    views.blocks = blocks.view();
    views.offsets = offsets.view();
  }
  const DeviceTensor blocks, offsets;
  BlockLists views;
};

// Which way a candidate goes: how its plan begins.
std::string way_of(const Candidate& candidate) { return candidate.plan.substr(0, candidate.plan.find(' ', 3)); }

// A case on the GPU.
class CsrRunner {
 public:
  explicit CsrRunner(const AttentionCase& spec)
      : there_(spec, 1, Device::cuda), o_(data().new_o()), lse_(data().new_lse()), call_{there_.inputs().q,
                                                                                         there_.inputs().k,
                                                                                         there_.inputs().v,
                                                                                         o_.view(),
                                                                                         lse_.view(),
                                                                                         {},
                                                                                         there_.inputs().options} {
    call_.options.mask = {};
  }

  const CaseRunner& there() const { return there_; }
  const CaseData& data() const { return there_.data(); }
  std::vector<Candidate> explain(const BlockLists& lists) {
    call_.lists = lists;
    call_.options.force = "";
    return call_.explain();
  }
  ForwardOutputs run(const BlockLists& lists, const std::string& candidate, bool batch_invariant) {
    ForwardOutputs out{data().new_o(), data().new_lse()};
    o_.write(out.o);
    lse_.write(out.lse);
    call_.lists = lists;
    call_.options.force = candidate;
    call_.options.batch_invariant = batch_invariant;
    call_.run();
    o_.read(out.o);
    lse_.read(out.lse);
    return out;
  }

 private:
  const CaseRunner there_;
  DeviceTensor o_, lse_;
  SparseCall call_;
};

class GpuSparseCsr : public ::testing::TestWithParam<SparseCase> {};

TEST_P(GpuSparseCsr, GivesWhatListsOfOneLengthGive) {
  SparseRunner host(GetParam());
  if (host.lists.masks.given()) GTEST_SKIP() << "GPUs have no masks of blocks";
  CsrRunner runner(GetParam().call);
  const DeviceTensor blocks(host.lists.blocks), counts(host.lists.counts);
  BlockLists padded = host.lists.views;
  padded.blocks = blocks.view();
  padded.counts = counts.view();
  const CsrLists on_host(host.lists);
  const DeviceCsr csr(on_host);
  const std::vector<Candidate> of_padded = runner.explain(padded), of_csr = runner.explain(csr.views);
  ASSERT_EQ(of_padded.size(), of_csr.size());
  for (std::size_t n = 0; n < of_csr.size(); ++n) {
    const Candidate& candidate = of_csr[n];
    SCOPED_TRACE(candidate.name + ": " + candidate.plan + candidate.reason);
    ASSERT_EQ(candidate.name, of_padded[n].name);
    // Hopper's dense kernels take lists of one length alone.
    if (candidate.name != "sm90_tiles") {
      EXPECT_EQ(candidate.supported, of_padded[n].supported);
    }
    if (!candidate.supported || !of_padded[n].supported) continue;
    for (const bool batch_invariant : {false, true}) {
      const ForwardOutputs out = runner.run(csr.views, candidate.name, batch_invariant);
      const CaseResult result = host.judge(out, candidate.name);
      EXPECT_TRUE(result.passed) << result.message();
      for (int round = 0; round < 2; ++round) {
        EXPECT_TRUE(same_bits(out, runner.run(csr.views, candidate.name, batch_invariant))) << "round " << round;
      }
      // In how many parts a list's keys are shared out follows from the mean length.
      if (!batch_invariant || way_of(candidate) != way_of(of_padded[n])) continue;
      const ForwardOutputs expected = runner.run(padded, candidate.name, true);
      EXPECT_TRUE(same_bits(expected, out))
          << differences(expected.o, out.o) << " of o, " << differences(expected.lse, out.lse) << " of lse";
    }
  }
}

TEST_P(GpuSparseCsr, GivesTheGradientsOfListsOfOneLength) {
  if (!GetParam().call.has_backward()) GTEST_SKIP() << "attention has none";
  SparseRunner host(GetParam());
  const CsrRunner runner(GetParam().call);
  const ForwardOutputs& after = host.rounded_forward();
  const DeviceTensor o(after.o), lse(after.lse);
  SparseGradientCall call(runner.there(), host.lists, o.view(), lse.view(), host.data.new_gradients());
  const BlockLists padded = call.lists;
  const CsrLists on_host(host.lists);
  const DeviceCsr csr(on_host);
  for (const Candidate& candidate : call.explain()) {
    SCOPED_TRACE(candidate.name + ": " + candidate.plan + candidate.reason);
    call.options.force = candidate.name;
    if (!candidate.supported || candidate.name == "sm90_tiles") continue;
    call.lists = padded;
    const Gradients expected = call.run(0xFF);
    call.lists = csr.views;
    BackwardOutputs out;
    for (const int fill : {0xFF, 0x00, 0xFF}) {
      out.gradients = call.run(fill);
      // All of the case is one round, and so items are the same.
      EXPECT_TRUE(same_bits(expected, out.gradients))
          << differences(expected.dq, out.gradients.dq) << " of dq, " << differences(expected.dk, out.gradients.dk)
          << " of dk, " << differences(expected.dv, out.gradients.dv) << " of dv";
    }
    const CaseResult result = host.judge(out, candidate.name);
    EXPECT_TRUE(result.passed) << result.message();
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, GpuSparseCsr, ::testing::ValuesIn(sparse_cases()),
                         [](const auto& info) { return std::string(info.param.name); });

// Offsets and entries of a kind, and lists of one length that say the same: of each list the blocks that there are, in
// the order in which it first names them.
struct WildLists {
  HostTensor blocks, offsets, padded;

  enum class Kind : std::uint8_t { random, one_long, all_the_same, falling };

  WildLists(Kind kind, std::int64_t batch, std::int64_t units, std::int64_t lists, std::int64_t there,
            std::int64_t entries, unsigned seed) {
    std::mt19937 random(seed);
    const auto below = [&](std::int64_t end) {
      return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(end));
    };
    blocks = HostTensor::input(DType::i32, {entries});
    for (std::int64_t n = 0; n < entries; ++n) {
      constexpr double kWild[] = {-2147483648.0, -1, 2147483647.0, 1e9};
      blocks.set(n, below(9) == 0 ? kWild[below(4)] : static_cast<double>(below(there + 1)));
    }
    offsets = HostTensor::input(DType::i32, {batch, units, lists + 1});
    for (std::int64_t n = 0; n < offsets.elements(); ++n) {
      const std::int64_t list = n % (lists + 1);
      double at = 0;
      switch (kind) {
        case Kind::random:
          at = below(10) == 0 ? (below(2) == 0 ? -2147483648.0 : 2147483647.0)
                              : static_cast<double>(below(entries + 40) - 20);
          break;
        case Kind::one_long:
          at = list > lists / 2 ? static_cast<double>(entries) : 0;
          break;
        case Kind::all_the_same:  // every second one has all entries
          at = list % 2 == 0 ? -7 : static_cast<double>(entries) + 9;
          break;
        case Kind::falling:
          at = static_cast<double>(entries - list);
          break;
      }
      offsets.set(n, at);
    }
    padded = HostTensor::input(DType::i32, {batch, lists, units, there});
    for (std::int64_t n = 0; n < padded.elements(); ++n) padded.set(n, -1);
    for (std::int64_t b = 0; b < batch; ++b) {
      for (std::int64_t unit = 0; unit < units; ++unit) {
        for (std::int64_t list = 0; list < lists; ++list) {
          const std::int64_t at = (b * units + unit) * (lists + 1) + list;
          const auto clamped_to = [&](std::int64_t low, double x) {
            return static_cast<std::int64_t>(std::clamp(x, static_cast<double>(low), static_cast<double>(entries)));
          };
          const std::int64_t begin = clamped_to(0, offsets.get(at)), end = clamped_to(begin, offsets.get(at + 1));
          std::vector<bool> named(static_cast<std::size_t>(there));
          std::int64_t slot = ((b * lists + list) * units + unit) * there;
          for (std::int64_t n = begin; n < end; ++n) {
            const double block = blocks.get(n);
            if (block < 0 || block >= static_cast<double>(there)) continue;
            if (named[static_cast<std::size_t>(block)]) continue;
            named[static_cast<std::size_t>(block)] = true;
            padded.set(slot++, block);
          }
        }
      }
    }
  }
};

struct WildCase {
  const char* name;
  WildLists::Kind kind;
  std::int64_t query_rows, units, entries;
};

class GpuSparseOffsets : public ::testing::TestWithParam<WildCase> {};

// By keys, and where query_rows is 8, by rows, of more blocks than a block of threads has at a time.
TEST_P(GpuSparseOffsets, MayBeAnything) {
  const WildCase& wild = GetParam();
  constexpr std::int64_t kBatch = 2, kRows = 70, kKeys = 9700, kBlock = 16, kBlocks = (kKeys + kBlock - 1) / kBlock;
  AttentionCase spec = sparse_call(DType::bf16, kBatch, 8, 2, kRows, kKeys, 64,
                                   [](auto& c) { c.causal = Causal::bottom_right, c.sink = true; });
  spec.mask = {};
  CsrRunner runner(spec);
  const WildLists lists(wild.kind, kBatch, wild.units, (kRows + wild.query_rows - 1) / wild.query_rows, kBlocks,
                        wild.entries, 3);
  const DeviceTensor blocks(lists.blocks), offsets(lists.offsets), tame_blocks(lists.padded);
  const BlockLists csr{.blocks = blocks.view(),
                       .counts = {},
                       .offsets = offsets.view(),
                       .block_size = kBlock,
                       .query_rows = wild.query_rows};
  BlockLists tame = csr;
  tame.blocks = tame_blocks.view();
  tame.offsets = {};
  int served = 0;
  for (const Candidate& candidate : runner.explain(csr)) {
    if (!candidate.supported) continue;
    SCOPED_TRACE(candidate.name + ": " + candidate.plan);
    ++served;
    EXPECT_EQ(way_of(candidate), wild.query_rows == 8 ? "by rows:" : "by blocks");
    const ForwardOutputs expected = runner.run(tame, candidate.name, true), out = runner.run(csr, candidate.name, true);
    EXPECT_TRUE(same_bits(expected, out))
        << differences(expected.o, out.o) << " of o, " << differences(expected.lse, out.lse) << " of lse";
  }
  EXPECT_GT(served, 0);

  const ForwardOutputs after = runner.run(tame, "sm80", true);
  const DeviceTensor o(after.o), lse(after.lse);
  const CaseLists any(runner.data(), {.block_size = kBlock, .query_rows = wild.query_rows});
  SparseGradientCall call(runner.there(), any, o.view(), lse.view(), runner.data().new_gradients());
  call.options.force = "sm80";
  call.lists = tame;
  const Gradients expected = call.run(0xFF);
  call.lists = csr;
  for (const int fill : {0xFF, 0x00}) {
    const Gradients found = call.run(fill);
    EXPECT_TRUE(same_bits(expected, found))
        << differences(expected.dq, found.dq) << " of dq, " << differences(expected.dk, found.dk) << " of dk, "
        << differences(expected.dv, found.dv) << " of dv";
  }
}

using enum WildLists::Kind;
INSTANTIATE_TEST_SUITE_P(
    GpuSparse, GpuSparseOffsets,
    ::testing::Values(WildCase{"random", random, 1, 2, 900}, WildCase{"random_of_each_head", random, 1, 8, 300},
                      WildCase{"random_by_rows", random, 8, 2, 1500}, WildCase{"one_long", one_long, 1, 1, 5000},
                      WildCase{"one_long_by_rows", one_long, 8, 2, 5000},
                      WildCase{"all_the_same", all_the_same, 1, 2, 800},
                      WildCase{"all_the_same_by_rows", all_the_same, 8, 1, 2500},
                      WildCase{"falling", falling, 1, 2, 400}, WildCase{"without_entries", one_long, 1, 2, 0},
                      WildCase{"without_entries_by_rows", one_long, 8, 2, 0}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace heddle::kit
