// heddle explain pool, select, gate and step: pooled keys, the blocks that their scores choose, branches joined, and a
// step of decoding.
#include <memory>
#include <optional>
#include <vector>

#include "cuda/assumed_gpu.h"
#include "explain.h"
#include "ops/nsa/nsa.h"

namespace heddle::cli {
namespace {

// Sequences of the same length.
struct Sequences {
  std::int64_t batch = 1, kv_heads = 2, head_size = 64;
  std::string dtype, force;
  bool narrow = false;  // rows in 16 bits alone

  void add_to(CLI::App& verb) {
    verb.add_option("-b,--batch", batch, "Sequences, B")->capture_default_str();
    verb.add_option("--kv-heads", kv_heads, "Key/value heads, Hkv")->capture_default_str();
    verb.add_option("-d,--head-size", head_size, "Head size, D")->capture_default_str();
    add_dtype_flag(verb, dtype, narrow ? "Of rows (default: bf16)" : "Of rows (default: f32, on a GPU bf16)", narrow);
    add_force_flag(verb, force);
  }
  void check() const {
    require_at_least_one(batch, "--batch");
    require_at_least_one(kv_heads, "--kv-heads");
    require_at_least_one(head_size, "--head-size");
  }
  Json json(DType type, const std::string& device) const {
    Json problem = {{"batch", batch}, {"kv_heads", kv_heads}, {"head_size", head_size}, {"dtype", name_of(type)}};
    if (device != "cpu") problem["device"] = device;
    return problem;
  }
};

struct ExplainPool {
  Explained explained;
  Sequences of;
  std::int64_t keys = 1024, block = 64, stride = 0;
  std::string pass = "forward";

  void run() {
    of.check();
    require_at_least_one(keys, "--keys");
    const GpuModel* const gpu = explained.begin();
    StandIns views(explained.where());
    const DType type = dtype_named(dtype_or_default(of.dtype, explained.where()));
    const PoolOptions options{
        .block = block, .stride = stride > 0 ? stride : block, .cu_seqlens = {}, .seqused = {}, .force = of.force};
    const std::int64_t count = keys < block || options.stride < 1 ? 0 : (keys - block) / options.stride + 1;
    const TensorView x = views.tensor(type, {of.batch, keys, of.kv_heads, of.head_size}),
                     pooled = views.tensor(type, {of.batch, count, of.kv_heads, of.head_size});
    const auto candidates = [&] {
      if (pass == "forward") {
        return gpu != nullptr ? explain_pool_keys_on(*gpu, x, pooled, options) : explain_pool_keys(x, pooled, options);
      }
      const auto &d_pooled = pooled, &dx = x;
      return gpu != nullptr ? explain_pool_keys_backward_on(*gpu, d_pooled, dx, options)
                            : explain_pool_keys_backward(d_pooled, dx, options);
    }();
    Json problem = of.json(type, explained.device);
    problem["keys"] = keys, problem["block"] = options.block, problem["stride"] = options.stride;
    explained.tell("keys " + x.shape_text() + " in blocks of " + std::to_string(options.block) + " every " +
                       std::to_string(options.stride) + ", " + name_of(type) + ", " + pass,
                   {{"problem", problem}, {"pass", pass}}, candidates);
  }
};

struct ExplainSelect {
  Explained explained;
  Sequences of;
  std::int64_t heads = 8, length = 1024, keys = 0, entries = 16, block_size = 64, block = 0, stride = 0;
  bool without_lse = false;

  void run() {
    of.check();
    require_at_least_one(heads, "--heads");
    require_at_least_one(length, "--length");
    require_at_least_one(entries, "--entries");
    const GpuModel* const gpu = explained.begin();
    StandIns views(explained.where());
    const DType type = dtype_named(dtype_or_default(of.dtype, explained.where()));
    SelectOptions options;
    options.block_size = block_size;
    options.compression_block = block > 0 ? block : block_size;
    options.compression_stride = stride > 0 ? stride : options.compression_block;
    options.force = of.force;
    const std::int64_t all = keys > 0 ? keys : length,
                       count = all < options.compression_block
                                   ? 0
                                   : (all - options.compression_block) / options.compression_stride + 1;
    const TensorView q = views.tensor(type, {of.batch, length, heads, of.head_size}),
                     k = views.tensor(type, {of.batch, count, of.kv_heads, of.head_size}),
                     lse = without_lse ? TensorView{} : views.tensor(DType::f32, {of.batch, heads, length}),
                     blocks = views.tensor(DType::i32, {of.batch, length, of.kv_heads, entries});
    const auto candidates = gpu != nullptr ? explain_select_blocks_on(*gpu, q, k, lse, blocks, options)
                                           : explain_select_blocks(q, k, lse, blocks, options);
    Json problem = of.json(type, explained.device);
    problem["heads"] = heads, problem["queries"] = length, problem["pooled_keys"] = count, problem["entries"] = entries;
    problem["block_size"] = block_size;
    problem["compression_block"] = options.compression_block,
    problem["compression_stride"] = options.compression_stride;
    problem["lse"] = !without_lse;
    explained.tell(std::to_string(entries) + " blocks of " + std::to_string(block_size) + " keys for q " +
                       q.shape_text() + " by " + std::to_string(count) + " pooled keys, " + name_of(type),
                   {{"problem", problem}}, candidates);
  }
};

struct ExplainGate {
  Explained explained;
  std::int64_t branches = 3, batch = 1, heads = 8, length = 1024, head_size = 64;
  std::string dtype, pass = "forward", force;

  void run() {
    require_at_least_one(branches, "--branches");
    require_at_least_one(batch, "--batch");
    require_at_least_one(heads, "--heads");
    require_at_least_one(length, "--length");
    require_at_least_one(head_size, "--head-size");
    const GpuModel* const gpu = explained.begin();
    StandIns views(explained.where());
    const DType type = dtype_named(dtype_or_default(dtype, explained.where()));
    const GatedBranch branch{views.tensor(type, {batch, length, heads, head_size}),
                             views.tensor(DType::f32, {batch, length, heads})};
    const std::vector<GatedBranch> all(static_cast<std::size_t>(branches), branch);
    std::optional<cuda::AssumedGpu> assumed;
    if (gpu != nullptr) assumed.emplace(*gpu);
    const auto candidates = pass == "forward" ? explain_gate_branches(all, branch.o, {}, force)
                                              : explain_gate_branches_backward(all, branch.o, all, {}, force);
    Json problem = {{"branches", branches}, {"batch", batch},         {"heads", heads},
                    {"queries", length},    {"head_size", head_size}, {"dtype", name_of(type)}};
    if (explained.device != "cpu") problem["device"] = explained.device;
    explained.tell(std::to_string(branches) + " branches " + branch.o.shape_text() + " " + name_of(type) +
                       " and their gates, " + pass,
                   {{"problem", problem}, {"pass", pass}}, candidates);
  }
};

struct ExplainStep {
  Explained explained;
  Sequences of;
  std::int64_t heads = 8, v_head_size = 0, capacity = 65536, entries = 16, block_size = 64, window = 0;
  bool without_compressed = false;

  ExplainStep() { of.dtype = "bf16", of.narrow = true; }
  void run() {
    of.check();
    require_at_least_one(heads, "--heads");
    require_at_least_one(capacity, "--capacity");
    require_at_least_one(block_size, "--block-size");
    const GpuModel* const gpu = explained.begin();
    StandIns views(explained.where());
    const DType type = dtype_named(of.dtype);
    const std::int64_t size = of.head_size, v_size = v_head_size > 0 ? v_head_size : size;
    const auto rows = [&](std::int64_t count, std::int64_t kv_heads, std::int64_t width) {
      return views.tensor(type, {of.batch, count, kv_heads, width});
    };
    const TensorView q = rows(1, heads, size), k_new = rows(1, of.kv_heads, size), v_new = rows(1, of.kv_heads, v_size),
                     out = rows(1, heads, v_size), gate = views.tensor(DType::f32, {of.batch, 1, heads});
    const NsaCache cache{.k = rows(capacity, of.kv_heads, size),
                         .v = rows(capacity, of.kv_heads, v_size),
                         .k_pooled = rows(capacity / block_size, of.kv_heads, size),
                         .v_pooled = rows(capacity / block_size, of.kv_heads, v_size),
                         .lengths = views.tensor(DType::i32, {of.batch})};
    const NsaGates gates{
        .cmp = without_compressed ? TensorView{} : gate, .slc = gate, .swa = window > 0 ? gate : TensorView{}};
    NsaStepOptions options;
    options.block_size = block_size, options.block_count = entries, options.window = window;
    options.force = of.force;
    const auto candidates = gpu != nullptr ? explain_nsa_step_on(*gpu, q, k_new, v_new, cache, gates, out, options)
                                           : explain_nsa_step(q, k_new, v_new, cache, gates, out, options);
    Json problem = of.json(type, explained.device);
    problem["heads"] = heads, problem["v_head_size"] = v_size, problem["capacity"] = capacity;
    problem["entries"] = entries, problem["block_size"] = block_size, problem["window"] = window;
    problem["compressed"] = !without_compressed;
    explained.tell("a step of q " + q.shape_text() + " over caches of " + std::to_string(capacity) + " keys, " +
                       std::to_string(entries) + " blocks of " + std::to_string(block_size) + " and a window of " +
                       std::to_string(window) + ", " + name_of(type),
                   {{"problem", problem}}, candidates);
  }
};

}  // namespace

void add_explain_nsa(CLI::App& explain) {
  CLI::App* verb = explain.add_subcommand("pool", "Means of blocks of keys, or the gradients of that");
  examples(*verb, {"heddle explain pool --keys 8192 --kv-heads 4 --head-size 128 --block 64 --dtype bf16",
                   "heddle explain pool --keys 8192 --block 32 --stride 16 --pass backward --gpu h100"});
  const auto pool = std::make_shared<ExplainPool>();
  pool->explained.add_to(*verb);
  pool->of.add_to(*verb);
  verb->add_option("--keys", pool->keys, "Keys of a sequence, S")->capture_default_str();
  verb->add_option("--block", pool->block, "Keys of a block")->capture_default_str();
  verb->add_option("--stride", pool->stride, "Keys from one block to the next (default: those of a block)");
  add_pass_flag(*verb, pool->pass);
  verb->callback([pool] { pool->run(); });

  verb = explain.add_subcommand("select", "The blocks that the scores of pooled keys choose");
  examples(*verb, {"heddle explain select --heads 64 --kv-heads 4 --length 8192 --head-size 128 --dtype bf16",
                   "heddle explain select --length 1 --keys 8192 --without-lse --gpu h100"});
  const auto select = std::make_shared<ExplainSelect>();
  select->explained.add_to(*verb);
  select->of.add_to(*verb);
  verb->add_option("-n,--heads", select->heads, "Query heads, H")->capture_default_str();
  verb->add_option("-s,--length", select->length, "Queries of a sequence, Sq")->capture_default_str();
  verb->add_option("--keys", select->keys, "Keys of a sequence (default: as many as queries)");
  verb->add_option("--entries", select->entries, "Blocks to choose for a row, n")->capture_default_str();
  verb->add_option("--block-size", select->block_size, "Keys of a chosen block")->capture_default_str();
  verb->add_option("--block", select->block, "Keys of a pooled key (default: those of a chosen block)");
  verb->add_option("--stride", select->stride, "Keys from one pooled key to the next (default: those of one)");
  verb->add_flag("--without-lse", select->without_lse, "The compressed branch's lse is not there to be read");
  verb->callback([select] { select->run(); });

  verb = explain.add_subcommand("gate", "Branches of native sparse attention joined by their gates, on GPUs");
  examples(*verb, {"heddle explain gate --heads 64 --length 8192 --head-size 128 --gpu h100",
                   "heddle explain gate --branches 2 --pass backward --gpu a100"});
  const auto gate = std::make_shared<ExplainGate>();
  gate->explained.add_to(*verb);
  verb->add_option("--branches", gate->branches, "Branches, 1 to 3")->capture_default_str();
  verb->add_option("-b,--batch", gate->batch, "Sequences, B")->capture_default_str();
  verb->add_option("-n,--heads", gate->heads, "Query heads, H")->capture_default_str();
  verb->add_option("-s,--length", gate->length, "Queries of a sequence, Sq")->capture_default_str();
  verb->add_option("-d,--head-size", gate->head_size, "Head size of v and o, Dv")->capture_default_str();
  add_dtype_flag(*verb, gate->dtype, "Of branches (default: f32, on a GPU bf16)");
  add_force_flag(*verb, gate->force);
  add_pass_flag(*verb, gate->pass);
  verb->callback([gate] { gate->run(); });

  verb = explain.add_subcommand("step", "A step of decoding of native sparse attention, in one launch");
  examples(*verb, {"heddle explain step --heads 64 --kv-heads 4 --head-size 128 --window 512 --gpu h100",
                   "heddle explain step --heads 32 --batch 8 --capacity 8192 --without-compressed"});
  const auto step = std::make_shared<ExplainStep>();
  step->explained.add_to(*verb);
  step->of.add_to(*verb);
  verb->add_option("-n,--heads", step->heads, "Query heads, H")->capture_default_str();
  verb->add_option("--v-head-size", step->v_head_size, "Head size of v (default: that of q and k)");
  verb->add_option("--capacity", step->capacity, "Keys that a sequence of the cache has room for")
      ->capture_default_str();
  verb->add_option("--entries", step->entries, "Blocks that a row chooses")->capture_default_str();
  verb->add_option("--block-size", step->block_size, "Keys of a block, and of a pooled key")->capture_default_str();
  verb->add_option("--window", step->window, "Keys of the window; 0: none")->capture_default_str();
  verb->add_flag("--without-compressed", step->without_compressed, "There is no compressed branch");
  verb->callback([step] { step->run(); });
}

}  // namespace heddle::cli
