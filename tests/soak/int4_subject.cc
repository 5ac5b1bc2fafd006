#include <cstddef>

#include "core/dtypes.h"
#include "heddle/int4_cache.h"
#include "soak/subject.h"

namespace heddle::soak {
namespace {

constexpr std::int64_t kTail = 128;  // slots of the rings

// Decoding over a cache in 4 bits, which appends on the GPU have filled. The CPU says what comes out: it reads the same
// codes.
class Int4Call : public Subject {
 public:
  Int4Call(const Int4Subject& spec, std::uint64_t seed) : s(spec) {
    const std::int64_t max_blocks = s.keys / 64, bytes = int4_cache_block_bytes(s.D, s.D);
    const auto b = static_cast<std::int64_t>(s.B), heads = static_cast<std::int64_t>(s.Hkv);
    q = tensor(s.dtype, {b, 1, s.H, s.D}, seed);
    cache.k_tail = tensor(s.dtype, {b, kTail, heads, s.D}, 0);
    cache.v_tail = tensor(s.dtype, {b, kTail, heads, s.D}, 0);
    cache.blocks = tensor(DType::u8, {b, max_blocks, heads, bytes}, 0);
    std::vector<std::int32_t> lengths(static_cast<std::size_t>(b), s.keys);
    const DeviceMemory none(static_cast<std::size_t>(b) * sizeof(std::int32_t), 0);
    fill(none, seed);
    used = uploaded(lengths);
    options.seqused_k = indices(used.data());
    options.force = "sm80_decode";
    options.batch_invariant = s.batch_invariant;
    outputs.emplace_back("o", s.dtype, b * s.H, s.D, s.dtype == DType::f16 ? 0.01 : 0.03);
    outputs.emplace_back("lse", DType::f32, b * s.H, 1, 0.005);
    scratch = DeviceMemory(attention_over_int4_cache_workspace(q, cache, options));
    ask_cpu(lengths);
    for (Output& output : outputs) output.average = root_mean_square(output.reference(), output.rows * output.width);
  }

  void launch(int slot, void* stream) override {
    Runtime runtime;
    runtime.stream = stream;
    runtime.workspace = {scratch.data(), scratch.bytes()};
    TensorView o = q, lse(outputs[1].slot(slot), DType::f32, {s.B, s.H, 1});
    o.data = outputs[0].slot(slot);
    lse.device = Device::cuda;
    attention_over_int4_cache(q, cache, o, lse, options, runtime);
  }

 private:
  TensorView tensor(DType dtype, std::initializer_list<std::int64_t> shape, std::uint64_t seed) {
    TensorView view(nullptr, dtype, shape);
    held.emplace_back(static_cast<std::size_t>(view.elements()) * size_of(dtype), 0);
    view.data = held.back().data();
    view.device = Device::cuda;
    if (seed != 0) fill_normal(view.data, dtype, view.elements(), seed);
    return view;
  }
  TensorView indices(void* data) const {
    TensorView view(data, DType::i32, {s.B});
    view.device = Device::cuda;
    return view;
  }

  void fill(const DeviceMemory& none, std::uint64_t seed) {
    const TensorView k_new = tensor(s.dtype, {s.B, s.keys, s.Hkv, s.D}, seed + 1);
    const TensorView v_new = tensor(s.dtype, {s.B, s.keys, s.Hkv, s.D}, seed + 2);
    finish();
    append_int4_cache(k_new, v_new, cache, indices(none.data()), {}, {});
    finish();
  }

  void ask_cpu(std::vector<std::int32_t>& lengths) {
    std::vector<std::vector<std::byte>> host;
    const auto copied = [&](TensorView view) {
      host.emplace_back(static_cast<std::size_t>(view.elements()) * size_of(view.dtype));
      for (const DeviceMemory& memory : held) {
        if (memory.data() == view.data) memory.read(0, host.back().data(), host.back().size());
      }
      view.data = host.back().data();
      view.device = Device::cpu;
      return view;
    };
    const Int4Cache there = {copied(cache.blocks), copied(cache.k_tail), copied(cache.v_tail), {}, {}};
    const TensorView q_there = copied(q);
    std::vector<float> lse(static_cast<std::size_t>(s.B * s.H));
    std::vector<std::uint16_t> o(static_cast<std::size_t>(s.B * s.H * s.D));
    AttentionOptions of_cpu;
    of_cpu.seqused_k = TensorView(lengths.data(), DType::i32, {s.B});
    WorkspaceBuffer buffer;
    Runtime runtime;
    runtime.workspace = buffer.get(attention_over_int4_cache_workspace(q_there, there, of_cpu));
    TensorView o_view = q_there;
    o_view.data = o.data();
    attention_over_int4_cache(q_there, there, o_view, TensorView(lse.data(), DType::f32, {s.B, s.H, 1}), of_cpu,
                              runtime);
    std::vector<double> o_wide(o.size()), lse_wide(lse.begin(), lse.end());
    for (std::size_t n = 0; n < o.size(); ++n) {
      o_wide[n] = static_cast<double>(load_element(o.data(), s.dtype, static_cast<std::int64_t>(n)));
    }
    outputs[0].expected.write(0, o_wide.data(), o_wide.size() * sizeof(double));
    outputs[1].expected.write(0, lse_wide.data(), lse_wide.size() * sizeof(double));
  }

  const Int4Subject s;
  std::vector<DeviceMemory> held;
  TensorView q;
  Int4Cache cache;
  DeviceMemory used, scratch;
  AttentionOptions options;
};

}  // namespace

std::unique_ptr<Subject> make_subject(const Int4Subject& spec, std::uint64_t seed) {
  return std::make_unique<Int4Call>(spec, seed);
}

}  // namespace heddle::soak
