#include <algorithm>
#include <cmath>
#include <optional>
#include <random>

#include "core/check.h"
#include "soak/appended_rows.h"

namespace heddle::soak {

Output::Output(std::string called, DType type, std::int64_t row_count, std::int64_t row_width, double allowed)
    : name(std::move(called)),
      dtype(type),
      rows(row_count),
      width(row_width),
      tolerance(allowed),
      expected(static_cast<std::size_t>(rows * width) * sizeof(double)),
      first(static_cast<std::size_t>(rows * row_bytes())) {
  for (int n = 0; n < kSlots; ++n) slots.emplace_back(first.bytes(), 0xFF);
}

namespace {

using Plane = AttentionSubject::Plane;

TensorView on_gpu(TensorView view) {
  view.device = Device::cuda;
  return view;
}

class AttentionCall : public Subject {
 public:
  AttentionCall(const AttentionSubject& spec, std::uint64_t seed) : s(spec), random(seed) {
    if (s.Sk == 0) s.Sk = s.Sq;
    make_lengths();
    const DType kv_type = s.f8_cache ? DType::f8e4m3 : s.dtype;
    q = of_rows(s.dtype, seed + 1, s.Sq, s.H);
    k = of_rows(kv_type, seed + 2, s.Sk, s.Hkv);
    v = of_rows(kv_type, seed + 3, s.Sk, s.Hkv);
    make_options();
    make_pages();
    describe();
    if (s.appends) appended.emplace(s, options, k, v, seed + 5);
    const std::vector<DeviceMemory> operands =
        appended ? appended->describe(q, reference) : std::vector<DeviceMemory>();
    const double tolerance = allowed();
    const DType out = s.dtype == DType::f8e4m3 ? DType::bf16 : s.dtype;
    const std::int64_t heads = rows() * s.H;
    DeviceMemory o(static_cast<std::size_t>(heads * s.D) * sizeof(double)),
        lse(static_cast<std::size_t>(heads) * sizeof(double));
    auto* const o_data = static_cast<double*>(o.data());
    auto* const lse_data = static_cast<double*>(lse.data());
    if (s.pass == Pass::forward) {
      outputs.emplace_back("o", out, heads, s.D, tolerance);
      outputs.emplace_back("lse", DType::f32, heads, 1, tolerance / 8);
      if (appended) appended->add_outputs(outputs, tolerance / 4);
      scratch = DeviceMemory(workspace());
      reference_forward(reference, outputs[0].reference(), outputs[1].reference());
    } else {
      d_o = of_rows(s.dtype, seed + 4, s.Sq, s.H);
      make_forward();
      const DType of_gradients = s.pieces ? DType::f32 : s.dtype;
      outputs.emplace_back("dq", of_gradients, heads, s.D, tolerance);
      outputs.emplace_back("dk", of_gradients, keys() * s.Hkv, s.D, tolerance);
      outputs.emplace_back("dv", of_gradients, keys() * s.Hkv, s.D, tolerance);
      for (Output& output : outputs) output.exact = s.deterministic;
      scratch = DeviceMemory(workspace());
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
    if (s.pieces) {
      for (const Output& output : outputs) fill_bytes(output.slot(slot), 0, output.first.bytes(), stream);
      for (const int half : {0, 1}) {
        attention_backward(q, half_of(k, half), half_of(v, half), forward_o, forward_lse, d_o, {},
                           gradients_of_half(slot, half), options_of_half(half), runtime);
      }
    } else if (s.pass == Pass::backward) {
      attention_backward(q, k, v, forward_o, forward_lse, d_o, {}, gradients(slot), options, runtime);
    } else if (appended) {
      attention_with_kv_cache(q, appended->k_new, appended->v_new, k, v, like(q, 0, slot), lse_view(slot),
                              appended->rotary, options, runtime);
    } else {
      attention_forward(q, k, v, like(q, 0, slot), lse_view(slot), options, runtime);
    }
  }
  void keep(int slot, void* stream) override {
    if (appended) appended->keep(outputs, slot, stream);
  }
  void spoil(void* stream) override {
    if (appended) appended->spoil(stream);
  }

 private:
  std::int64_t rows() const { return s.packed ? total : std::int64_t{s.B} * s.Sq; }
  std::int64_t keys() const { return s.packed ? total : std::int64_t{s.B} * s.Sk; }

  // Of the length of a row: some roundings of the format. A chunk of another row is far more.
  double allowed() const { return (s.pass == Pass::backward ? 2 : 1) * rounding(); }
  double rounding() const {
    if (s.dtype == DType::f8e4m3 || s.f8_cache) return s.f8_cache && s.dtype != DType::f8e4m3 ? 0.03 : 0.12;
    if (s.precision == Precision::int8_qk) return 0.06;
    if (s.dtype == DType::f32) return s.precision == Precision::tf32 ? 0.01 : 0.001;
    return s.dtype == DType::f16 ? 0.01 : 0.03;
  }

  DeviceMemory& hold(DeviceMemory memory) {
    held.push_back(std::make_unique<DeviceMemory>(std::move(memory)));
    return *held.back();
  }
  TensorView random_tensor(DType dtype, std::uint64_t seed, std::initializer_list<std::int64_t> shape) {
    TensorView view(nullptr, dtype, shape);
    DeviceMemory& memory = hold(DeviceMemory(static_cast<std::size_t>(view.elements()) * size_of(dtype)));
    fill_normal(memory.data(), dtype, view.elements(), seed);
    view.data = memory.data();
    return on_gpu(view);
  }
  TensorView of_rows(DType dtype, std::uint64_t seed, std::int64_t length, std::int64_t heads) {
    return s.packed ? random_tensor(dtype, seed, {total, heads, s.D})
                    : random_tensor(dtype, seed, {s.B, length, heads, s.D});
  }
  template <class T>
  TensorView upload(const std::vector<T>& values, DType dtype, std::initializer_list<std::int64_t> shape) {
    return on_gpu(TensorView(hold(uploaded(values)).data(), dtype, shape));
  }
  std::vector<float> uniform(std::int64_t count, float from, float to) {
    std::uniform_real_distribution<float> numbers(from, to);
    std::vector<float> out(static_cast<std::size_t>(count));
    for (float& x : out) x = numbers(random);
    return out;
  }

  void make_lengths() {
    if (!s.packed) return;
    // Some short ones, and all of the longest at least once.
    std::vector<std::int32_t> cu = {0};
    for (int b = 0; b < s.B; ++b) {
      const int length = b == 0 ? s.Sq : static_cast<int>(random() % static_cast<unsigned>(s.Sq)) + 1;
      cu.push_back(cu.back() + length);
    }
    total = cu.back();
    options.cu_seqlens_q = options.cu_seqlens_k = upload(cu, DType::i32, {s.B + 1});
    options.max_seqlen_q = options.max_seqlen_k = s.Sq;
  }

  void make_options() {
    options.force = s.candidate;
    options.precision = s.precision;
    options.deterministic = s.deterministic;
    options.batch_invariant = s.batch_invariant;
    options.softcap = s.softcap;
    if (s.causal) options.causal = s.key_step > 1 || s.pieces ? Causal::top_left : Causal::bottom_right;
    options.key_step = s.key_step;
    options.window_left = s.window;
    if (s.pieces) {
      const auto of_all = [&](int position) {
        return upload(std::vector<std::int32_t>(static_cast<std::size_t>(s.B), position), DType::i32, {s.B});
      };
      no_keys_before = of_all(0), half_before = of_all(s.Sk / 2);
    }
    if (s.alibi) options.alibi_slopes = upload(uniform(s.H, 0.01f, 0.1f), DType::f32, {s.H});
    if (s.sink) options.sink = upload(uniform(s.H, -1.0f, 1.0f), DType::f32, {s.H});
    if (s.bias != Plane::none) {
      const DType dtype = s.bias == Plane::f32_rows ? DType::f32 : s.dtype;
      const std::int64_t heads = s.bias == Plane::keys ? 1 : s.H, height = s.bias == Plane::keys ? 1 : s.Sq;
      options.bias = random_tensor(dtype, random(), {1, heads, height, s.Sk});
    }
    if (s.mask != Plane::none) {
      const std::int64_t height = s.mask == Plane::keys ? 1 : s.Sq;
      std::vector<std::uint8_t> open(static_cast<std::size_t>(height * s.Sk));
      for (std::uint8_t& x : open) x = random() % 5 != 0;
      options.mask = upload(open, DType::boolean, {1, 1, height, s.Sk});
      if (s.poison) poison_closed(open);
    }
    if (s.lengths) {
      std::vector<std::int32_t> used;
      // The last row of q, which may stand behind the last new key, has a place in the tables of rotary angles.
      const int most = s.Sk - (s.appends ? std::max(s.Sq - AppendedRows::kNew, 0) : 0);
      for (int b = 0; b < s.B; ++b) used.push_back(most - static_cast<int>(random() % static_cast<unsigned>(s.Sk / 2)));
      options.seqused_k = upload(used, DType::i32, {s.B});
      used_keys = options.seqused_k;
      if (s.appends) {  // lengths before the append
        for (std::int32_t& n : used) n -= AppendedRows::kNew;
        options.seqused_k = upload(used, DType::i32, {s.B});
      }
    }
    if (s.scales) {
      const auto scales = [&](std::int64_t heads, std::int64_t length) {
        const std::int64_t height = s.scales_by_token ? length : 1;
        return upload(uniform(s.B * height * heads, 0.5f, 1.5f), DType::f32, {s.B, height, heads});
      };
      if (s.dtype == DType::f8e4m3) options.q_scale = scales(s.H, s.Sq);
      options.k_scale = scales(s.Hkv, s.Sk);
      options.v_scale = scales(s.Hkv, s.Sk);
    }
  }

  // open: of each key, of all sequences.
  void poison_closed(const std::vector<std::uint8_t>& open) {
    for (const TensorView* x : {&k, &v}) {
      const std::size_t row = static_cast<std::size_t>(x->shape[2] * x->shape[3]) * size_of(x->dtype);
      for (std::size_t n = 0; n < open.size() * static_cast<std::size_t>(s.B); ++n) {
        if (open[n % open.size()] == 0) fill_bytes(static_cast<std::byte*>(x->data) + n * row, 0xFF, row, nullptr);
      }
    }
  }

  // The cache's pages in another order.
  void make_pages() {
    if (s.page_size == 0) return;
    const int each = s.Sk / s.page_size;
    std::vector<std::int32_t> table(static_cast<std::size_t>(s.B * each));
    for (std::size_t n = 0; n < table.size(); ++n) table[n] = static_cast<std::int32_t>(n);
    std::ranges::shuffle(table, random);
    options.page_table = upload(table, DType::i32, {s.B, each});
    for (TensorView* x : {&k, &v}) {
      *x = on_gpu(TensorView(x->data, x->dtype, {s.B * each, s.page_size, s.Hkv, s.D}));
    }
    for (TensorView* x : {&options.k_scale, &options.v_scale}) {
      if (s.scales_by_token) *x = on_gpu(TensorView(x->data, x->dtype, {s.B * each, s.page_size, s.Hkv}));
    }
  }

  void describe() {
    Attention& a = reference;
    a.q = q.data, a.k = k.data, a.v = v.data;
    a.q_dtype = s.dtype;
    a.k_dtype = k.dtype;
    a.B = s.B, a.H = s.H, a.Hkv = s.Hkv, a.Sq = s.Sq, a.Sk = s.Sk, a.D = a.Dv = s.D;
    a.causal = s.causal;
    a.key_step = s.key_step;
    a.left = s.window;
    a.scale = 1.0f / std::sqrt(static_cast<float>(s.D));
    a.softcap = s.softcap;
    a.alibi = static_cast<const float*>(options.alibi_slopes.data);
    a.sink = static_cast<const float*>(options.sink.data);
    const auto strides = [](const TensorView& x, std::int64_t(&out)[4]) {
      for (int n = 0; n < 4; ++n)
        out[n] = x.shape[static_cast<std::size_t>(n)] == 1 ? 0 : x.stride[static_cast<std::size_t>(n)];
    };
    a.bias = options.bias.data;
    a.bias_dtype = options.bias.dtype;
    if (options.bias.given()) strides(options.bias, a.bias_stride);
    a.mask = static_cast<const unsigned char*>(options.mask.data);
    if (options.mask.given()) strides(options.mask, a.mask_stride);
    a.cu_q = static_cast<const int*>(options.cu_seqlens_q.data);
    a.cu_k = static_cast<const int*>(options.cu_seqlens_k.data);
    a.total_q = static_cast<int>(total);
    a.used_k = static_cast<const int*>(used_keys.data);
    if (s.page_size > 0) {
      a.page_table = static_cast<const int*>(options.page_table.data);
      a.page_size = s.page_size;
      a.max_pages = s.Sk / s.page_size;
    }
    a.q_scale = static_cast<const float*>(options.q_scale.data);
    a.k_scale = static_cast<const float*>(options.k_scale.data);
    a.v_scale = static_cast<const float*>(options.v_scale.data);
    a.scales_by_head = !s.scales_by_token;
  }

  // o and lse for a backward, by the forward that runs by itself.
  void make_forward() {
    const std::int64_t heads = rows() * s.H;
    forward_o = q;
    forward_o.data = hold(DeviceMemory(static_cast<std::size_t>(heads * s.D) * size_of(s.dtype))).data();
    void* const lse = hold(DeviceMemory(static_cast<std::size_t>(heads) * sizeof(float))).data();
    forward_lse =
        on_gpu(s.packed ? TensorView(lse, DType::f32, {s.H, total}) : TensorView(lse, DType::f32, {s.B, s.H, s.Sq}));
    AttentionOptions free = options;
    free.force.clear();
    const DeviceMemory memory(attention_forward_workspace(q, k, v, free));
    Runtime runtime;
    runtime.workspace = {memory.data(), memory.bytes()};
    attention_forward(q, k, v, forward_o, forward_lse, free, runtime);
    finish();
  }

  std::size_t workspace() const {
    if (s.pieces) {
      return attention_backward_workspace(q, half_of(k, 0), half_of(v, 0), gradients_of_half(0, 0), options_of_half(0));
    }
    if (s.pass == Pass::backward) return attention_backward_workspace(q, k, v, gradients(0), options);
    if (appended) {
      return attention_with_kv_cache_workspace(q, appended->k_new, appended->v_new, k, v, appended->rotary, options);
    }
    return attention_forward_workspace(q, k, v, options);
  }
  TensorView like(const TensorView& x, std::size_t output, int slot) const {
    TensorView view = x;
    view.data = outputs[output].slot(slot);
    view.dtype = outputs[output].dtype;
    return view;
  }
  TensorView lse_view(int slot) const {
    void* const data = outputs[1].slot(slot);
    return on_gpu(s.packed ? TensorView(data, DType::f32, {s.H, total})
                           : TensorView(data, DType::f32, {s.B, s.H, s.Sq}));
  }
  AttentionGradients gradients(int slot) const {
    return {like(q, 0, slot), like(k, 1, slot), like(v, 2, slot), {}, {}};
  }
  // Keys [half Sk / 2, (half + 1) Sk / 2) of each sequence of [B, Sk, Hkv, D].
  TensorView half_of(TensorView x, int half) const {
    x.shape[1] /= 2;
    x.data =
        static_cast<std::byte*>(x.data) + static_cast<std::size_t>(half * x.shape[1] * x.stride[1]) * size_of(x.dtype);
    return x;
  }
  AttentionGradients gradients_of_half(int slot, int half) const {
    AttentionGradients out = gradients(slot);
    out.dk = half_of(out.dk, half), out.dv = half_of(out.dv, half);
    out.accumulate = out.merged = true;
    return out;
  }
  AttentionOptions options_of_half(int half) const {
    AttentionOptions out = options;
    out.key_offset = half == 0 ? no_keys_before : half_before;
    return out;
  }

  AttentionSubject s;
  std::mt19937_64 random;
  std::vector<std::unique_ptr<DeviceMemory>> held;
  std::int64_t total = 0;  // rows, when packed
  TensorView q, k, v, d_o, forward_o, forward_lse, used_keys;
  TensorView no_keys_before, half_before;  // key_offset of either half
  AttentionOptions options;
  Attention reference{};
  std::optional<AppendedRows> appended;
  DeviceMemory scratch;
};

}  // namespace

std::unique_ptr<Subject> make_subject(const AttentionSubject& spec, std::uint64_t seed) {
  return std::make_unique<AttentionCall>(spec, seed);
}

}  // namespace heddle::soak
