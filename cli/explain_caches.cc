// heddle explain rotary, append, append-int4, attention-int4: rows rotated, rows appended to caches, and attention over
// a cache in 4 bits.
#include <memory>
#include <vector>

#include "explain.h"

namespace heddle::cli {
namespace {

// A cache of B sequences with so many keys, without pages.
Int4Cache int4_cache(StandIns& views, DType type, std::int64_t batch, std::int64_t keys, std::int64_t kv_heads,
                     std::int64_t head_size) {
  constexpr std::int64_t kRing = 128;
  Int4Cache cache;
  cache.blocks =
      views.tensor(DType::u8, {batch, int4_cache_blocks(keys), kv_heads, int4_cache_block_bytes(head_size, head_size)});
  cache.k_tail = views.tensor(type, {batch, kRing, kv_heads, head_size});
  cache.v_tail = cache.k_tail;
  return cache;
}

// int32 [B], each of them `keys`.
TensorView lengths_of(StandIns& views, std::int64_t batch, std::int64_t keys) {
  return views.indices(std::vector<std::int32_t>(static_cast<std::size_t>(batch), static_cast<std::int32_t>(keys)),
                       {batch});
}

// New rows of B sequences behind `keys` that each has.
struct CacheRows {
  Explained explained;
  std::int64_t batch = 1, length = 1, kv_heads = 8, head_size = 128, keys = 1024;
  std::string dtype, force;
  const char* heads_flag = "--kv-heads";

  void add_to(CLI::App& verb) {
    explained.add_to(verb);
    verb.add_option("-b,--batch", batch, "Sequences, B")->capture_default_str();
    verb.add_option("-s,--length", length, "New rows of a sequence")->capture_default_str();
    verb.add_option(heads_flag, kv_heads, "Heads of a row")->capture_default_str();
    verb.add_option("-d,--head-size", head_size, "Head size, D")->capture_default_str();
    add_dtype_flag(verb, dtype, "Of the rows (default: f32, on a GPU bf16)");
    add_force_flag(verb, force);
  }
  void add_keys_to(CLI::App& verb) {
    verb.add_option("--keys", keys, "Keys that each sequence has before")->capture_default_str();
  }
  const GpuModel* begin() {
    require_at_least_one(batch, "--batch");
    require_at_least_one(length, "--length");
    require_at_least_one(kv_heads, heads_flag);
    require_at_least_one(head_size, "--head-size");
    if (keys != 0) require_at_least_one(keys, "--keys");
    return explained.begin();
  }
  TensorView rows(StandIns& views, DType type) const {
    return views.tensor(type, {batch, length, kv_heads, head_size});
  }
  TensorView lengths(StandIns& views) const { return lengths_of(views, batch, keys); }
  Rotary rotary(StandIns& views, std::int64_t positions) const {
    const TensorView table = views.tensor(DType::f32, {positions, head_size / 2});
    return {.cos = table, .sin = table};
  }
  Json json(DType type) const {
    Json problem = {{"batch", batch}, {"rows", length}, {"kv_heads", kv_heads}, {"head_size", head_size}};
    problem["dtype"] = name_of(type);
    if (explained.device != "cpu") problem["device"] = explained.device;
    return problem;
  }
  std::string line(const TensorView& rows) const { return rows.shape_text() + " " + name_of(rows.dtype); }
};

struct ExplainRotary : CacheRows {
  ExplainRotary() { heads_flag = "--heads"; }
  void run() {
    const GpuModel* const gpu = begin();
    StandIns views(explained.where());
    const TensorView x = rows(views, dtype_named(dtype_or_default(dtype, explained.where())));
    const Rotary table = rotary(views, length);
    const RotaryOptions options{.force = force};
    explained.tell("x " + line(x) + ", rotary", {{"problem", json(x.dtype)}},
                   gpu != nullptr ? explain_apply_rotary_on(*gpu, x, x, table, options)
                                  : explain_apply_rotary(x, x, table, options));
  }
};

struct ExplainAppend : CacheRows {
  std::int64_t page_size = 0;
  bool rotates = false, e4m3 = false, scales = false;

  void run() {
    if (page_size != 0) require_at_least_one(page_size, "--page-size");
    const GpuModel* const gpu = begin();
    StandIns views(explained.where());
    const DType type = dtype_named(dtype_or_default(dtype, explained.where())), stored = e4m3 ? DType::f8e4m3 : type;
    const TensorView k = rows(views, type), v = rows(views, type);
    AppendOptions options{.force = force};
    std::vector<std::int64_t> slots = {batch, keys + length};
    if (page_size > 0) {
      const std::int64_t pages = (keys + length + page_size - 1) / page_size;
      slots = {batch * pages, page_size};
      std::vector<std::int32_t> table(static_cast<std::size_t>(batch * pages));
      for (std::size_t i = 0; i < table.size(); ++i) table[i] = static_cast<std::int32_t>(i);
      options.page_table = views.indices(table, {batch, pages});
    }
    const auto in_cache = [&](DType of, std::vector<std::int64_t> last) {
      last.insert(last.begin(), slots.begin(), slots.end());
      return views.tensor(of, last);
    };
    const TensorView k_cache = in_cache(stored, {kv_heads, head_size}),
                     v_cache = in_cache(stored, {kv_heads, head_size});
    if (scales) {
      options.k_scale = in_cache(DType::f32, {kv_heads});
      options.v_scale = in_cache(DType::f32, {kv_heads});
    }
    if (rotates) options.rotary = rotary(views, keys + length);
    Json problem = json(type);
    problem["cache_dtype"] = name_of(stored);
    if (page_size > 0) problem["page_size"] = page_size;
    if (rotates) problem["rotary"] = true;
    if (scales) problem["scales"] = "by key";
    const TensorView seqlens = lengths(views);
    explained.tell("k_new and v_new " + line(k) + ", cache " + k_cache.shape_text() + " " + name_of(stored) +
                       (rotates ? ", rotary" : ""),
                   {{"problem", problem}},
                   gpu != nullptr ? explain_append_kv_cache_on(*gpu, k, v, k_cache, v_cache, seqlens, options)
                                  : explain_append_kv_cache(k, v, k_cache, v_cache, seqlens, options));
  }
};

struct ExplainInt4Append : CacheRows {
  bool rotates = false;

  void run() {
    const GpuModel* const gpu = begin();
    StandIns views(explained.where());
    const DType type = dtype_named(dtype.empty() ? "bf16" : dtype);
    const TensorView k = rows(views, type), v = rows(views, type);
    const Int4Cache cache = int4_cache(views, type, batch, keys + length, kv_heads, head_size);
    Int4AppendOptions options{.force = force};
    if (rotates) options.rotary = rotary(views, keys + length);
    Json problem = json(type);
    problem["keys"] = keys;
    if (rotates) problem["rotary"] = true;
    const TensorView seqlens = lengths(views);
    explained.tell("k_new and v_new " + line(k) + " behind " + std::to_string(keys) + " keys in 4 bits" +
                       (rotates ? ", rotary" : ""),
                   {{"problem", problem}},
                   gpu != nullptr ? explain_append_int4_cache_on(*gpu, k, v, cache, seqlens, options)
                                  : explain_append_int4_cache(k, v, cache, seqlens, options));
  }
};

struct ExplainInt4Attention {
  Explained explained;
  std::int64_t batch = 1, heads = 8, kv_heads = 0, length = 1, keys = 1024, head_size = 128;
  std::string dtype;
  OptionFlags flags;

  void run() {
    require_at_least_one(batch, "--batch");
    require_at_least_one(heads, "--heads");
    if (kv_heads != 0) require_at_least_one(kv_heads, "--kv-heads");
    require_at_least_one(length, "--length");
    require_at_least_one(keys, "--keys");
    require_at_least_one(head_size, "--head-size");
    const GpuModel* const gpu = explained.begin();
    StandIns views(explained.where());
    const DType type = dtype_named(dtype.empty() ? "bf16" : dtype);
    const std::int64_t of_keys = kv_heads > 0 ? kv_heads : heads;
    const TensorView q = views.tensor(type, {batch, length, heads, head_size});
    const Int4Cache cache = int4_cache(views, type, batch, keys, of_keys, head_size);
    AttentionOptions options;
    flags.fill(options);
    options.seqused_k = lengths_of(views, batch, keys);
    Json problem = {{"batch", batch}, {"heads", heads},         {"kv_heads", of_keys},   {"queries", length},
                    {"keys", keys},   {"head_size", head_size}, {"dtype", name_of(type)}};
    flags.add_to(problem);
    if (explained.device != "cpu") problem["device"] = explained.device;
    explained.tell("q " + q.shape_text() + " " + name_of(type) + " over " + std::to_string(keys) + " keys in 4 bits",
                   {{"problem", problem}},
                   gpu != nullptr ? explain_attention_over_int4_cache_on(*gpu, q, cache, options)
                                  : explain_attention_over_int4_cache(q, cache, options));
  }
};

}  // namespace

void add_explain_caches(CLI::App& explain) {
  {
    CLI::App* verb = explain.add_subcommand("rotary", "Rotary embedding, in place");
    examples(*verb, {"heddle explain rotary --heads 32 --length 4096",
                     "heddle explain rotary --heads 32 --batch 64 --gpu h100"});
    const auto self = std::make_shared<ExplainRotary>();
    self->add_to(*verb);
    verb->callback([self] { self->run(); });
  }
  {
    CLI::App* verb = explain.add_subcommand("append", "An append to a cache of keys and values");
    examples(*verb, {"heddle explain append --batch 64 --page-size 16 --rotary --gpu h100",
                     "heddle explain append --e4m3 --scales --dtype bf16"});
    const auto self = std::make_shared<ExplainAppend>();
    self->add_to(*verb);
    self->add_keys_to(*verb);
    verb->add_option("--page-size", self->page_size, "The cache is in pages this long");
    verb->add_flag("--rotary", self->rotates, "k_new is rotated");
    verb->add_flag("--e4m3", self->e4m3, "The cache is in float8_e4m3fn, beside f16 or bf16 rows");
    verb->add_flag("--scales", self->scales, "With a scale for each key and head of such a cache, which is found");
    verb->callback([self] { self->run(); });
  }
  {
    CLI::App* verb = explain.add_subcommand("append-int4", "An append to a cache in 4 bits");
    examples(*verb, {"heddle explain append-int4 --batch 64 --keys 8192 --gpu h100",
                     "heddle explain append-int4 --length 128 --rotary"});
    const auto self = std::make_shared<ExplainInt4Append>();
    self->add_to(*verb);
    self->add_keys_to(*verb);
    verb->add_flag("--rotary", self->rotates, "k_new is rotated");
    verb->callback([self] { self->run(); });
  }
  CLI::App* verb = explain.add_subcommand("attention-int4", "Attention over a cache in 4 bits");
  examples(*verb, {"heddle explain attention-int4 --batch 64 --heads 32 --kv-heads 8 --keys 8192 --gpu h100",
                   "heddle explain attention-int4 --length 4 --causal bottom_right"});
  const auto self = std::make_shared<ExplainInt4Attention>();
  self->explained.add_to(*verb);
  verb->add_option("-b,--batch", self->batch, "Sequences, B")->capture_default_str();
  verb->add_option("-n,--heads", self->heads, "Query heads, H")->capture_default_str();
  verb->add_option("--kv-heads", self->kv_heads, "Key/value heads, Hkv (default: H)");
  verb->add_option("-s,--length", self->length, "Queries of a sequence, Sq")->capture_default_str();
  verb->add_option("--keys", self->keys, "Keys that each sequence has")->capture_default_str();
  verb->add_option("-d,--head-size", self->head_size, "Head size, D")->capture_default_str();
  add_dtype_flag(*verb, self->dtype, "Of q and of the keys in 16 bits (default: bf16)", /*narrow=*/true);
  self->flags.add_to(*verb);
  verb->callback([self] { self->run(); });
}

}  // namespace heddle::cli
