#include "soak/appended_rows.h"

#include <cmath>

namespace heddle::soak {
namespace {

DeviceMemory doubles(std::int64_t count) { return DeviceMemory(static_cast<std::size_t>(count) * sizeof(double)); }
double* data_of(const DeviceMemory& memory) { return static_cast<double*>(memory.data()); }

TensorView new_rows(const AttentionSubject& s, std::uint64_t seed, DeviceMemory& memory) {
  TensorView view(nullptr, s.dtype, {s.B, AppendedRows::kNew, s.Hkv, s.D});
  memory = DeviceMemory(static_cast<std::size_t>(view.elements()) * size_of(s.dtype));
  fill_normal(memory.data(), s.dtype, view.elements(), seed);
  view.data = memory.data();
  view.device = Device::cuda;
  return view;
}

}  // namespace

AppendedRows::AppendedRows(const AttentionSubject& spec, const AttentionOptions& options, const TensorView& k,
                           const TensorView& v, std::uint64_t seed)
    : s(spec), options_(options), k_(k), v_(v) {
  k_new = new_rows(s, seed, k_memory_);
  v_new = new_rows(s, seed + 1, v_memory_);
  if (s.rotary > 0) make_tables();
  k_rows_ = doubles(k_new.elements());
  v_rows_ = doubles(v_new.elements());
  reference_rotate(rows_of(k_new, false), rotation_, data_of(k_rows_));
  reference_rotate(rows_of(v_new, false), {}, data_of(v_rows_));
  if (!s.f8_cache) return;
  const std::int64_t rows = k_new.elements() / s.D;
  k_scales_ = doubles(rows);
  v_scales_ = doubles(rows);
  take_scales(data_of(k_rows_), rows, s.D, data_of(k_scales_));
  take_scales(data_of(v_rows_), rows, s.D, data_of(v_scales_));
}

void AppendedRows::make_tables() {
  const int half = s.rotary / 2;
  std::vector<float> cos, sin;
  for (int position = 0; position < s.Sk; ++position) {
    for (int n = 0; n < half; ++n) {
      const double angle = position * std::pow(10000.0, -2.0 * n / s.rotary);
      cos.push_back(static_cast<float>(std::cos(angle)));
      sin.push_back(static_cast<float>(std::sin(angle)));
    }
  }
  cos_ = uploaded(cos);
  sin_ = uploaded(sin);
  rotary = {.cos = TensorView(cos_.data(), DType::f32, {s.Sk, half}),
            .sin = TensorView(sin_.data(), DType::f32, {s.Sk, half}),
            .interleaved = s.pairs};
  rotary.cos.device = rotary.sin.device = Device::cuda;
  rotation_ = {static_cast<const float*>(cos_.data()), static_cast<const float*>(sin_.data()), s.rotary, s.pairs};
}

RotatedRows AppendedRows::rows_of(const TensorView& x, bool together) const {
  return {x.data,
          x.dtype,
          s.B,
          static_cast<int>(x.shape[1]),
          static_cast<int>(x.shape[2]),
          s.D,
          static_cast<const int*>(options_.seqused_k.data),
          together};
}

SlotRows AppendedRows::slots_of(const TensorView& cache) const {
  return {.data = cache.data,
          .dtype = cache.dtype,
          .B = s.B,
          .rows = kNew,
          .heads = s.Hkv,
          .size = cache.dtype == DType::f32 && s.f8_cache ? 1 : s.D,
          .slots = s.Sk,
          .first = static_cast<const int*>(options_.seqused_k.data),
          .page_table = static_cast<const int*>(options_.page_table.data),
          .page_size = s.page_size,
          .max_pages = s.page_size > 0 ? s.Sk / s.page_size : 0};
}

std::vector<SlotRows> AppendedRows::all_slots() const {
  std::vector<SlotRows> all = {slots_of(k_), slots_of(v_)};
  if (s.f8_cache) all.insert(all.end(), {slots_of(options_.k_scale), slots_of(options_.v_scale)});
  return all;
}

DeviceMemory AppendedRows::reference_cache(const TensorView& cache, const DeviceMemory& rows) const {
  DeviceMemory memory(static_cast<std::size_t>(cache.elements()) * size_of(cache.dtype));
  copy_bytes(memory.data(), cache.data, memory.bytes(), nullptr);
  SlotRows to = slots_of(cache);
  to.data = memory.data();
  write_rows(data_of(rows), to);
  return memory;
}

std::vector<DeviceMemory> AppendedRows::describe(const TensorView& q, Attention& reference) const {
  std::vector<DeviceMemory> held;
  held.push_back(reference_cache(k_, k_rows_));
  held.push_back(reference_cache(v_, v_rows_));
  reference.k = held[0].data();
  reference.v = held[1].data();
  if (s.f8_cache) {
    const void* const k_scale = held.emplace_back(reference_cache(options_.k_scale, k_scales_)).data();
    const void* const v_scale = held.emplace_back(reference_cache(options_.v_scale, v_scales_)).data();
    reference.k_scale = static_cast<const float*>(k_scale);
    reference.v_scale = static_cast<const float*>(v_scale);
  }
  if (s.rotary == 0) return held;
  const DeviceMemory rotated = doubles(q.elements());
  reference_rotate(rows_of(q, !s.causal && s.window < 0), rotation_, data_of(rotated));
  void* const q_data = held.emplace_back(static_cast<std::size_t>(q.elements()) * sizeof(float)).data();
  write_rows(data_of(rotated),
             {.data = q_data, .dtype = DType::f32, .B = s.B, .rows = s.Sq, .heads = s.H, .size = s.D, .slots = s.Sq});
  finish();
  reference.q = q_data;
  reference.q_dtype = DType::f32;
  return held;
}

void AppendedRows::add_outputs(std::vector<Output>& outputs, double tolerance) {
  first_output_ = outputs.size();
  const auto add = [&](const char* name, DType dtype, int width, double allowed, const DeviceMemory& rows) {
    Output& output = outputs.emplace_back(name, dtype, std::int64_t{s.B} * kNew * s.Hkv, width, allowed);
    copy_bytes(output.reference(), rows.data(), rows.bytes(), nullptr);
  };
  // What is expected is not rounded; e4m3 rounds to a part in 16.
  const double of_rows = s.f8_cache ? 0.05 : tolerance;
  add("k in the cache", k_.dtype, s.D, of_rows, k_rows_);
  add("v in the cache", v_.dtype, s.D, of_rows, v_rows_);
  if (!s.f8_cache) return;
  add("k_scale in the cache", DType::f32, 1, tolerance, k_scales_);
  add("v_scale in the cache", DType::f32, 1, tolerance, v_scales_);
}

void AppendedRows::keep(const std::vector<Output>& outputs, int slot, void* stream) const {
  std::size_t n = first_output_;
  for (const SlotRows& rows : all_slots()) read_rows(rows, outputs[n++].slot(slot), stream);
}

void AppendedRows::spoil(void* stream) const {
  for (const SlotRows& rows : all_slots()) fill_rows(rows, 0xFF, stream);
}

}  // namespace heddle::soak
