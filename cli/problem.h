// An attention problem described by flags, and the tensors that belong to it.
#pragma once

#include <CLI/CLI.hpp>
#include <list>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "gpu.h"
#include "heddle/attention.h"
#include "tensors.h"

namespace heddle::cli {

using Json = nlohmann::ordered_json;

// Flags that every verb has.
struct CommonFlags {
  bool json = false;
  int threads = 0;     // 0: the default
  std::string target;  // "": the default
  void add_to(CLI::App& app, bool runs_kernels = true);
  // Sets threads and target as the flags say. Throws Error or RuntimeError.
  void apply() const;
};

// Flags of AttentionOptions that are numbers and words; `run` has them too.
struct OptionFlags {
  std::string causal = "none";
  std::vector<std::int64_t> window;
  std::int64_t q_step = 1, key_step = 1;
  std::optional<double> scale;
  double softcap = 0, dropout = 0;
  std::uint64_t dropout_seed = 0, dropout_offset = 0;
  std::string method, force;
  bool batch_invariant = false, deterministic = false;
  void add_to(CLI::App& app);
  void fill(AttentionOptions& options) const;
  // Those that are the problem's and not the caller's wishes.
  void add_to(Json& problem) const;
};

// One problem: shape, dtype, options. Defaults: B 1, H 8, S 1024, D 64, f32.
struct ProblemFlags {
  std::int64_t batch = 1, heads = 8, kv_heads = 0, length_q = 1024, length_k = 0, head_size = 64, head_size_v = 0;
  std::string dtype = "f32";
  std::string device = "cpu";  // where the tensors are: "cpu", "cuda"
  bool bias = false, mask = false, alibi = false, sink = false, packed = false;
  std::int64_t page_size = 0;
  OptionFlags options;
  void add_to(CLI::App& app);

  std::int64_t Hkv() const { return kv_heads > 0 ? kv_heads : heads; }
  std::int64_t Sk() const { return length_k > 0 ? length_k : length_q; }
  std::int64_t Dv() const { return head_size_v > 0 ? head_size_v : head_size; }
  // "B2 H8/2 Sq1024 Sk1024 D64/64"
  std::string name() const;
  Json json() const;
  // Throws Error for extents below 1.
  void check() const;
};

// Views for a problem. Without memory, big tensors point at bytes that nobody reads: enough for explain and workspace
// queries, which read index data only, and that on the CPU alone.
class ProblemTensors {
 public:
  enum class Memory : std::uint8_t { none, forward, backward };
  // With memory and a GPU, its memory. Views of a problem on "cuda" say so in any case.
  ProblemTensors(const ProblemFlags& flags, Memory memory, Gpu* gpu = nullptr);

  TensorView q, k, v, o, lse, d_o;
  AttentionGradients gradients;
  AttentionOptions options;

 private:
  void move_to_gpu(Gpu* gpu);
  TensorView tensor(DType dtype, const std::vector<std::int64_t>& shape, bool allocate, bool fill = true);
  TensorView indices(const std::vector<std::int64_t>& values, const std::vector<std::int64_t>& shape);
  std::list<HostTensor> owned_;
  unsigned seed_ = 1;
};

// Throws Error "--flag is ...: it must be at least 1" for less.
void require_at_least_one(std::int64_t value, const char* flag);

// Throws RuntimeError, "[verb] --device is cuda: ...", where `device` is that and there is no GPU.
void require_device(const char* verb, const std::string& device);
// "2 threads, avx512", or the GPU's name: where a call runs.
std::string place_text(const std::string& device);
// The same into a verb's JSON: "threads" and "target", or "gpu".
void add_place(Json& out, const std::string& device);

// (query, key) pairs of one head and sequence that causality and window leave, and the multiply-adds times 2 of a pass.
double attended_pairs(const ProblemFlags& flags);
double flops(const ProblemFlags& flags, Pass pass);

}  // namespace heddle::cli
