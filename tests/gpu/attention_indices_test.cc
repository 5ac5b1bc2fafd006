// Index data on a GPU is checked by nobody before the kernels read it: what names no page, row or length is clamped.
#include <gtest/gtest.h>

#include <algorithm>

#include "gpu/device_call.h"

namespace heddle::kit {
namespace {

// The tuned kernels for caches are not among them yet.
const std::vector<std::string> kClamping = {"baseline_cuda", "naive_cuda"};

// The same call with every third entry of an index tensor out of [low, high], and with that entry at the nearer end,
// gives the same bits and writes nothing beside its outputs.
void expect_clamped(DeviceCase& at, TensorView AttentionOptions::*option, const HostTensor& indices, double low,
                    double high) {
  HostTensor wild = indices, clamped = indices;
  for (std::int64_t n = 0; n < indices.elements(); n += 3) {
    wild.set(n, n % 2 == 0 ? high + 1 + 1e6 * static_cast<double>(n) : low - 1 - 1e6 * static_cast<double>(n));
    clamped.set(n, n % 2 == 0 ? high : low);
  }
  const DeviceTensor wild_there(wild), clamped_there(clamped);
  for (const std::string& candidate : kClamping) {
    DeviceCall call = at.call;
    call.options.force = candidate;
    call.options.*option = clamped_there.view();
    at.poison();
    call.run();
    const ForwardOutputs expected = at.read();
    call.options.*option = wild_there.view();
    at.poison();
    call.run();
    const ForwardOutputs out = at.read();
    EXPECT_TRUE(same_bits(expected, out)) << candidate;
    EXPECT_EQ(out.o.damage() + out.lse.damage(), "") << candidate;
  }
}

TEST(GpuIndices, Pages) {
  DeviceCase at(attention_case("feature_paged_64_f16"));
  const double pages = static_cast<double>(at.call.k.shape[0]);
  expect_clamped(at, &AttentionOptions::page_table, at.runner.data().page_table, 0, pages - 1);
}

TEST(GpuIndices, RowsOfTheCache) {
  DeviceCase at(attention_case("feature_cache_batch_idx_bf16"));
  const double rows = static_cast<double>(at.call.k.shape[0]);
  expect_clamped(at, &AttentionOptions::cache_batch_idx, at.runner.data().cache_batch_idx, 0, rows - 1);
}

TEST(GpuIndices, Lengths) {
  DeviceCase at(attention_case("feature_used_both_causal_bf16"));
  const double keys = static_cast<double>(at.call.k.shape[1]);
  expect_clamped(at, &AttentionOptions::seqused_k, at.runner.data().seqused_k, 0, keys);
}

}  // namespace
}  // namespace heddle::kit
