// Python objects to Heddle's views and options. An array is seen by its host (host.h), or is a tuple (pointer, dtype,
// shape, strides) that an adapter has taken apart.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "heddle/attention.h"
#include "heddle/candidate.h"
#include "heddle/runtime.h"
#include "heddle/tensor.h"
#include "host.h"

namespace heddle::python {

// The arrays of one call. Holds what the views point into; destroy it with the GIL held, after the operation.
class Arguments {
 public:
  // Where the operation can run.
  enum class Devices : std::uint8_t { cpu, any };

  // stream: on which the operation runs if its arrays are on a GPU.
  explicit Arguments(const char* operation, Devices devices = Devices::cpu, std::uintptr_t stream = 0)
      : operation_(operation), devices_(devices), stream_(stream) {}

  // None gives a view that is not given.
  TensorView read(nb::handle object, const char* name) { return view(object, name, false); }
  // As read(), and refuses read-only arrays.
  TensorView write(nb::handle object, const char* name) { return view(object, name, true); }

  // From the options tuple; options.h has its items.
  // seqused_k_name: what the caller calls the lengths of k.
  AttentionOptions options(const nb::tuple& items, const char* seqused_k_name = "seqused_k");

  // Other values, and what is said of those that are something else.
  double number(nb::handle object, const char* name) const;
  std::int64_t integer(nb::handle object, const char* name) const;
  const char* string(nb::handle object, const char* name) const;
  bool flag(nb::handle object, const char* name) const;
  [[noreturn]] void refuse(const char* name, const std::string& what) const;
  [[noreturn]] void refuse_kind(nb::handle object, const char* name, const char* kind) const;

  // That of the arrays on a GPU.
  Runtime runtime() const;

 private:
  friend class CallScratch;

  TensorView view(nb::handle object, const char* name, bool writable);
  Seen see(nb::handle object, const Given& given);

  const char* operation_;
  Devices devices_;
  std::uintptr_t stream_;
  const Host* host_ = nullptr;  // of the first array on a GPU
  std::int64_t gpu_ = -1;       // the one that all arrays on a GPU are on; -1: there is none
  std::vector<nb::ndarray<nb::ro>> held_;
};

// Scratch memory for one call on the CPU, kept by each thread while it is small and freed after the call when it is
// not.
class Scratch {
 public:
  Workspace get(std::size_t bytes);

 private:
  Workspace workspace_;
  WorkspaceBuffer large_;
};

// Scratch memory for one call where its arrays are; on a GPU from the host of the first one there, in the order of the
// call's stream. Destroy it with the GIL held, before the arguments, after the operation.
class CallScratch {
 public:
  explicit CallScratch(const Arguments& call) : call_(call) {}
  // With or without the GIL.
  Workspace get(std::size_t bytes);

 private:
  const Arguments& call_;
  Scratch scratch_;
  GpuMemory memory_;
};

// Makes instances of `tensor_type` be seen as torch tensors; dtypes maps torch's dtypes to DType's numbers;
// allocate(bytes) gives a tensor in the current GPU's memory.
void use_torch(nb::type_object tensor_type, nb::dict dtypes, nb::callable allocate);

// What Explanation takes: for each candidate its name, method, whether it could run, why it does not, seconds, bytes of
// workspace, chosen, plan.
nb::list told(const std::vector<Candidate>& candidates);

// The names of an enumeration's members, which count up from 0.
template <class Member>
nb::list member_names() {
  nb::list out;
  for (int n = 0; std::string_view(name_of(static_cast<Member>(n))) != "unknown"; ++n) {
    out.append(name_of(static_cast<Member>(n)));
  }
  return out;
}

// A contiguous tensor that is not there, for what explains a call: `like` one that is, of another dtype or not.
TensorView stand_in(const TensorView& like, DType dtype);

// As Python's bool().
bool truth(nb::handle object);

void bind_options(nb::module_& module);
void bind_runtime(nb::module_& module);
void bind_attention(nb::module_& module);
void bind_kv_cache(nb::module_& module);
void bind_partial(nb::module_& module);
void bind_sparse(nb::module_& module);
void bind_adaptive(nb::module_& module);
void bind_nsa(nb::module_& module);
void bind_int4_cache(nb::module_& module);
void bind_transformer(nb::module_& module);
void bind_lowbit(nb::module_& module);
void bind_linear(nb::module_& module);

}  // namespace heddle::python
