// The GPU candidates of a build without CUDA: listed, so that `explain` says why they do not run.
#include <cstdlib>

#include "core/check.h"
#include "cuda/assumed_gpu.h"
#include "cuda/backend.h"
#include "cuda/cost.h"
#include "cuda/kernels.h"
#include "cuda/linear.h"
#include "cuda/model.h"
#include "cuda/rank_memory.h"
#include "cuda/stream_memory.h"
#include "cuda/validate.h"
#include "heddle/error.h"

namespace heddle::cuda {
namespace {

constexpr const char* kWithout = "this heddle was built without CUDA: build it with HEDDLE_CUDA=ON";

template <class Problem>
constexpr Kernel<Problem> absent(const char* name, const char* method, bool automatic) {
  return {.name = name,
          .method = method,
          .device = Device::cuda,
          .automatic = automatic,
          .supports = [](const Problem&) -> Refusal { return kWithout; },
          .estimate = [](const Problem&, int) { return 0.0; },
          .workspace = [](const Problem&, int) { return std::size_t{0}; },
          .launch = [](const Problem&, const Runtime&) { throw RuntimeError(kWithout); },
          .describe = [](const Problem&, int) { return std::string(); }};
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

// Its candidates have no costs, so that nothing asks for them.
CostOverride::CostOverride(std::string_view line, const Cost& cost) : cost_{line, cost}, before_(nullptr) {}
CostOverride::~CostOverride() = default;
Work work_of(const AttentionExample&, Pass) { throw RuntimeError(kWithout); }
Work work_of(const LinearExample&, Pass) { throw RuntimeError(kWithout); }

struct DeviceProperties {};
AssumedGpu::AssumedGpu(const GpuModel&) {}
AssumedGpu::~AssumedGpu() = default;
bool gpu_is_assumed() { return false; }
void require_gpu_that_is_here(std::string_view) {}
int clusters_held(int (*)(int), int) { return 0; }

double seconds_of_16bit(const LinearProblem&) { return 0.0; }

int exchange_current_gpu(int) { throw RuntimeError(kWithout); }
void* take_memory(std::size_t, void*) { throw RuntimeError(kWithout); }
void give_memory_back(void*, void*) noexcept {}

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

struct KeptMemory::State {};
KeptMemory::KeptMemory() { throw RuntimeError(kWithout); }
KeptMemory::~KeptMemory() = default;
void* KeptMemory::replace(void*, std::size_t, void*) { throw RuntimeError(kWithout); }
void KeptMemory::give_back(void*) noexcept {}
void KeptMemory::end_of_call(void*) noexcept {}
void refuse_capture(std::size_t, void*) { throw RuntimeError(kWithout); }
std::uint64_t capture_id(void*) { throw RuntimeError(kWithout); }
void write_to_gpu(void*, const void*, std::size_t, void*) { throw RuntimeError(kWithout); }
void read_from_gpu(void*, const void*, std::size_t, void*) { throw RuntimeError(kWithout); }
void copy_on_gpu(void*, const void*, std::size_t, void*) { throw RuntimeError(kWithout); }
void copy_rows_on_gpu(void*, std::size_t, const void*, std::size_t, std::size_t, std::size_t, void*) {
  throw RuntimeError(kWithout);
}
void fill_floats(float*, std::int64_t, float, void*) { throw RuntimeError(kWithout); }
void add_floats(float*, const float*, std::int64_t, void*) { throw RuntimeError(kWithout); }
void move_rows(const TensorView&, const TensorView&, std::span<const RowMove>, bool, void*) {
  throw RuntimeError(kWithout);
}
void end_if(const int*, void*) { throw RuntimeError(kWithout); }

// Operations that refuse their tensors have nothing to check.
template <class Indices>
void check_indices(const char*, const Indices&, void*) {}
template void check_indices(const char*, const AttentionIndices&, void*);
template void check_indices(const char*, const CachedIndices&, void*);
template void check_indices(const char*, const AppendIndices&, void*);
template void check_indices(const char*, const Int4AppendIndices&, void*);
template void check_indices(const char*, const RotaryIndices&, void*);
template void check_indices(const char*, const OffsetIndices&, void*);
template void check_indices(const char*, const PoolIndices&, void*);
std::string take_bad_index(void*) { return ""; }
std::string take_bad_indices(int) { return ""; }
void wait_for(void*) {}

#define HEDDLE_ABSENT_KERNEL(Problem, symbol, name, method, automatic) \
  const Kernel<Problem> symbol = absent<Problem>(name, method, automatic);
HEDDLE_CUDA_KERNELS(HEDDLE_ABSENT_KERNEL)
#undef HEDDLE_ABSENT_KERNEL

}  // namespace heddle::cuda
