// Masks as the world makes them: an additive bias of the lowest finite number, or of any other as large, gives what
// doubles give, forward and backward. Nothing overflows, and a row in which every key has it is the mean that is left.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "core/dtypes.h"
#include "heddle/attention.h"
#include "kernels/candidates.h"
#include "kit/host_tensor.h"

namespace heddle::kit {
namespace {

struct Size {
  const char* name;
  std::int64_t rows, keys;
};

double largest(DType dtype) {
  if (dtype == DType::f16) return 65504.0;
  return dtype == DType::bf16 ? 3.3895313892515355e38 : std::numeric_limits<float>::max();
}

// Every eighth row is of one kind. `end`: the largest finite number of the bias.
double bias_at(std::int64_t i, std::int64_t j, double end) {
  const double small = std::sin(static_cast<double>(3 * i + 7 * j));
  switch (i % 8) {
    case 0:  // no key is wanted, as of a row of padding
      return -end;
    case 1:  // one key outweighs all
      return j == 37 ? end : small;
    case 2:  // most keys are padding
      return j % 5 != 0 ? -end : small;
    case 3:  // two kinds of unwanted, one less so
      return j % 2 == 0 ? -end : -0.875 * end;
    case 4:  // everything as large as can be
      return end;
    case 5:  // from end to end
      return j % 3 == 0 ? end : -end;
    case 6:  // keys of the first blocks are unwanted, then one is there
      return j < 200 ? -end : small;
    default:
      return small;
  }
}

struct Call {
  HostTensor q, k, v, d_o, bias, sink;
  AttentionOptions options;

  Call(const Size& size, DType dtype, DType bias_dtype, bool with_sink) {
    const std::int64_t heads = 2, width = 24;
    const auto fill = [](HostTensor& x, double step) {
      for (std::int64_t n = 0; n < x.elements(); ++n) x.set(n, std::sin(static_cast<double>(n) * step));
    };
    q = HostTensor::input(dtype, {1, size.rows, heads, width});
    k = HostTensor::input(dtype, {1, size.keys, 1, width});
    v = HostTensor::input(dtype, {1, size.keys, 1, width});
    d_o = HostTensor::input(dtype, {1, size.rows, heads, width});
    fill(q, 0.37);
    fill(k, 0.73);
    fill(v, 0.19);
    fill(d_o, 0.51);
    bias = HostTensor::input(bias_dtype, {1, 1, size.rows, size.keys});
    for (std::int64_t n = 0; n < bias.elements(); ++n) {
      bias.set(n, bias_at(n / size.keys, n % size.keys, largest(bias_dtype)));
    }
    options.bias = bias.view();
    if (with_sink) {
      sink = HostTensor::input(DType::f32, {heads});
      sink.set(0, 0.5);
      sink.set(1, -std::numeric_limits<float>::max());
      options.sink = sink.view();
    }
  }
};

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

// Errors as a share of the largest value of the tensor, beside what float32 leaves of sums of terms near 1; NaN fails.
void expect_near(const HostTensor& got, const HostTensor& wanted, double tolerance, const std::string& what) {
  const std::vector<double> x = got.values(), y = wanted.values();
  double most = 0;
  for (double value : y) most = std::max(most, std::abs(value));
  for (std::size_t n = 0; n < x.size(); ++n) {
    if (!(std::abs(x[n] - y[n]) <= tolerance * most + 1e-6)) {
      ADD_FAILURE() << what << ", element " << n << ": " << x[n] << ", doubles give " << y[n];
      return;
    }
  }
}

void expect_lse(const HostTensor& got, const HostTensor& wanted, const std::string& what) {
  const std::vector<double> x = got.values(), y = wanted.values();
  for (std::size_t n = 0; n < x.size(); ++n) {
    EXPECT_TRUE(std::abs(x[n] - y[n]) <= 1e-6 * std::abs(y[n]) + 2e-6)
        << what << ", row " << n << ": " << x[n] << ", doubles give " << y[n];
  }
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

// Tiles of many rows; 64 rows whose keys are walked in chunks; few rows, read where they lie.
INSTANTIATE_TEST_SUITE_P(Sizes, ExtremeBias,
                         ::testing::Values(Size{"prefill", 70, 300}, Size{"chunks", 24, 700}, Size{"few", 2, 700}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace heddle::kit
