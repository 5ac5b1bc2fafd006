// How far a value that is not finite may reach: docs/numerics.md, "Defined edge cases".
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "core/dtypes.h"
#include "heddle/attention.h"
#include "kernels/candidates.h"

namespace heddle::kit {
namespace {

constexpr std::int64_t kRows = 150, kHeads = 2, kDim = 24, kMostNeighbours = 48;

struct Tensors {
  DType dtype;
  std::vector<std::uint16_t> half[3];
  std::vector<float> full[3];

  explicit Tensors(DType type) : dtype(type) {
    for (int t = 0; t < 3; ++t) {
      half[t].resize(kRows * kHeads * kDim);
      full[t].resize(kRows * kHeads * kDim);
      for (std::int64_t n = 0; n < kRows * kHeads * kDim; ++n) {
        set(t, n, std::sin(static_cast<float>(n * (t + 3)) * 0.37f));
      }
    }
  }
  void set(int t, std::int64_t n, float value) {
    full[t][n] = value;
    store_element(half[t].data(), dtype == DType::f32 ? DType::f16 : dtype, n, value);
  }
  void poison(int t, std::int64_t row, float value) { set(t, (row * kHeads) * kDim + 5, value); }  // head 0
  TensorView view(int t) const {
    const void* data = dtype == DType::f32 ? static_cast<const void*>(full[t].data()) : half[t].data();
    return TensorView(data, dtype, {1, kRows, kHeads, kDim});
  }
};

// o of a causal call, widened: [row][head][dim].
std::vector<float> output(const Tensors& t, const std::string& candidate) {
  Tensors o(t.dtype);
  AttentionOptions options;
  options.causal = Causal::bottom_right;
  options.force = candidate;
  WorkspaceBuffer buffer;
  Runtime runtime;
  runtime.workspace = buffer.get(attention_forward_workspace(t.view(0), t.view(1), t.view(2), options));
  attention_forward(t.view(0), t.view(1), t.view(2), o.view(0), {}, options, runtime);
  std::vector<float> out(kRows * kHeads * kDim);
  for (std::size_t n = 0; n < out.size(); ++n) {
    out[n] = load_element(o.view(0).data, t.dtype, static_cast<std::int64_t>(n));
  }
  return out;
}

class NonFinite : public ::testing::TestWithParam<DType> {
 protected:
  // The same call with value `bad` at row `row` of head 0 of q, k or v (t: 0, 1, 2). Head 0 of rows [0, safe_before)
  // and (safe_after, end) and all of head 1 must keep their bits.
  void expect_contained(int t, float bad, std::int64_t row, std::int64_t safe_before, std::int64_t safe_after) {
    on_each_target([&] {
      for (const char* candidate : {"cpu", "cpu_baseline"}) {
        Tensors tensors(GetParam());
        const std::vector<float> clean = output(tensors, candidate);
        tensors.poison(t, row, bad);
        const std::vector<float> touched = output(tensors, candidate);
        for (std::int64_t i = 0; i < kRows; ++i) {
          for (std::int64_t h = 0; h < kHeads; ++h) {
            const std::int64_t at = (i * kHeads + h) * kDim;
            const bool same = std::memcmp(&clean[at], &touched[at], kDim * sizeof(float)) == 0;
            if (h == 1 || i < safe_before || i > safe_after) {
              ASSERT_TRUE(same) << candidate << ": row " << i << ", head " << h << " has changed";
            }
          }
        }
        bool shown = false;
        for (std::int64_t d = 0; d < kDim; ++d) shown |= !std::isfinite(touched[row * kHeads * kDim + d]);
        EXPECT_TRUE(shown) << candidate << ": the value has not reached its own row";
      }
    });
  }
};

TEST_P(NonFinite, QueryStaysInItsRow) { expect_contained(0, std::numeric_limits<float>::quiet_NaN(), 77, 77, 77); }

TEST_P(NonFinite, KeyReachesNoEarlierTile) {
  expect_contained(1, std::numeric_limits<float>::quiet_NaN(), 100, 100 - kMostNeighbours, kRows);
}

TEST_P(NonFinite, ValueReachesNoEarlierTile) {
  for (float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    expect_contained(2, bad, 100, 100 - kMostNeighbours, kRows);
  }
}

INSTANTIATE_TEST_SUITE_P(DTypes, NonFinite, ::testing::Values(DType::f32, DType::f16, DType::bf16),
                         [](const auto& info) { return std::string(name_of(info.param)); });

}  // namespace
}  // namespace heddle::kit
