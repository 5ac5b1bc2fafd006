// Masks as the world makes them: an additive bias of the lowest finite number, of -1e9, or of any other as large, gives
// what doubles give, forward and backward. Nothing overflows, and a row in which every key has it is the mean that is
// left.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "core/check.h"
#include "kernels/candidates.h"
#include "kit/extreme_bias.h"

namespace heddle::kit {
namespace {

using namespace extreme_bias;

struct Results {
  HostTensor o, lse, dq, dk, dv, dbias;
};

void forward(const Call& call, const std::string& candidate, HostTensor& o, HostTensor& lse) {
  AttentionOptions options = call.options;
  options.force = candidate;
  o = HostTensor::output(call.q.view().dtype, {1, call.q.view().shape[1], 2, 24});
  lse = HostTensor::output(DType::f32, {1, 2, call.q.view().shape[1]});
  WorkspaceBuffer buffer;
  Runtime runtime;
  runtime.workspace = buffer.get(attention_forward_workspace(call.q.view(), call.k.view(), call.v.view(), options));
  attention_forward(call.q.view(), call.k.view(), call.v.view(), o.view(), lse.view(), options, runtime);
}

void backward(const Call& call, const std::string& candidate, Results& r) {
  AttentionOptions options = call.options;
  options.force = candidate;
  const auto like = [](const HostTensor& x) {
    const TensorView& view = x.view();
    return HostTensor::output(view.dtype, {view.shape.begin(), view.shape.begin() + view.rank});
  };
  r.dq = like(call.q);
  r.dk = like(call.k);
  r.dv = like(call.v);
  r.dbias = like(call.bias);
  const AttentionGradients gradients{r.dq.view(), r.dk.view(), r.dv.view(), r.dbias.view(), {}};
  WorkspaceBuffer buffer;
  Runtime runtime;
  runtime.workspace =
      buffer.get(attention_backward_workspace(call.q.view(), call.k.view(), call.v.view(), gradients, options));
  attention_backward(call.q.view(), call.k.view(), call.v.view(), r.o.view(), r.lse.view(), call.d_o.view(), {},
                     gradients, options, runtime);
}

class ExtremeBias : public ::testing::TestWithParam<Size> {};

TEST_P(ExtremeBias, GivesWhatDoublesGive) {
  for (DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    // Beside scores of 65504 a float32 has steps of 1/256, which is what that bias costs.
    const double tolerance = dtype == DType::f32 ? 1e-5 : 0.015;
    // In dq what rounding o to 16 bits adds to delta does not cancel, as the rest does.
    const double of_gradients = dtype == DType::f32 ? 1e-5 : 0.06;
    for (DType bias_dtype : {DType::f32, dtype}) {
      for (bool with_sink : {false, true}) {
        SCOPED_TRACE(std::string(name_of(dtype)) + ", bias " + name_of(bias_dtype) + (with_sink ? ", sink" : ""));
        const Call call(GetParam(), dtype, bias_dtype, with_sink);
        Results exact;
        forward(call, "reference", exact.o, exact.lse);
        backward(call, "reference", exact);
        on_each_target([&] {
          Results r;
          for (const char* candidate : {"cpu_baseline", "cpu"}) {
            forward(call, candidate, r.o, r.lse);
            expect_near(r.o, exact.o, tolerance, std::string(candidate) + ", o");
            expect_lse(r.lse, exact.lse, std::string(candidate) + ", lse");
          }
          backward(call, "cpu", r);
          expect_near(r.dq, exact.dq, of_gradients, "dq");
          expect_near(r.dk, exact.dk, of_gradients, "dk");
          expect_near(r.dv, exact.dv, of_gradients, "dv");
          expect_near(r.dbias, exact.dbias, of_gradients, "dbias");
        });
      }
    }
  }
}

TEST_P(ExtremeBias, OverACacheIn8Bits) {
  for (DType dtype : {DType::bf16, DType::f16}) {
    for (DType bias_dtype : {DType::f32, dtype}) {
      for (bool with_sink : {false, true}) {
        SCOPED_TRACE(std::string(name_of(dtype)) + ", bias " + name_of(bias_dtype) + (with_sink ? ", sink" : ""));
        const Call call(GetParam(), dtype, bias_dtype, with_sink, DType::f8e4m3);
        Results exact, r;
        forward(call, "reference", exact.o, exact.lse);
        on_each_target([&] {
          forward(call, "cpu", r.o, r.lse);
          expect_near(r.o, exact.o, 0.015, "o");
          expect_lse(r.lse, exact.lse, "lse");
        });
      }
    }
  }
}

// Tiles of many rows; 64 rows whose keys are walked in chunks; few rows, read where they lie. And powers of two at
// which logits in another unit are rounded by more than numbers in 16 or 32 bits hold.
INSTANTIATE_TEST_SUITE_P(Sizes, ExtremeBias,
                         ::testing::Values(Size{"prefill", 70, 300}, Size{"chunks", 24, 700}, Size{"few", 2, 700},
                                           Size{.name = "prefill_1e9", .rows = 70, .keys = 300, .end = 1e9},
                                           Size{.name = "chunks_1e12", .rows = 24, .keys = 700, .end = 1e12},
                                           Size{.name = "few_1e9", .rows = 2, .keys = 700, .end = 1e9},
                                           Size{.name = "prefill_1e30", .rows = 70, .keys = 300, .end = 1e30}),
                         [](const auto& info) { return std::string(info.param.name); });

// Over a cache in 4 bits: few rows and a tile of them, keys in blocks and in the rings behind them.
TEST(ExtremeBiasInFourBits, GivesWhatDoublesGive) {
  for (const std::int64_t rows : {1, 2, 70}) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      for (const DType bias_dtype : {DType::f32, dtype}) {
        for (const double end : {largest(bias_dtype), 1e9}) {
          SCOPED_TRACE(text(rows, " rows of ", name_of(dtype), ", bias ", name_of(bias_dtype), " to ", end));
          const Int4Call call(rows, dtype, bias_dtype, end);
          on_each_target([&] {
            HostTensor o = call.data.new_o(), lse = call.data.new_lse();
            call.attend("cpu", o, lse);
            expect_near(o, call.exact_o, 0.015, "o");
            expect_lse(lse, call.exact_lse, "lse", 1e-5);
          });
        }
      }
    }
  }
}

}  // namespace
}  // namespace heddle::kit
