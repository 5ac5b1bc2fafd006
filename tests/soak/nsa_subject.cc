// What native sparse attention has beside attention: pooled keys, the choice of blocks, sums of gated branches.
#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gpu/nsa_step_on_gpu.h"
#include "heddle/nsa.h"
#include "kit/host_tensor.h"
#include "ops/nsa/nsa.h"
#include "soak/subject.h"

namespace heddle::soak {
namespace {

using kit::DeviceTensor;
using kit::HostTensor;

HostTensor filled(DType dtype, std::vector<std::int64_t> shape, const std::function<double()>& draw) {
  HostTensor out = HostTensor::input(dtype, std::move(shape));
  for (std::int64_t n = 0; n < out.elements(); ++n) out.set(n, draw());
  return out;
}

Runtime on(void* stream) {
  Runtime runtime;
  runtime.stream = stream;
  return runtime;
}

class NsaCall : public Subject {
 protected:
  explicit NsaCall(const NsaSubject& spec) : s(spec), rows(spec.rows > 0 ? spec.rows : spec.S) {}

  void add(std::string name, DType dtype, std::int64_t count, std::int64_t width, double tolerance,
           const std::vector<double>& expected) {
    Output& output = outputs.emplace_back(std::move(name), dtype, count, width, tolerance);
    output.expected.write(0, expected.data(), expected.size() * sizeof(double));
    output.average = root_mean_square(output.reference(), count * width);
  }
  TensorView slot_view(std::size_t output, int slot, std::initializer_list<std::int64_t> shape) const {
    TensorView view(outputs[output].slot(slot), outputs[output].dtype, shape);
    view.device = Device::cuda;
    return view;
  }
  double tolerance() const { return s.dtype == DType::f16 ? 0.002 : 0.012; }

  const NsaSubject s;
  const int rows;
};

class PoolCall : public NsaCall {
 public:
  PoolCall(const NsaSubject& spec, std::uint64_t seed) : NsaCall(spec), pooled(s.S / s.block) {
    std::mt19937_64 random(seed);
    std::normal_distribution<double> normal;
    const HostTensor host = filled(s.dtype, {s.B, s.S, s.Hkv, s.D}, [&] { return normal(random); });
    const std::int64_t row = std::int64_t{s.Hkv} * s.D;
    std::vector<double> means(static_cast<std::size_t>(s.B * pooled * row));
    for (std::int64_t n = 0; n < s.B * pooled; ++n) {
      const std::int64_t first = n / pooled * s.S + n % pooled * s.block;
      for (std::int64_t d = 0; d < row; ++d) {
        double sum = 0;
        for (int key = 0; key < s.block; ++key) sum += host.get((first + key) * row + d);
        means[static_cast<std::size_t>(n * row + d)] = sum / s.block;
      }
    }
    x = DeviceTensor(host);
    add("pooled", s.dtype, s.B * pooled, row, tolerance(), means);
  }
  void launch(int slot, void* stream) override {
    pool_keys(x.view(), slot_view(0, slot, {s.B, pooled, s.Hkv, s.D}), {.block = s.block, .stride = s.block},
              on(stream));
  }

 private:
  const std::int64_t pooled;
  DeviceTensor x;
};

// One head of each group has whole numbers in q, the others zeros: so scores have the order of the integers q.k, with
// gaps that no rounding closes, and equal ones are equal in f32.
class SelectCall : public NsaCall {
 public:
  SelectCall(const NsaSubject& spec, std::uint64_t seed) : NsaCall(spec), pooled(s.S / s.block) {
    std::mt19937_64 random(seed);
    const auto digit = [&] { return static_cast<double>(random() % 3) - 1; };
    const int group = s.H / s.Hkv;
    HostTensor host_q = HostTensor::input(s.dtype, {s.B, rows, s.H, s.D});
    const HostTensor host_k = filled(s.dtype, {s.B, pooled, s.Hkv, s.D}, digit);
    HostTensor host_lse = HostTensor::input(DType::f32, {s.B, s.H, rows});
    HostTensor offsets = HostTensor::input(DType::i32, {s.B});
    const std::vector<double> k = host_k.values();
    std::vector<double> lists;
    std::vector<int> digits(static_cast<std::size_t>(s.D));
    std::vector<std::pair<int, int>> found;  // -q.k, block
    for (std::int64_t b = 0; b < s.B; ++b) {
      offsets.set(b, s.S - rows);
      for (std::int64_t i = 0; i < rows; ++i) {
        const std::int64_t position = s.S - rows + i, seen = std::min((position + 1) / s.block, pooled);
        for (std::int64_t kv = 0; kv < s.Hkv; ++kv) {
          for (int& d : digits) d = static_cast<int>(digit());
          found.clear();
          double sum = 0;
          for (std::int64_t c = 0; c < seen; ++c) {
            int product = 0;
            const double* const key = k.data() + ((b * pooled + c) * s.Hkv + kv) * s.D;
            for (int d = 0; d < s.D; ++d) product += digits[static_cast<std::size_t>(d)] * static_cast<int>(key[d]);
            found.emplace_back(-product, static_cast<int>(c));
            sum += std::exp(product / std::sqrt(static_cast<double>(s.D)));
          }
          const std::int64_t speaks = (i + kv) % group;
          for (std::int64_t g = 0; g < group; ++g) {
            const std::int64_t h = kv * group + g, first = ((b * rows + i) * s.H + h) * s.D;
            for (int d = 0; d < s.D; ++d) host_q.set(first + d, g == speaks ? digits[static_cast<std::size_t>(d)] : 0);
            host_lse.set((b * s.H + h) * rows + i, std::log(g == speaks ? sum : static_cast<double>(seen)));
          }
          append_list(lists, found, static_cast<int>(position / s.block));
        }
      }
    }
    q = DeviceTensor(host_q), k_pooled = DeviceTensor(host_k), lse = DeviceTensor(host_lse);
    q_offset = DeviceTensor(offsets);
    options.block_size = s.block;
    options.q_offset = q_offset.view();
    options.force = s.candidate;
    add("blocks", DType::i32, std::int64_t{s.B} * rows * s.Hkv, s.entries, 1e-9, lists);
    scratch =
        DeviceMemory(select_blocks_workspace(q.view(), k_pooled.view(), given_lse(), blocks(0), options, on(nullptr)));
  }
  void launch(int slot, void* stream) override {
    Runtime runtime = on(stream);
    runtime.workspace = {scratch.data(), scratch.bytes()};
    select_blocks(q.view(), k_pooled.view(), given_lse(), blocks(slot), options, runtime);
  }

 private:
  TensorView blocks(int slot) const { return slot_view(0, slot, {s.B, rows, s.Hkv, s.entries}); }
  TensorView given_lse() const { return s.finds_lse ? TensorView() : lse.view(); }
  void append_list(std::vector<double>& lists, std::vector<std::pair<int, int>>& found, int current) const {
    std::vector<int> list;
    for (const int forced : {0, current - 1, current}) {
      if (forced >= 0 && std::find(list.begin(), list.end(), forced) == list.end()) list.push_back(forced);
    }
    std::sort(found.begin(), found.end());
    const std::size_t first_chosen = list.size();
    for (const auto& [score, block] : found) {
      const auto end = list.begin() + static_cast<std::ptrdiff_t>(first_chosen);
      if (std::find(list.begin(), end, block) == end) list.push_back(block);
    }
    list.resize(static_cast<std::size_t>(s.entries), -1);
    lists.insert(lists.end(), list.begin(), list.end());
  }

  const std::int64_t pooled;
  DeviceTensor q, k_pooled, lse, q_offset;
  SelectOptions options;
  DeviceMemory scratch;
};

class GateCall : public NsaCall {
 public:
  static constexpr std::size_t kBranches = 3;

  GateCall(const NsaSubject& spec, std::uint64_t seed) : NsaCall(spec) {
    std::mt19937_64 random(seed);
    std::normal_distribution<double> normal;
    const auto draw = [&] { return normal(random); };
    std::array<std::vector<double>, kBranches> o, gate;
    for (std::size_t n = 0; n < kBranches; ++n) {
      const HostTensor host_o = filled(s.dtype, {s.B, s.S, s.H, s.D}, draw);
      const HostTensor host_gate = filled(DType::f32, {s.B, s.S, s.H}, draw);
      o[n] = host_o.values(), gate[n] = host_gate.values();
      os[n] = DeviceTensor(host_o), gates[n] = DeviceTensor(host_gate);
      branches[n] = {os[n].view(), gates[n].view()};
    }
    const std::int64_t count = std::int64_t{s.B} * s.S * s.H;
    const auto size = static_cast<std::size_t>(count * s.D);
    const auto row_of = [&](std::size_t at) { return at / static_cast<std::size_t>(s.D); };
    if (s.pass == Pass::forward) {
      std::vector<double> sums(size);
      for (std::size_t at = 0; at < size; ++at) {
        for (std::size_t n = 0; n < kBranches; ++n) sums[at] += gate[n][row_of(at)] * o[n][at];
      }
      add("out", s.dtype, count, s.D, tolerance(), sums);
      return;
    }
    const HostTensor host_d_out = filled(s.dtype, {s.B, s.S, s.H, s.D}, draw);
    const std::vector<double> d = host_d_out.values();
    d_out = DeviceTensor(host_d_out);
    for (std::size_t n = 0; n < kBranches; ++n) {
      std::vector<double> d_o(size), d_gate(static_cast<std::size_t>(count));
      for (std::size_t at = 0; at < size; ++at) {
        d_o[at] = gate[n][row_of(at)] * d[at];
        d_gate[row_of(at)] += o[n][at] * d[at];
      }
      add("d_o", s.dtype, count, s.D, tolerance(), d_o);
      add("d_gate", DType::f32, count, 1, 1e-4, d_gate);
    }
  }
  void launch(int slot, void* stream) override {
    if (s.pass == Pass::forward) {
      gate_branches(branches, slot_view(0, slot, {s.B, s.S, s.H, s.D}), on(stream));
      return;
    }
    std::array<GatedBranch, kBranches> gradients;
    for (std::size_t n = 0; n < kBranches; ++n) {
      gradients[n] = {slot_view(2 * n, slot, {s.B, s.S, s.H, s.D}), slot_view(2 * n + 1, slot, {s.B, s.S, s.H})};
    }
    gate_branches_backward(branches, d_out.view(), gradients, on(stream));
  }

 private:
  std::array<DeviceTensor, kBranches> os, gates;
  std::array<GatedBranch, kBranches> branches;
  DeviceTensor d_out;
};

// A step over a cache that stays as it was: each launch writes the same row, and the same means where it ends a block.
class StepCall : public NsaCall {
 public:
  StepCall(const NsaSubject& spec, std::uint64_t /*seed*/)
      : NsaCall(spec), data(case_of(spec)), there(data), options(data.options) {
    kit::NsaStepData appended = data;
    appended.append();
    add("out", s.dtype, std::int64_t{s.B} * s.H, s.D, tolerance(), appended.exact());
    scratch = DeviceMemory(nsa_step_workspace(there.q.view(), there.k_new.view(), there.v_new.view(), there.cache(),
                                              there.gates(), out(0), options, on(nullptr)));
  }
  void launch(int slot, void* stream) override {
    Runtime runtime = on(stream);
    runtime.workspace = {scratch.data(), scratch.bytes()};
    nsa_step(there.q.view(), there.k_new.view(), there.v_new.view(), there.cache(), there.gates(), out(slot), options,
             runtime);
  }

 private:
  static kit::NsaStepCase case_of(const NsaSubject& s) {
    // Sequences of several lengths, none longer than S.
    std::vector<std::int64_t> lengths;
    for (int b = 0; b < s.B; ++b) lengths.push_back(s.S - 37 * (s.B - 1 - b));
    return {"", s.dtype, s.Hkv, s.H / s.Hkv, s.D, s.D, s.S + 100, lengths, s.block, s.entries, s.window};
  }
  TensorView out(int slot) const { return slot_view(0, slot, {s.B, 1, s.H, s.D}); }

  const kit::NsaStepData data;
  kit::NsaStepOnGpu there;
  const NsaStepOptions options;
  DeviceMemory scratch;
};

}  // namespace

std::unique_ptr<Subject> make_subject(const NsaSubject& spec, std::uint64_t seed) {
  switch (spec.what) {
    case NsaSubject::What::pool:
      return std::make_unique<PoolCall>(spec, seed);
    case NsaSubject::What::select:
      return std::make_unique<SelectCall>(spec, seed);
    case NsaSubject::What::step:
      return std::make_unique<StepCall>(spec, seed);
    default:
      return std::make_unique<GateCall>(spec, seed);
  }
}

}  // namespace heddle::soak
