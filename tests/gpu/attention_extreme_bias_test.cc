// The largest finite numbers, -1e9 and others as large as a bias, on the GPU: every candidate and every way to read a
// bias gives what doubles give.
#include <gtest/gtest.h>

#include <limits>
#include <numeric>

#include "gpu/device_backward.h"
#include "kit/extreme_bias.h"

namespace heddle::kit {
namespace {

using namespace extreme_bias;

struct Answers {
  HostTensor o, lse, dq, dk, dv, dbias;

  explicit Answers(const Call& call)
      : o(call.q.view().dtype == DType::f8e4m3
              ? HostTensor::output(DType::bf16, {call.q.view().shape.begin(), call.q.view().shape.begin() + 4})
              : like(call.q)),
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
double left_of_delta(const Call& call, const Answers& exact, Precision precision) {
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
  const bool of_11_bits = dtype == DType::f16 || precision == Precision::tf32;
  return most * (dtype == DType::bf16 ? 0x1p-8 : of_11_bits ? 0x1p-11 : 0x1p-21);
}

// o and lse of every candidate that takes the call.
void expect_forward_as_doubles(const Call& call, double tolerance = 0.015, double of_lse = 2e-5,
                               double of_terms = 1e-6) {
  Answers exact(call), found(call);
  AttentionOptions options = call.options;
  options.force = "reference";
  options.precision = Precision::f32;
  attention_forward(call.q.view(), call.k.view(), call.v.view(), exact.o.view(), exact.lse.view(), options, {});
  const DeviceTensor q(call.q), k(call.k), v(call.v), bias(call.bias), sink(call.sink);
  DeviceTensor o(found.o), lse(found.lse);
  options = call.options;
  if (options.bias.given()) options.bias = bias.view();
  options.sink = sink.view();
  DeviceCall device{q.view(), k.view(), v.view(), o.view(), lse.view(), options};
  int served = 0;
  for (const Candidate& c : explain_attention(device.q, device.k, device.v, options)) {
    if (!c.supported || c.method == "reference") continue;
    ++served;
    device.options.force = c.name;
    device.run();
    o.read(found.o);
    lse.read(found.lse);
    expect_near(found.o, exact.o, tolerance, c.name + ", o", of_terms);
    expect_lse(found.lse, exact.lse, c.name + ", lse", of_lse);
  }
  EXPECT_GT(served, 0);
}

class GpuExtremeBias : public ::testing::TestWithParam<Size> {};

void check(const Size& size, DType dtype, DType bias_dtype, bool with_sink, Precision precision = Precision::f32) {
  SCOPED_TRACE(std::string(name_of(dtype)) + ", bias " + name_of(bias_dtype) + (with_sink ? ", sink" : "") +
               (precision == Precision::tf32 ? ", tf32" : ""));
  const bool f32 = dtype == DType::f32 && precision == Precision::f32, tf32 = precision == Precision::tf32;
  // Products of tf32 have the digits of float16, and so have the scores.
  const double tolerance = f32 ? 2e-5 : 0.015, of_gradients = f32 ? 5e-5 : 0.06, of_lse = tf32 ? 5e-3 : 2e-5;
  const Call call(size, dtype, bias_dtype, with_sink);
  const Answers exact = exact_answers(call);
  Answers found(call);
  const DeviceTensor q(call.q), k(call.k), v(call.v), d_o(call.d_o), bias(call.bias), sink(call.sink);
  DeviceTensor o(found.o), lse(found.lse), dq(found.dq), dk(found.dk), dv(found.dv), dbias(found.dbias);
  AttentionOptions options;
  options.bias = bias.view();
  options.sink = sink.view();
  options.precision = precision;
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
    expect_lse(found.lse, exact.lse, name + ", lse", of_lse);
  }
  // Gradients of the forward that a caller would get.
  const double of_terms = size.by_keys ? left_of_delta(call, exact, precision) : 1e-6;
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

TEST_P(GpuExtremeBias, UnderTf32) {
  for (const bool with_sink : {false, true}) check(GetParam(), DType::f32, DType::f32, with_sink, Precision::tf32);
}

// From an lse that has lost how many keys share the row: what a piece makes of it, P = exp(s - lse), doubles make too.
TEST_P(GpuExtremeBias, OfMergedRows) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    SCOPED_TRACE(name_of(dtype));
    const Call call(GetParam(), dtype, DType::f32, false);
    const Answers given = exact_answers(call);
    Answers exact(call), found(call);
    AttentionOptions options = call.options;
    options.force = "reference";
    AttentionGradients gradients{exact.dq.view(), exact.dk.view(), exact.dv.view(), exact.dbias.view(), {}};
    gradients.merged = true;
    attention_backward(call.q.view(), call.k.view(), call.v.view(), given.o.view(), given.lse.view(), call.d_o.view(),
                       {}, gradients, options, {});
    const DeviceTensor q(call.q), k(call.k), v(call.v), d_o(call.d_o), bias(call.bias), o(given.o), lse(given.lse);
    DeviceTensor dq(found.dq), dk(found.dk), dv(found.dv), dbias(found.dbias);
    BackwardCall device{{q.view(), k.view(), v.view(), o.view(), lse.view(), options},
                        d_o.view(),
                        {},
                        {dq.view(), dk.view(), dv.view(), dbias.view(), {}}};
    device.gradients.merged = true;
    device.forward.options.bias = bias.view();
    device.forward.options.force = "sm80";
    device.run();
    for (const auto& [there, host, wanted, what] : {std::tuple(&dq, &found.dq, &exact.dq, "dq"),
                                                    {&dk, &found.dk, &exact.dk, "dk"},
                                                    {&dv, &found.dv, &exact.dv, "dv"},
                                                    {&dbias, &found.dbias, &exact.dbias, "dbias"}}) {
      there->read(*host);
      expect_near(*host, *wanted,
                  dtype == DType::f32   ? 5e-5
                  : dtype == DType::f16 ? 0.06
                                        : 0.12,
                  what, GetParam().by_keys ? left_of_delta(call, given, Precision::f32) : 1e-6);
    }
  }
}

// Keys and values in f8e4m3, which have no backward.
TEST_P(GpuExtremeBias, OverACacheIn8Bits) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const DType bias_dtype : {DType::f32, dtype}) {
      for (const bool with_sink : {false, true}) {
        SCOPED_TRACE(std::string(name_of(dtype)) + ", bias " + name_of(bias_dtype) + (with_sink ? ", sink" : ""));
        const Call call(GetParam(), dtype, bias_dtype, with_sink, DType::f8e4m3);
        expect_forward_as_doubles(call);
      }
    }
  }
}

// Without a bias a sink may be as large: where logits are kept in log2 units, and for products in 8 bits, which take
// none.
void check_sinks(DType dtype, Precision precision, double tolerance, double of_lse, double of_terms = 1e-6,
                 std::int64_t rows = 140) {
  for (const double end : {-static_cast<double>(std::numeric_limits<float>::max()), -1e9, 1e9, 3e38}) {
    for (const std::int64_t width : {64, 128}) {
      SCOPED_TRACE(std::string(name_of(dtype)) + ", sink " + std::to_string(end) + ", d" + std::to_string(width));
      Call call({"sink", rows, 304, width}, dtype, DType::f32, true);
      call.options.bias = {};
      call.options.precision = precision;
      call.sink.set(1, end);
      expect_forward_as_doubles(call, tolerance, of_lse, of_terms);
    }
  }
}

TEST(GpuExtremeSink, WithoutABias) {
  for (const std::int64_t rows : {140, 2}) {  // 2: decoding
    check_sinks(DType::f32, Precision::f32, 2e-5, 2e-5, 1e-6, rows);
    for (const DType dtype : {DType::bf16, DType::f16}) check_sinks(dtype, Precision::f32, 0.015, 2e-5, 1e-3, rows);
  }
}

// Rows that meet no key: their lse is the sink, however small.
TEST(GpuExtremeSink, OfRowsWithoutKeys) {
  constexpr double kLargest = std::numeric_limits<float>::max();
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const double sink : {-kLargest, -1e9, kLargest, -std::numeric_limits<double>::infinity()}) {
      for (const auto& [rows, keys] : {std::pair<std::int64_t, std::int64_t>(140, 72), {2, 1}}) {
        SCOPED_TRACE(std::string(name_of(dtype)) + ", sink " + std::to_string(sink) + ", rows " + std::to_string(rows));
        Call call({"sink", rows, keys, 64}, dtype, DType::f32, true);
        call.options.bias = {};
        call.options.causal = Causal::bottom_right;
        call.sink.set(0, sink);
        expect_forward_as_doubles(call, dtype == DType::f32 ? 2e-5 : 0.015, 2e-5, 1e-3);
      }
    }
  }
}

// Scores are off by some of the codes' steps, 1/127 of the largest of a row or a group.
TEST(GpuExtremeSink, UnderInt8Qk) {
  for (const DType dtype : {DType::bf16, DType::f16}) check_sinks(dtype, Precision::int8_qk, 0.05, 0.05);
}

// Probabilities have three bits behind the point, and sums of products 13: 300 terms below 1, of which little is left
// where they cancel.
TEST(GpuExtremeSink, OfE4m3) {
  if (current_gpu().major != 9) GTEST_SKIP() << "only Hopper multiplies e4m3";
  check_sinks(DType::f8e4m3, Precision::f32, 0.06, 0.02, 0.01);
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
