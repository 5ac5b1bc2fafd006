// The largest finite numbers, -1e9 and others as large as a bias, on the GPU: every candidate and every way to read a
// bias gives what doubles give.
#include <gtest/gtest.h>

#include <numeric>

#include "gpu/device_backward.h"
#include "kit/extreme_bias.h"

namespace heddle::kit {
namespace {

using namespace extreme_bias;

struct Answers {
  HostTensor o, lse, dq, dk, dv, dbias;

  explicit Answers(const Call& call)
      : o(like(call.q)),
        lse(HostTensor::output(DType::f32, {call.q.view().shape[0], 2, call.q.view().shape[1]})),
        dq(like(call.q)),
        dk(like(call.k)),
        dv(like(call.v)),
        dbias(like(call.bias)) {}

  static HostTensor like(const HostTensor& x) {
    const TensorView& view = x.view();
    return HostTensor::output(view.dtype, {view.shape.begin(), view.shape.begin() + view.rank});
  }
};

// By the double-precision reference, on the host.
Answers exact_answers(const Call& call) {
  Answers out(call);
  AttentionOptions options = call.options;
  options.force = "reference";
  const AttentionGradients gradients{out.dq.view(), out.dk.view(), out.dv.view(), out.dbias.view(), {}};
  WorkspaceBuffer buffer;
  Runtime runtime;
  runtime.workspace = buffer.get(attention_forward_workspace(call.q.view(), call.k.view(), call.v.view(), options));
  attention_forward(call.q.view(), call.k.view(), call.v.view(), out.o.view(), out.lse.view(), options, runtime);
  runtime.workspace =
      buffer.get(attention_backward_workspace(call.q.view(), call.k.view(), call.v.view(), gradients, options));
  attention_backward(call.q.view(), call.k.view(), call.v.view(), out.o.view(), out.lse.view(), call.d_o.view(), {},
                     gradients, options, runtime);
  return out;
}

// What rounding P and o leaves of the differences dP - delta that a key which takes all of its rows sums up: two
// roundings of delta = dO . o, over the rows of a sequence.
double left_of_delta(const Call& call, const Answers& exact) {
  const std::vector<double> d_o = call.d_o.values(), o = exact.o.values();
  const auto sequence = d_o.size() / static_cast<std::size_t>(call.q.view().shape[0]),
             width = static_cast<std::size_t>(call.q.view().shape[3]);
  double most = 0;
  for (std::size_t first = 0; first < d_o.size(); first += sequence) {
    double sum = 0;
    for (std::size_t row = first; row < first + sequence; row += width) {
      sum += std::abs(std::inner_product(&d_o[row], &d_o[row] + width, &o[row], 0.0));
    }
    most = std::max(most, sum);
  }
  const DType dtype = call.q.view().dtype;
  return most * (dtype == DType::bf16 ? 0x1p-8 : dtype == DType::f16 ? 0x1p-11 : 0x1p-21);
}

class GpuExtremeBias : public ::testing::TestWithParam<Size> {};

void check(const Size& size, DType dtype, DType bias_dtype, bool with_sink) {
  SCOPED_TRACE(std::string(name_of(dtype)) + ", bias " + name_of(bias_dtype) + (with_sink ? ", sink" : ""));
  const double tolerance = dtype == DType::f32 ? 2e-5 : 0.015, of_gradients = dtype == DType::f32 ? 5e-5 : 0.06;
  const Call call(size, dtype, bias_dtype, with_sink);
  const Answers exact = exact_answers(call);
  Answers found(call);
  const DeviceTensor q(call.q), k(call.k), v(call.v), d_o(call.d_o), bias(call.bias), sink(call.sink);
  DeviceTensor o(found.o), lse(found.lse), dq(found.dq), dk(found.dk), dv(found.dv), dbias(found.dbias);
  AttentionOptions options;
  options.bias = bias.view();
  options.sink = sink.view();
  BackwardCall backward{{q.view(), k.view(), v.view(), o.view(), lse.view(), options},
                        d_o.view(),
                        {},
                        {dq.view(), dk.view(), dv.view(), dbias.view(), {}}};
  DeviceCall& forward = backward.forward;
  std::vector<std::string> names;
  for (const Candidate& c : explain_attention(forward.q, forward.k, forward.v, options)) {
    if (c.supported && c.method != "reference") names.push_back(c.name);
  }
  ASSERT_FALSE(names.empty());
  for (const std::string& name : names) {
    forward.options.force = name;
    forward.run();
    o.read(found.o);
    lse.read(found.lse);
    expect_near(found.o, exact.o, tolerance, name + ", o");
    expect_lse(found.lse, exact.lse, name + ", lse", 2e-5);
  }
  // Gradients of the forward that a caller would get.
  const double of_terms = size.by_keys ? left_of_delta(call, exact) : 1e-6;
  forward.options.force.clear();
  forward.run();
  for (const std::string& name : candidates(backward)) {
    forward.options.force = name;
    backward.run();
    for (const auto& [device, host, wanted, what] : {std::tuple(&dq, &found.dq, &exact.dq, ", dq"),
                                                     {&dk, &found.dk, &exact.dk, ", dk"},
                                                     {&dv, &found.dv, &exact.dv, ", dv"},
                                                     {&dbias, &found.dbias, &exact.dbias, ", dbias"}}) {
      device->read(*host);
      expect_near(*host, *wanted, of_gradients, name + what, of_terms);
    }
  }
}

TEST_P(GpuExtremeBias, GivesWhatDoublesGive) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const DType bias_dtype : {DType::f32, dtype}) {
      for (const bool with_sink : {false, true}) check(GetParam(), dtype, bias_dtype, with_sink);
    }
  }
}

// Rows of a bias element by element, in pieces of 4 bytes and by the copying engine; keys for which all rows share one;
// decoding, by warps and by warpgroups.
INSTANTIATE_TEST_SUITE_P(
    Sizes, GpuExtremeBias,
    ::testing::Values(Size{"rows_d24", 70, 301, 24}, Size{"rows_d64", 140, 300, 64}, Size{"rows_d128", 140, 300, 128},
                      Size{"rows_d256", 70, 300, 256}, Size{"bulk_d64", 140, 304, 64}, Size{"bulk_d128", 140, 304, 128},
                      Size{"keys_d64", 20, 300, 64, 8, true}, Size{"keys_d96", 20, 300, 96, 8, true},
                      Size{"keys_d128", 20, 300, 128, 8, true}, Size{"keys_d256", 20, 300, 256, 8, true},
                      Size{"decode_d64", 2, 700, 64, 8, true}, Size{"decode_d128", 8, 700, 128},
                      Size{"decode_d256", 1, 700, 256, 8, true}, Size{"decode_rows_d128", 12, 700, 128}),
    [](const auto& info) { return std::string(info.param.name); });

// Where logits in another unit are rounded by more than float16, or any number, holds.
INSTANTIATE_TEST_SUITE_P(Rounded, GpuExtremeBias,
                         ::testing::Values(Size{"rows_d64_1e9", 140, 300, 64, 1, false, 1e9},
                                           Size{"bulk_d64_1e7", 140, 304, 64, 1, false, 1e7},
                                           Size{"bulk_d128_1e9", 140, 304, 128, 1, false, 1e9},
                                           Size{"rows_d256_1e12", 70, 300, 256, 1, false, 1e12},
                                           Size{"keys_d64_1e30", 20, 300, 64, 8, true, 1e30},
                                           Size{"keys_d128_1e9", 20, 300, 128, 8, true, 1e9},
                                           Size{"decode_d64_1e12", 2, 700, 64, 8, true, 1e12},
                                           Size{"decode_d128_1e9", 8, 700, 128, 1, false, 1e9},
                                           Size{"decode_rows_d128_1e9", 12, 700, 128, 1, false, 1e9}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace heddle::kit
