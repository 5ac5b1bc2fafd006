#include "cuda/any/cublaslt/product.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>

#include "core/check.h"
#include "cuda/any/cublaslt/api.h"
#include "cuda/assumed_gpu.h"
#include "cuda/common/device.h"

namespace heddle::cuda::cublaslt {
namespace {

constexpr const char* kNames[] = {"libcublasLt.so.13", "libcublasLt.so.12"};

// What the process has already, as it has with torch, or else what the system's loader finds.
void* open_library() {
  for (const int mode : {RTLD_NOW | RTLD_NOLOAD, RTLD_NOW}) {
    for (const char* name : kNames) {
      if (void* library = dlopen(name, mode)) return library;
    }
  }
  return nullptr;
}

struct Library {
  Functions functions{};
  std::string refusal;

  Library() {
    void* const library = open_library();
    if (library == nullptr) {
      refusal = text("cuBLASLt was not found: ", kNames[0], " or ", kNames[1],
                     " must be loaded already, or be where the system's loader looks (LD_LIBRARY_PATH)");
      return;
    }
    Functions& f = functions;
    find(library, "Create", f.Create);
    find(library, "GetVersion", f.GetVersion);
    find(library, "MatmulDescCreate", f.MatmulDescCreate);
    find(library, "MatmulDescDestroy", f.MatmulDescDestroy);
    find(library, "MatmulDescSetAttribute", f.MatmulDescSetAttribute);
    find(library, "MatrixLayoutCreate", f.MatrixLayoutCreate);
    find(library, "MatrixLayoutDestroy", f.MatrixLayoutDestroy);
    find(library, "MatmulPreferenceCreate", f.MatmulPreferenceCreate);
    find(library, "MatmulPreferenceDestroy", f.MatmulPreferenceDestroy);
    find(library, "MatmulPreferenceSetAttribute", f.MatmulPreferenceSetAttribute);
    find(library, "MatmulAlgoGetHeuristic", f.MatmulAlgoGetHeuristic);
    find(library, "Matmul", f.Matmul);
  }

  template <class Function>
  void find(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, (std::string("cublasLt") + name).c_str()));
    if (function == nullptr && refusal.empty()) refusal = text("cuBLASLt, as it was found, has no cublasLt", name);
  }
};

// Never unloaded: the process may end while others still use it.
const Library& library() {
  static const Library* const loaded = new Library;
  return *loaded;
}

void require(Status status, const char* what) {
  if (status != kSuccess)
    throw RuntimeError(text("[cublaslt] ", what, " failed with status ", static_cast<int>(status)));
}

// One for each device; never destroyed.
Handle handle() {
  require_gpu_that_is_here("cublaslt");
  static std::mutex mutex;
  static std::map<int, Handle> handles;
  const std::scoped_lock lock(mutex);
  Handle& found = handles[current_device().ordinal];
  if (found == nullptr) require(library().functions.Create(&found), "cublasLtCreate");
  return found;
}

// An object of the library's, destroyed with its function.
struct Owned {
  void* object = nullptr;
  Status (*destroy)(void*) = nullptr;
  ~Owned() {
    if (object != nullptr) destroy(object);
  }
  Owned(Status (*destroyer)(void*)) : destroy(destroyer) {}
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
};

// A row-major matrix [rows, columns] is to cuBLAS a matrix of `columns` rows.
struct Layout : Owned {
  Layout(cudaDataType_t type, std::int64_t rows, std::int64_t columns, std::int64_t stride)
      : Owned(library().functions.MatrixLayoutDestroy) {
    require(library().functions.MatrixLayoutCreate(&object, type, static_cast<std::uint64_t>(columns),
                                                   static_cast<std::uint64_t>(rows), std::max(stride, columns)),
            "cublasLtMatrixLayoutCreate");
  }
};

std::uint32_t alignment_of(const void* data) {
  const auto address = reinterpret_cast<std::uintptr_t>(data) | 256u;
  return static_cast<std::uint32_t>(address & (~address + 1));
}

}  // namespace

// Of a GPU that is assumed: whether this machine has the library says nothing of that one's.
std::string refuse_library() { return gpu_is_assumed() ? "" : library().refusal; }

void multiply(const Product& p, void* workspace, cudaStream_t stream) {
  const Functions& f = library().functions;
  const bool integers = p.in == CUDA_R_8I;
  Owned desc(f.MatmulDescDestroy), preference(f.MatmulPreferenceDestroy);
  require(f.MatmulDescCreate(&desc.object, integers ? kCompute32I : kCompute32F, integers ? CUDA_R_32I : CUDA_R_32F),
          "cublasLtMatmulDescCreate");
  const auto set = [&](DescAttribute attribute, const auto& value) {
    require(f.MatmulDescSetAttribute(desc.object, attribute, &value, sizeof value), "cublasLtMatmulDescSetAttribute");
  };
  set(kDescTransA, p.by_rows ? kOpT : kOpN);
  set(kDescTransB, kOpN);
  std::uint32_t epilogue = p.bias != nullptr ? kEpilogueBias : 0u;
  if (p.after == After::relu) epilogue |= kEpilogueRelu;
  if (p.after == After::gelu_tanh) epilogue |= kEpilogueGelu;
  if (epilogue == 0) epilogue = kEpilogueDefault;
  set(kDescEpilogue, epilogue);
  if (p.bias != nullptr) set(kDescBiasPointer, p.bias);
  const Layout w(p.in, p.by_rows ? p.m : p.k, p.by_rows ? p.k : p.m, p.w_stride), x(p.in, p.n, p.k, p.x_stride);
  const Layout c(p.out, p.n, p.m, p.c != nullptr ? p.c_stride : p.d_stride), d(p.out, p.n, p.m, p.d_stride);

  require(f.MatmulPreferenceCreate(&preference.object), "cublasLtMatmulPreferenceCreate");
  const auto prefer = [&](PreferenceAttribute attribute, const auto& value) {
    require(f.MatmulPreferenceSetAttribute(preference.object, attribute, &value, sizeof value),
            "cublasLtMatmulPreferenceSetAttribute");
  };
  const void* const from = p.c != nullptr ? p.c : p.d;
  prefer(kPrefMaxWorkspaceBytes, kWorkspace);
  prefer(kPrefMinAlignmentA, alignment_of(p.w));
  prefer(kPrefMinAlignmentB, alignment_of(p.x));
  prefer(kPrefMinAlignmentC, alignment_of(from));
  prefer(kPrefMinAlignmentD, alignment_of(p.d));
  HeuristicResult found{};
  int count = 0;
  const Status status = f.MatmulAlgoGetHeuristic(handle(), desc.object, w.object, x.object, c.object, d.object,
                                                 preference.object, 1, &found, &count);
  if (status != kSuccess || count == 0) {
    throw RuntimeError(text("[cublaslt] cuBLASLt ", library().functions.GetVersion(), " has no product of [", p.n, ", ",
                            p.k, "] by [", p.m, ", ", p.k, "] of type ", static_cast<int>(p.in), " to type ",
                            static_cast<int>(p.out), " (status ", static_cast<int>(status), ")"));
  }
  const float one = 1.0f, beta = p.c != nullptr ? 1.0f : 0.0f;
  const std::int32_t one_integer = 1, zero_integer = 0;
  require(f.Matmul(handle(), desc.object, integers ? static_cast<const void*>(&one_integer) : &one, p.w, w.object, p.x,
                   x.object, integers ? static_cast<const void*>(&zero_integer) : &beta, from, c.object, p.d, d.object,
                   &found.algo, workspace, kWorkspace, stream),
          "cublasLtMatmul");
}

}  // namespace heddle::cuda::cublaslt
