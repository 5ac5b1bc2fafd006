#include "problem.h"

#include <algorithm>
#include <cmath>

#include "choices.h"
#include "cuda/backend.h"
#include "heddle/error.h"
#include "heddle/runtime.h"
#include "problem/attended_pairs.h"

namespace heddle::cli {

void CommonFlags::add_to(CLI::App& app, bool runs_kernels) {
  app.add_flag("--json", json, "Print JSON instead of text");
  if (!runs_kernels) return;
  app.add_option("--threads", threads, "Threads (default: HEDDLE_NUM_THREADS, or all processors)")
      ->check(CLI::Range(1, kMaxThreads));
  one_of(app.add_option("--target", target, "SIMD target (default: HEDDLE_CPU_TARGET, or the best)"), target_names());
}

void CommonFlags::apply() const {
  if (threads > 0) set_num_threads(threads);
  if (!target.empty()) set_cpu_target(target);
}

void OptionFlags::add_to(CLI::App& app) {
  one_of(app.add_option("--causal", causal, "Causal mask, aligned with a corner"), {"none", "top_left", "bottom_right"})
      ->capture_default_str();
  app.add_option("--window", window, "Keys that each row sees to its left and right; -1 is open")->expected(2);
  app.add_option("--q-step", q_step, "Positions from a row to the next (causal and window are about positions)");
  app.add_option("--key-step", key_step, "Positions from a key to the next");
  app.add_option("--scale", scale, "Factor of the scores (default: 1 / sqrt(D))");
  app.add_option("--softcap", softcap, "Cap c of the scores: c * tanh(s / c); 0 is none");
  app.add_option("--dropout", dropout, "Probability of dropping a pair");
  app.add_option("--dropout-seed", dropout_seed, "Seed of dropout");
  app.add_option("--dropout-offset", dropout_offset, "Offset of dropout's counter");
  one_of(app.add_option("--method", method, "Only candidates of this method"), {"flash", "baseline"});
  add_force_flag(app, force);
  app.add_flag("--batch-invariant", batch_invariant, "A row's bits do not depend on the rest of the batch");
  app.add_flag("--deterministic", deterministic, "Backward: bitwise repeatable");
}

void OptionFlags::fill(AttentionOptions& options) const {
  options.causal = causal == "top_left"       ? Causal::top_left
                   : causal == "bottom_right" ? Causal::bottom_right
                                              : Causal::none;
  if (!window.empty()) {
    options.window_left = window[0];
    options.window_right = window[1];
  }
  options.q_step = q_step;
  options.key_step = key_step;
  if (scale) options.scale = static_cast<float>(*scale);
  options.softcap = static_cast<float>(softcap);
  options.dropout = {static_cast<float>(dropout), dropout_seed, dropout_offset};
  options.method = method;
  options.force = force;
  options.batch_invariant = batch_invariant;
  options.deterministic = deterministic;
}

void OptionFlags::add_to(Json& problem) const {
  problem["causal"] = causal;
  if (!window.empty()) problem["window"] = window;
  if (q_step != 1) problem["q_step"] = q_step;
  if (key_step != 1) problem["key_step"] = key_step;
  if (softcap > 0) problem["softcap"] = softcap;
  if (dropout > 0) problem["dropout"] = dropout;
}

void ProblemFlags::add_to(CLI::App& app) {
  app.add_option("-b,--batch", batch, "Sequences, B")->capture_default_str();
  app.add_option("-n,--heads", heads, "Query heads, H")->capture_default_str();
  app.add_option("--kv-heads", kv_heads, "Key/value heads, Hkv (default: H)");
  app.add_option("-s,--length", length_q, "Queries of a sequence, Sq")->capture_default_str();
  app.add_option("--keys", length_k, "Keys of a sequence, Sk (default: Sq)");
  app.add_option("-d,--head-size", head_size, "Head size of q and k, D")->capture_default_str();
  app.add_option("--head-size-v", head_size_v, "Head size of v and o, Dv (default: D)");
  add_dtype_flag(app, dtype, "Of q, k and v")->capture_default_str();
  app.add_flag("--bias", bias, "With an additive bias [1, H, Sq, Sk]");
  app.add_flag("--mask", mask, "With a boolean mask [B, 1, Sq, Sk]");
  app.add_flag("--alibi", alibi, "With ALiBi slopes [H]");
  app.add_flag("--sink", sink, "With an attention sink [H]");
  app.add_flag("--packed", packed, "Sequences packed without padding (cu_seqlens)");
  app.add_option("--page-size", page_size, "Keys in a paged cache of pages this long");
  options.add_to(app);
}

std::string ProblemFlags::name() const {
  std::string text = "B" + std::to_string(batch) + " H" + std::to_string(heads);
  if (Hkv() != heads) text += "/" + std::to_string(Hkv());
  text += " S" + std::to_string(length_q);
  if (Sk() != length_q) text += "x" + std::to_string(Sk());
  text += " D" + std::to_string(head_size);
  if (Dv() != head_size) text += "/" + std::to_string(Dv());
  if (options.causal != "none") text += " " + options.causal;
  if (!options.window.empty()) {
    text += " window " + std::to_string(options.window[0]) + "," + std::to_string(options.window[1]);
  }
  if (options.q_step != 1) text += " q step " + std::to_string(options.q_step);
  if (options.key_step != 1) text += " key step " + std::to_string(options.key_step);
  for (const auto& [given, word] : {std::pair{bias, " bias"},
                                    {mask, " mask"},
                                    {alibi, " alibi"},
                                    {sink, " sink"},
                                    {packed, " packed"},
                                    {options.softcap > 0, " softcap"},
                                    {options.dropout > 0, " dropout"}}) {
    if (given) text += word;
  }
  if (page_size > 0) text += " page " + std::to_string(page_size);
  return text;
}

Json ProblemFlags::json() const {
  Json out = {
      {"batch", batch}, {"heads", heads},         {"kv_heads", Hkv()},   {"queries", length_q},
      {"keys", Sk()},   {"head_size", head_size}, {"head_size_v", Dv()}, {"dtype", name_of(dtype_named(dtype))}};
  options.add_to(out);
  for (const auto& [given, word] :
       {std::pair{bias, "bias"}, {mask, "mask"}, {alibi, "alibi"}, {sink, "sink"}, {packed, "packed"}}) {
    if (given) out[word] = true;
  }
  if (page_size > 0) out["page_size"] = page_size;
  if (device != "cpu") out["device"] = device;
  return out;
}

void require_at_least_one(std::int64_t value, const char* flag) {
  if (value < 1) throw Error(std::string(flag) + " is " + std::to_string(value) + ": it must be at least 1");
}

void ProblemFlags::check() const {
  require_at_least_one(batch, "--batch");
  require_at_least_one(heads, "--heads");
  require_at_least_one(length_q, "--length");
  require_at_least_one(head_size, "--head-size");
  if (kv_heads != 0) require_at_least_one(kv_heads, "--kv-heads");
  if (length_k != 0) require_at_least_one(length_k, "--keys");
  if (head_size_v != 0) require_at_least_one(head_size_v, "--head-size-v");
  if (page_size != 0) require_at_least_one(page_size, "--page-size");
  if (packed && page_size > 0) throw Error("--packed and --page-size exclude each other");
}

TensorView ProblemTensors::tensor(DType dtype, const std::vector<std::int64_t>& shape, bool allocate, bool fill) {
  if (allocate) {
    owned_.emplace_back(dtype, shape);
    if (fill) fill_normal(owned_.back().view(), seed_++);
    return owned_.back().view();
  }
  TensorView view;  // without data: it is only asked about
  view.dtype = dtype;
  view.rank = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), view.shape.begin());
  view.stride = contiguous_strides(view.rank, view.shape);
  return view;
}

TensorView ProblemTensors::indices(const std::vector<std::int64_t>& values, const std::vector<std::int64_t>& shape) {
  owned_.emplace_back(DType::i32, shape);
  std::transform(values.begin(), values.end(), static_cast<std::int32_t*>(owned_.back().view().data),
                 [](std::int64_t value) {
                   if (value > INT32_MAX) throw Error("the sequences are longer than 32-bit index data can count");
                   return static_cast<std::int32_t>(value);
                 });
  return owned_.back().view();
}

ProblemTensors::ProblemTensors(const ProblemFlags& f, Memory memory, Gpu* gpu) {
  f.check();
  f.options.fill(options);
  const DType dtype = dtype_named(f.dtype);
  const bool real = memory != Memory::none, backward = memory == Memory::backward;
  const std::int64_t B = f.batch, H = f.heads, Hkv = f.Hkv(), Sq = f.length_q, Sk = f.Sk(), D = f.head_size,
                     Dv = f.Dv();
  const auto like_q = [&](std::int64_t width, bool fill) {
    return f.packed ? tensor(dtype, {B * Sq, H, width}, real, fill) : tensor(dtype, {B, Sq, H, width}, real, fill);
  };
  std::vector<std::int64_t> rows_k = {B, Sk};
  if (f.packed) rows_k = {B * Sk};
  const std::int64_t pages = f.page_size > 0 ? (Sk + f.page_size - 1) / f.page_size : 0;
  if (pages > 0) rows_k = {B * pages, f.page_size};
  const auto like_k = [&](std::int64_t width, bool fill) {
    std::vector<std::int64_t> shape = rows_k;
    shape.insert(shape.end(), {Hkv, width});
    return tensor(dtype, shape, real, fill);
  };
  q = like_q(D, true);
  k = like_k(D, true);
  v = like_k(Dv, true);
  o = like_q(Dv, false);
  lse = f.packed ? tensor(DType::f32, {H, B * Sq}, real, false) : tensor(DType::f32, {B, H, Sq}, real, false);
  if (backward) {
    d_o = like_q(Dv, true);
    gradients = {like_q(D, false), like_k(D, false), like_k(Dv, false), {}, {}};
  }

  if (f.packed) {
    std::vector<std::int64_t> cu_q, cu_k;
    for (std::int64_t b = 0; b <= B; ++b) {
      cu_q.push_back(b * Sq);
      cu_k.push_back(b * Sk);
    }
    options.cu_seqlens_q = indices(cu_q, {B + 1});
    options.cu_seqlens_k = indices(cu_k, {B + 1});
    options.max_seqlen_q = Sq;  // which are not looked for on a GPU
    options.max_seqlen_k = Sk;
  }
  if (pages > 0) {
    std::vector<std::int64_t> table(static_cast<std::size_t>(B * pages));
    // Neighbours in a sequence lie 7 pages apart, as in a cache that has been used for a while.
    const std::int64_t step = (B * pages) % 7 == 0 ? 1 : 7;
    for (std::size_t i = 0; i < table.size(); ++i) table[i] = static_cast<std::int64_t>(i) * step % (B * pages);
    options.page_table = indices(table, {B, pages});
    options.seqused_k = indices(std::vector<std::int64_t>(static_cast<std::size_t>(B), Sk), {B});
  }
  if (f.bias) options.bias = tensor(DType::f32, {1, H, Sq, pages > 0 ? pages * f.page_size : Sk}, real);
  if (f.mask) {
    options.mask = tensor(DType::boolean, {B, 1, Sq, pages > 0 ? pages * f.page_size : Sk}, real, false);
    auto* bits = static_cast<std::uint8_t*>(options.mask.data);
    for (std::int64_t i = 0, count = real ? options.mask.elements() : 0; i < count; ++i) bits[i] = i % 5 != 3;
  }
  if (f.alibi) {
    options.alibi_slopes = tensor(DType::f32, {H}, true, false);
    for (std::int64_t h = 0; h < H; ++h) {
      static_cast<float*>(options.alibi_slopes.data)[h] =
          static_cast<float>(std::exp2(-8.0 * static_cast<double>(h + 1) / static_cast<double>(H)));
    }
  }
  if (f.sink) options.sink = tensor(DType::f32, {H}, true);
  if (f.device == "cuda") move_to_gpu(gpu);
}

void ProblemTensors::move_to_gpu(Gpu* gpu) {
  for (TensorView* view : {&q, &k, &v, &o, &lse, &d_o, &gradients.dq, &gradients.dk, &gradients.dv, &options.bias,
                           &options.mask, &options.alibi_slopes, &options.sink, &options.cu_seqlens_q,
                           &options.cu_seqlens_k, &options.seqused_k, &options.page_table}) {
    if (!view->given()) continue;
    if (gpu != nullptr) *view = gpu->copy(*view);
    view->device = Device::cuda;
  }
  if (gpu != nullptr) owned_.clear();
}

void require_device(const char* verb, const std::string& device) {
  if (device != "cuda") return;
  const cuda::Gpus seen = cuda::gpus();
  if (seen.list.empty()) throw RuntimeError(std::string("[") + verb + "] --device is cuda: " + seen.absence);
}

std::string place_text(const std::string& device) {
  if (device != "cuda") return std::to_string(num_threads()) + " threads, " + cpu_target();
  const cuda::Gpus seen = cuda::gpus();
  return seen.list.at(seen.current).name;
}

void add_place(Json& out, const std::string& device) {
  if (device == "cuda") {
    out["gpu"] = place_text(device);
    return;
  }
  out["threads"] = num_threads();
  out["target"] = cpu_target();
}

double attended_pairs(const ProblemFlags& f) {
  AttentionProblem p;
  if (!f.options.window.empty()) p.window_left = f.options.window[0], p.window_right = f.options.window[1];
  if (f.options.causal != "none") p.causal = Causal::top_left;
  p.q_step = f.options.q_step;
  p.key_step = f.options.key_step;
  const bool from_0 = f.options.causal == "top_left" || p.stepped();
  const std::int64_t Sq = f.length_q, Sk = f.Sk(), off = from_0 ? 0 : Sk - Sq;
  return attended_pairs(p.band({.sq = Sq, .sk = Sk, .off = off}), Sq);
}

double flops(const ProblemFlags& f, Pass pass) {
  const double D = static_cast<double>(f.head_size), Dv = static_cast<double>(f.Dv());
  // Forward: Q K^T and P V. Backward: Q K^T again, dO V^T, P^T dO, dS K, dS^T Q.
  const double per_pair = pass == Pass::forward ? 2 * (D + Dv) : 2 * (3 * D + 2 * Dv);
  return static_cast<double>(f.batch * f.heads) * attended_pairs(f) * per_pair;
}

}  // namespace heddle::cli
