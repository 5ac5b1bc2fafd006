// On a GPU whose model is known, the answers about that model are those of the GPU.
#include "heddle/explain.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <initializer_list>
#include <string>
#include <vector>

#include "cuda/backend.h"
#include "kit/device_mirror.h"

namespace heddle::kit {
namespace {

TensorView there(DType dtype, std::initializer_list<std::int64_t> shape) {
  TensorView x(nullptr, dtype, shape);
  x.device = Device::cuda;
  return x;
}

class GpuModelHere : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto known = gpu_models();
    const auto at =
        std::find_if(known.begin(), known.end(), [](const GpuModel& m) { return m.product == current_gpu().name; });
    if (at == known.end()) GTEST_SKIP() << current_gpu().name << " is not among the models that have names";
    model = &*at;
  }

  const GpuModel* model = nullptr;
};

// exact: the workspace too, which follows from what a driver alone knows where CTAs stand in clusters.
void expect_same(const std::vector<Candidate>& assumed, const std::vector<Candidate>& real, bool exact) {
  ASSERT_EQ(assumed.size(), real.size());
  for (std::size_t i = 0; i < real.size(); ++i) {
    EXPECT_EQ(assumed[i].name, real[i].name);
    EXPECT_EQ(assumed[i].reason, real[i].reason) << real[i].name;
    EXPECT_EQ(assumed[i].supported, real[i].supported) << real[i].name;
    EXPECT_EQ(assumed[i].chosen, real[i].chosen) << real[i].name;
    EXPECT_EQ(assumed[i].seconds, real[i].seconds) << real[i].name;
    if (exact) {
      EXPECT_EQ(assumed[i].workspace, real[i].workspace) << real[i].name;
    }
  }
}

TEST_F(GpuModelHere, IsWhatWasPublished) {
  const cuda::Gpus seen = cuda::gpus();
  const cuda::Gpu& here = seen.list.at(seen.current);
  EXPECT_EQ(here.major, model->major);
  EXPECT_EQ(here.minor, model->minor);
  EXPECT_EQ(here.multiprocessors, model->multiprocessors);
}

TEST_F(GpuModelHere, AnswersAsTheGpuItself) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    for (const std::int64_t D : {64, 100, 128, 256}) {
      for (const std::int64_t Sq : {1, 64, 4096}) {
        const TensorView q = there(dtype, {2, Sq, 16, D}), k = there(dtype, {2, 4096, 4, D});
        const AttentionOptions options;
        expect_same(explain_attention_on(*model, q, k, k, options), explain_attention(q, k, k, options), Sq > 16);
        expect_same(explain_attention_backward_on(*model, q, k, k, {}, options),
                    explain_attention_backward(q, k, k, {}, options), true);
      }
    }
  }
}

TEST_F(GpuModelHere, AnswersForLinearLayers) {
  for (const std::int64_t rows : {1, 4, 32, 256, 4096}) {
    PackedWeights weights = packed_storage(lowbit::format_named("nvfp4"), 4096, 4096, false, WeightOrder::fragments16);
    weights.device = weights.data.device = Device::cuda;
    const TensorView x = there(DType::bf16, {rows, 4096});
    const auto assumed = explain_linear_on(*model, x, weights), real = explain_linear(x, weights);
    ASSERT_EQ(assumed.size(), real.size());
    for (std::size_t i = 0; i < real.size(); ++i) {
      if (real[i].name.starts_with("cublaslt")) continue;  // which need not be found here
      EXPECT_EQ(assumed[i].supported, real[i].supported) << real[i].name;
      if (!real[i].name.starts_with("sm80")) continue;  // the others' tiles may be shared by clusters
      EXPECT_EQ(assumed[i].seconds, real[i].seconds) << real[i].name << ", " << rows << " rows";
      EXPECT_EQ(assumed[i].workspace, real[i].workspace) << real[i].name << ", " << rows << " rows";
    }
  }
}

}  // namespace
}  // namespace heddle::kit
