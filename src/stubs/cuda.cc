// The GPU candidates of a build without CUDA: listed, so that `explain` says why they do not run.
#include <cstdlib>

#include "core/check.h"
#include "cuda/assumed_gpu.h"
#include "cuda/attention.h"
#include "cuda/backend.h"
#include "cuda/kv_cache.h"
#include "cuda/linear.h"
#include "cuda/lowbit.h"
#include "cuda/model.h"
#include "cuda/validate.h"
#include "heddle/error.h"

namespace heddle::cuda {
namespace {

constexpr const char* kWithout = "this heddle was built without CUDA: build it with HEDDLE_CUDA=ON";

Refusal refuse(const AttentionProblem&) { return kWithout; }
double no_estimate(const AttentionProblem&, int) { return 0.0; }
std::size_t no_workspace(const AttentionProblem&, int) { return 0; }
void no_launch(const AttentionProblem& problem, const Runtime&) { throw RuntimeError(refuse(problem)); }

constexpr AttentionForwardKernel absent(const char* name, const char* method, bool automatic) {
  return {.name = name,
          .method = method,
          .device = Device::cuda,
          .automatic = automatic,
          .supports = refuse,
          .estimate = no_estimate,
          .workspace = no_workspace,
          .launch = no_launch,
          .extras = kE4m3 | kDraftMask | kAppend | kInt4 | kInt8Qk};
}

constexpr AttentionBackwardKernel absent_backward(const char* name) {
  return {.name = name,
          .method = "flash",
          .device = Device::cuda,
          .automatic = true,
          .supports = [](const AttentionBackwardProblem& p) { return refuse(p); },
          .estimate = [](const AttentionBackwardProblem&, int) { return 0.0; },
          .workspace = [](const AttentionBackwardProblem&, int) { return std::size_t{0}; },
          .launch = [](const AttentionBackwardProblem& p, const Runtime& runtime) { no_launch(p, runtime); }};
}

constexpr LinearKernel absent_linear(const char* name) {
  return {.name = name,
          .method = "linear",
          .device = Device::cuda,
          .automatic = true,
          .supports = [](const LinearProblem&) -> std::string { return kWithout; },
          .estimate = [](const LinearProblem&, int) { return 0.0; },
          .workspace = [](const LinearProblem&, int) { return std::size_t{0}; },
          .launch = [](const LinearProblem&, const Runtime&) { throw RuntimeError(kWithout); }};
}

}  // namespace

bool built() { return false; }
Gpus gpus() {
  Gpus none;
  none.absence = kWithout;
  return none;
}
std::string tuning_state() {
  const char* path = std::getenv("HEDDLE_TUNING");
  return path != nullptr && *path != '\0' ? text(path, ": not read, as this build has no GPU kernels") : "";
}

struct DeviceProperties {};
AssumedGpu::AssumedGpu(const GpuModel&) {}
AssumedGpu::~AssumedGpu() = default;
bool gpu_is_assumed() { return false; }
void require_gpu_that_is_here(std::string_view) {}
int clusters_held(int (*)(int), int) { return 0; }

double seconds_of_16bit(const LinearProblem&) { return 0.0; }
void decode_weights(const LinearProblem&, const WeightBlock&, const lowbit::Weights&, void*) {
  throw RuntimeError(text("[unpack_weights] ", kWithout));
}

void apply_rotary(const RotaryProblem&, void*) { throw RuntimeError(text("[apply_rotary] ", kWithout)); }
void append_int4_cache(const Int4AppendProblem&, void*) { throw RuntimeError(text("[append_int4_cache] ", kWithout)); }
void append_kv_cache(const AppendProblem&, void*) { throw RuntimeError(text("[append_kv_cache] ", kWithout)); }

int current_gpu(std::string_view operation) {
  throw RuntimeError(text("[", operation, "] device is cuda: ", kWithout));
}
std::byte* copied_to_gpu(const void*, std::size_t) { throw RuntimeError(kWithout); }
void free_on_gpu(std::byte*) noexcept {}
void copy_to_gpu(void*, const void*, std::size_t, void*) { throw RuntimeError(kWithout); }
void norm_rows(const void*, const NormRows&, void*) { throw RuntimeError(kWithout); }
void norm_embeddings(const EmbeddingRows&, const NormRows&, void*) { throw RuntimeError(kWithout); }
void pool_rows(const PooledRows&, void*) { throw RuntimeError(kWithout); }
void widen(const void*, DType, std::int64_t, float*, void*) { throw RuntimeError(kWithout); }

QuantizeFindings quantize(const lowbit::QuantizeProblem&, void*, void*) {
  throw RuntimeError(text("[quantize] ", kWithout));
}
FoundWeight first_weight_beyond(const lowbit::QuantizeProblem&, float, void*, void*) { throw RuntimeError(kWithout); }
float importance_at(const lowbit::QuantizeProblem&, std::uint32_t, void*) { throw RuntimeError(kWithout); }
void dequantize(const lowbit::Matrix&, const lowbit::Weights&, void*) {
  throw RuntimeError(text("[dequantize] ", kWithout));
}

// Operations that refuse their tensors have nothing to check.
template <class Indices>
void check_indices(const char*, const Indices&, void*) {}
template void check_indices(const char*, const AttentionIndices&, void*);
template void check_indices(const char*, const CachedIndices&, void*);
template void check_indices(const char*, const AppendIndices&, void*);
template void check_indices(const char*, const Int4AppendIndices&, void*);
template void check_indices(const char*, const RotaryIndices&, void*);
template void check_indices(const char*, const OffsetIndices&, void*);
std::string take_bad_index(void*) { return ""; }
std::string take_bad_indices(int) { return ""; }
void wait_for(void*) {}

const AttentionForwardKernel kSm80AttentionForward = absent("sm80", "flash", true);
const AttentionForwardKernel kSm80AttentionForwardInt8 = absent("sm80_int8", "flash", true);
const AttentionForwardKernel kSm80AttentionDecode = absent("sm80_decode", "flash", true);
const AttentionForwardKernel kSm90AttentionForward = absent("sm90", "flash", true);
const AttentionForwardKernel kSm90AttentionForwardFp8 = absent("sm90_fp8", "flash", true);
const AttentionForwardKernel kSm90AttentionDecode = absent("sm90_decode", "flash", false);
const AttentionForwardKernel kNaiveAttentionForward = absent("naive_cuda", "naive", false);
const AttentionForwardKernel kAttentionForwardBaseline = absent("baseline_cuda", "baseline", false);
const AttentionBackwardKernel kSm80AttentionBackward = absent_backward("sm80");
const AttentionBackwardKernel kSm90AttentionBackward = absent_backward("sm90");
const LinearKernel kSm80Gemv = absent_linear("sm80_gemv");
const LinearKernel kSm80Linear = absent_linear("sm80_linear");
const LinearKernel kSm90LinearW4A16 = absent_linear("sm90_w4a16");
const LinearKernel kSm90LinearW4A8 = absent_linear("sm90_w4a8");
const LinearKernel kCublasLtLinear = absent_linear("cublaslt");
const LinearKernel kCublasLtLinearW8A8 = absent_linear("cublaslt_w8a8");
const LinearBackwardKernel kCublasLtLinearBackward = {
    .name = "cublaslt",
    .method = "linear",
    .device = Device::cuda,
    .automatic = true,
    .supports = [](const LinearBackwardProblem&) -> std::string { return kWithout; },
    .estimate = [](const LinearBackwardProblem&, int) { return 0.0; },
    .workspace = [](const LinearBackwardProblem&, int) { return std::size_t{0}; },
    .launch = [](const LinearBackwardProblem&, const Runtime&) { throw RuntimeError(kWithout); }};

}  // namespace heddle::cuda
