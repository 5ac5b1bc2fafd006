// Sums of gated branches and their gradients on the GPU, against the reference in doubles.
#include <gtest/gtest.h>

#include <deque>
#include <random>
#include <string>

#include "heddle/error.h"
#include "kernels/merge_cases.h"
#include "kit/device_mirror.h"
#include "ops/nsa/nsa.h"
#include "reference/gate_branches.h"

namespace heddle::kit {
namespace {

using std::int64_t;

struct GateCase {
  const char* name;
  DType dtype;
  Layout layout;
  int branches;
  int64_t B, S, H, Dv;
  bool packed = false;
};

const GateCase kGateCases[] = {
    {"one", DType::bf16, Layout::contiguous, 1, 1, 1, 1, 128},
    {"bf16", DType::bf16, Layout::contiguous, 3, 2, 37, 5, 128},
    {"f16", DType::f16, Layout::contiguous, 2, 2, 37, 5, 64},
    {"f32", DType::f32, Layout::contiguous, 3, 1, 70, 3, 128},
    {"widest", DType::f32, Layout::contiguous, 3, 1, 9, 3, 256},
    {"widest_bf16", DType::bf16, Layout::contiguous, 3, 1, 9, 3, 256},
    {"odd_pieces", DType::bf16, Layout::contiguous, 3, 1, 33, 2, 96},
    {"narrow", DType::f16, Layout::contiguous, 3, 1, 33, 2, 8},
    {"elements", DType::bf16, Layout::contiguous, 3, 1, 33, 2, 37},
    {"one_element", DType::f32, Layout::contiguous, 2, 3, 33, 2, 1},
    {"widest_elements", DType::f16, Layout::contiguous, 3, 1, 9, 2, 253},
    {"heads_first", DType::bf16, Layout::heads_first, 3, 2, 37, 5, 128},
    {"padded_rows", DType::bf16, Layout::padded_rows, 3, 2, 37, 5, 64},
    {"packed", DType::bf16, Layout::contiguous, 3, 1, 300, 4, 128, true},
    {"many_rows", DType::bf16, Layout::contiguous, 3, 1, 20011, 7, 64},
};

void PrintTo(const GateCase& c, std::ostream* out) { *out << c.name; }

struct GateData {
  GateCase s;
  std::deque<HostTensor> os, gates;
  HostTensor d_out;

  explicit GateData(const GateCase& c) : s(c) {
    std::mt19937 random(7);
    std::normal_distribution<double> normal;
    const auto filled = [&](HostTensor x) {
      for (int64_t n = 0; n < x.elements(); ++n) x.set(n, normal(random));
      return x;
    };
    for (int n = 0; n < s.branches; ++n) {
      os.push_back(filled(HostTensor::input(s.dtype, rows(), s.layout)));
      gates.push_back(filled(HostTensor::input(DType::f32, per_row())));
    }
    d_out = filled(HostTensor::input(s.dtype, rows(), s.layout));
  }
  std::vector<int64_t> rows() const {
    return s.packed ? std::vector<int64_t>{s.S, s.H, s.Dv} : std::vector<int64_t>{s.B, s.S, s.H, s.Dv};
  }
  std::vector<int64_t> per_row() const {
    std::vector<int64_t> shape = rows();
    shape.pop_back();
    return shape;
  }
  std::vector<GatedBranch> branches() const {
    std::vector<GatedBranch> out;
    for (int n = 0; n < s.branches; ++n) out.push_back({os[n].view(), gates[n].view()});
    return out;
  }
};

struct There {
  std::deque<DeviceTensor> memory;
  std::vector<GatedBranch> branches;
  DeviceTensor d_out;

  explicit There(const GateData& data) : d_out(data.d_out) {
    for (int n = 0; n < data.s.branches; ++n) {
      const TensorView &o = memory.emplace_back(data.os[n]).view(), &gate = memory.emplace_back(data.gates[n]).view();
      branches.push_back({o, gate});
    }
  }
};

Runtime on(const DeviceStream& stream) {
  Runtime runtime;
  runtime.stream = stream.get();
  return runtime;
}

HostTensor sum(const GateData& data, const There& there) {
  HostTensor out = HostTensor::output(data.s.dtype, data.rows(), data.s.layout);
  const DeviceTensor to(out);
  const DeviceStream stream;
  gate_branches(there.branches, to.view(), on(stream));
  stream.synchronize();
  to.read(out);
  return out;
}

// Of every branch, those that are not wanted not given.
struct Gradients {
  std::deque<HostTensor> d_o, d_gate;
};
Gradients gradients(const GateData& data, const There& there, bool of_o, bool of_gate) {
  Gradients out;
  std::deque<DeviceTensor> memory;
  std::vector<GatedBranch> views;
  for (int n = 0; n < data.s.branches; ++n) {
    out.d_o.push_back(of_o ? HostTensor::output(data.s.dtype, data.rows(), data.s.layout) : HostTensor());
    out.d_gate.push_back(of_gate ? HostTensor::output(DType::f32, data.per_row()) : HostTensor());
    const TensorView &d_o = memory.emplace_back(out.d_o[n]).view(), &d_gate = memory.emplace_back(out.d_gate[n]).view();
    views.push_back({d_o, d_gate});
  }
  const DeviceStream stream;
  gate_branches_backward(there.branches, there.d_out.view(), views, on(stream));
  stream.synchronize();
  for (int n = 0; n < data.s.branches; ++n) {
    if (of_o) memory[2 * n].read(out.d_o[n]);
    if (of_gate) memory[2 * n + 1].read(out.d_gate[n]);
  }
  return out;
}

class GpuGateBranches : public ::testing::TestWithParam<GateCase> {};

TEST_P(GpuGateBranches, MatchesReference) {
  const GateData data(GetParam());
  const There there(data);
  const HostTensor shape = HostTensor::output(data.s.dtype, data.rows(), data.s.layout);
  const std::vector<double> exact =
      reference::gate_branches(checked_gate_problem(Check("test"), data.branches(), shape.view()));
  const HostTensor found = sum(data, there);
  // Each of three sums rounds a number that may be as large as the terms, which are products of two normal numbers.
  expect_near(found, exact, 6, 40);
  EXPECT_TRUE(sum(data, there).same_bits(found));
}

TEST_P(GpuGateBranches, GradientsMatchReference) {
  const GateData data(GetParam());
  const There there(data);
  const GateBackwardProblem p = checked_gate_backward_problem(Check("test"), data.branches(), data.d_out.view(),
                                                              std::vector<GatedBranch>(data.s.branches));
  const Gradients found = gradients(data, there, true, true);
  const Gradients of_o = gradients(data, there, true, false), of_gate = gradients(data, there, false, true);
  for (int n = 0; n < data.s.branches; ++n) {
    SCOPED_TRACE("branch " + std::to_string(n));
    const reference::GateGradients exact = reference::gate_branches_backward(p, n);
    expect_near(found.d_o[n], exact.d_o, 1, 20);
    expect_near(found.d_gate[n], exact.d_gate, static_cast<double>(data.s.Dv) + 6, 20);
    EXPECT_TRUE(of_o.d_o[n].same_bits(found.d_o[n]));
    EXPECT_TRUE(of_gate.d_gate[n].same_bits(found.d_gate[n]));
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, GpuGateBranches, ::testing::ValuesIn(kGateCases),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(GpuGateBranchesCall, RefusesInWords) {
  GateData data(kGateCases[1]);
  const There there(data);
  const auto message = [](const auto& call) -> std::string {
    try {
      call();
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_EQ(message([&] { gate_branches({}, there.d_out.view()); }),
            "[gate_branches] there are 0 branches: there must be 1 to 3");
  EXPECT_EQ(message([&] { gate_branches(there.branches, there.branches[0].o); }),
            "[gate_branches] out shares memory with os[0], which is read while it is written; found out [2, 37, 5, "
            "128], os[0] [2, 37, 5, 128]");
  EXPECT_NE(message([&] { gate_branches(data.branches(), there.d_out.view()); }).find("device"), std::string::npos);
}

TEST(GpuGateBranchesCall, NoRows) {
  const GateData data({"none", DType::bf16, Layout::contiguous, 3, 2, 0, 5, 128});
  const There there(data);
  EXPECT_EQ(sum(data, there).elements(), 0);
  gradients(data, there, true, true);
}

}  // namespace
}  // namespace heddle::kit
