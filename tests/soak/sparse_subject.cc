#include <algorithm>
#include <cmath>
#include <random>

#include "heddle/sparse.h"
#include "soak/subject.h"

namespace heddle::soak {
namespace {

TensorView on_gpu(TensorView view) {
  view.device = Device::cuda;
  return view;
}

// Causal attention over lists. The reference sees a mask that says the same.
class SparseCall : public Subject {
 public:
  SparseCall(const SparseSubject& spec, std::uint64_t seed) : s(spec), sq(spec.rows > 0 ? spec.rows : spec.S) {
    q = random_tensor({s.B, sq, s.H, s.D}, seed + 1);
    k = random_tensor({s.B, s.S, s.Hkv, s.D}, seed + 2);
    v = random_tensor({s.B, s.S, s.Hkv, s.D}, seed + 3);
    options.causal = Causal::bottom_right;
    options.force = s.candidate;
    options.deterministic = s.deterministic;
    make_lists(seed);
    describe();
    const std::int64_t rows = std::int64_t{s.B} * sq * s.H, keys = std::int64_t{s.B} * s.S * s.Hkv;
    const double tolerance = s.dtype == DType::f16 ? 0.01 : 0.03;
    if (s.pass == Pass::forward) {
      outputs.emplace_back("o", s.dtype, rows, s.D, tolerance);
      outputs.emplace_back("lse", DType::f32, rows, 1, tolerance / 8);
      scratch = DeviceMemory(sparse_attention_forward_workspace(q, k, v, lists, options));
      reference_forward(reference, outputs[0].reference(), outputs[1].reference());
    } else {
      d_o = random_tensor({s.B, sq, s.H, s.D}, seed + 4);
      forward_o = empty(s.dtype, {s.B, sq, s.H, s.D});
      forward_lse = empty(DType::f32, {s.B, s.H, sq});
      const DeviceMemory memory(sparse_attention_forward_workspace(q, k, v, lists, options));
      Runtime runtime;
      runtime.workspace = {memory.data(), memory.bytes()};
      sparse_attention_forward(q, k, v, lists, forward_o, forward_lse, options, runtime);
      finish();
      outputs.emplace_back("dq", s.dtype, rows, s.D, 2 * tolerance);
      outputs.emplace_back("dk", s.dtype, keys, s.D, 2 * tolerance);
      outputs.emplace_back("dv", s.dtype, keys, s.D, 2 * tolerance);
      for (Output& output : outputs) output.exact = s.deterministic;
      scratch = DeviceMemory(sparse_attention_backward_workspace(q, k, v, lists, gradients(0), options));
      const DeviceMemory o(static_cast<std::size_t>(rows * s.D) * sizeof(double)),
          lse(static_cast<std::size_t>(rows) * sizeof(double));
      auto* const o_data = static_cast<double*>(o.data());
      auto* const lse_data = static_cast<double*>(lse.data());
      reference_forward(reference, o_data, lse_data);
      reference_backward(reference, d_o.data, o_data, lse_data, outputs[0].reference(), outputs[1].reference(),
                         outputs[2].reference());
    }
    finish();
    for (Output& output : outputs) output.average = root_mean_square(output.reference(), output.rows * output.width);
  }

  void launch(int slot, void* stream) override {
    Runtime runtime;
    runtime.stream = stream;
    runtime.workspace = {scratch.data(), scratch.bytes()};
    if (s.pass == Pass::backward) {
      sparse_attention_backward(q, k, v, lists, forward_o, forward_lse, d_o, {}, gradients(slot), options, runtime);
      return;
    }
    const TensorView lse = on_gpu(TensorView(outputs[1].slot(slot), DType::f32, {s.B, s.H, sq}));
    sparse_attention_forward(q, k, v, lists, like(q, 0, slot), lse, options, runtime);
  }

 private:
  TensorView empty(DType dtype, std::initializer_list<std::int64_t> shape) {
    TensorView view(nullptr, dtype, shape);
    held.push_back(std::make_unique<DeviceMemory>(static_cast<std::size_t>(view.elements()) * size_of(dtype), 0));
    view.data = held.back()->data();
    return on_gpu(view);
  }
  TensorView random_tensor(std::initializer_list<std::int64_t> shape, std::uint64_t seed) {
    const TensorView view = empty(s.dtype, shape);
    fill_normal(view.data, s.dtype, view.elements(), seed);
    return view;
  }
  template <class T>
  void* upload(const std::vector<T>& values) {
    held.push_back(std::make_unique<DeviceMemory>(uploaded(values)));
    return held.back()->data();
  }

  // The first block, the row's own, and others, some twice and some that are none. By offsets, lists of other lengths:
  // every seventh is empty.
  void make_lists(std::uint64_t seed) {
    std::mt19937_64 random(seed);
    const int of_sequence = (sq + s.query_rows - 1) / s.query_rows, blocks = (s.S + s.block - 1) / s.block;
    std::vector<std::vector<std::int32_t>> named(static_cast<std::size_t>(s.B) * of_sequence * s.units);
    std::vector<std::uint8_t> open(static_cast<std::size_t>(s.B) * s.H * sq * s.S);
    const auto at = [&](int b, int n, int unit) {
      return (static_cast<std::size_t>(b) * of_sequence + n) * s.units + unit;
    };
    for (int b = 0; b < s.B; ++b) {
      for (int n = 0; n < of_sequence; ++n) {
        for (int unit = 0; unit < s.units; ++unit) {
          const int length = !s.by_offsets ? s.entries
                             : at(b, n, unit) % 7 == 6
                                 ? 0
                                 : 1 + static_cast<int>(random() % static_cast<unsigned>(s.entries));
          for (int slot = 0; slot < length; ++slot) {
            const int block = slot == 0   ? 0
                              : slot == 1 ? (s.S - sq + n * s.query_rows) / s.block
                                          : static_cast<int>(random() % static_cast<unsigned>(blocks + 1)) - 1;
            named[at(b, n, unit)].push_back(block);
            if (block >= 0) open_block(open, b, n, unit, block);
          }
        }
      }
    }
    std::vector<std::int32_t> entries, offsets;
    if (s.by_offsets) {
      for (int b = 0; b < s.B; ++b) {
        for (int unit = 0; unit < s.units; ++unit) {
          for (int n = 0; n < of_sequence; ++n) {
            const std::vector<std::int32_t>& list = named[at(b, n, unit)];
            offsets.push_back(static_cast<std::int32_t>(entries.size()));
            entries.insert(entries.end(), list.begin(), list.end());
          }
          offsets.push_back(static_cast<std::int32_t>(entries.size()));
        }
      }
      lists.blocks = on_gpu(TensorView(upload(entries), DType::i32, {static_cast<std::int64_t>(entries.size())}));
      lists.offsets = on_gpu(TensorView(upload(offsets), DType::i32, {s.B, s.units, of_sequence + 1}));
    } else {
      for (const std::vector<std::int32_t>& list : named) entries.insert(entries.end(), list.begin(), list.end());
      lists.blocks = on_gpu(TensorView(upload(entries), DType::i32, {s.B, of_sequence, s.units, s.entries}));
    }
    lists.block_size = s.block;
    lists.query_rows = s.query_rows;
    mask = static_cast<const unsigned char*>(upload(open));
  }
  void open_block(std::vector<std::uint8_t>& open, int b, int n, int unit, int block) const {
    const int heads = s.H / s.units, end = std::min((n + 1) * s.query_rows, sq);
    for (int h = unit * heads; h < (unit + 1) * heads; ++h) {
      for (int i = n * s.query_rows; i < end; ++i) {
        std::uint8_t* const row = open.data() + ((std::int64_t{b} * s.H + h) * sq + i) * s.S;
        std::fill(row + block * s.block, row + std::min((block + 1) * s.block, s.S), std::uint8_t{1});
      }
    }
  }

  void describe() {
    Attention& a = reference;
    a.q = q.data, a.k = k.data, a.v = v.data;
    a.q_dtype = a.k_dtype = s.dtype;
    a.B = s.B, a.H = s.H, a.Hkv = s.Hkv, a.Sq = sq, a.Sk = s.S, a.D = a.Dv = s.D;
    a.causal = true;
    a.scale = 1.0f / std::sqrt(static_cast<float>(s.D));
    a.mask = mask;
    const std::int64_t plane = std::int64_t{sq} * s.S;
    const std::int64_t strides[4] = {s.H * plane, plane, s.S, 1};
    std::copy_n(strides, 4, a.mask_stride);
  }

  TensorView like(const TensorView& x, std::size_t output, int slot) const {
    TensorView view = x;
    view.data = outputs[output].slot(slot);
    return view;
  }
  AttentionGradients gradients(int slot) const {
    return {like(q, 0, slot), like(k, 1, slot), like(v, 2, slot), {}, {}};
  }

  const SparseSubject s;
  const int sq;
  std::vector<std::unique_ptr<DeviceMemory>> held;
  TensorView q, k, v, d_o, forward_o, forward_lse;
  BlockLists lists;
  const unsigned char* mask = nullptr;
  AttentionOptions options;
  Attention reference{};
  DeviceMemory scratch;
};

}  // namespace

std::unique_ptr<Subject> make_subject(const SparseSubject& spec, std::uint64_t seed) {
  return std::make_unique<SparseCall>(spec, seed);
}

}  // namespace heddle::soak
