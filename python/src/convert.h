// Python objects to Heddle's views and options. Two ways in: a tuple (pointer, dtype, shape, strides) that a
// framework's adapter has taken apart, which costs no import protocol; and any object that nanobind can read through
// DLPack or the buffer protocol.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <string>
#include <vector>

#include "heddle/attention.h"
#include "heddle/runtime.h"
#include "heddle/tensor.h"

namespace heddle::python {

namespace nb = nanobind;

namespace dlpack {
struct ManagedTensor;
}

// The arrays of one call. Holds what the views point into; destroy it with the GIL held, after the operation.
class Arguments {
 public:
  // Where the operation can run.
  enum class Devices : std::uint8_t { cpu, any };

  explicit Arguments(const char* operation, Devices devices = Devices::cpu)
      : operation_(operation), devices_(devices) {}

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
  [[noreturn]] void refuse(const char* name, const std::string& what) const;
  [[noreturn]] void refuse_kind(nb::handle object, const char* name, const char* kind) const;

  // The one that all tensors on a GPU are on; -1: none was read.
  std::int64_t gpu() const { return gpu_; }

 private:
  TensorView view(nb::handle object, const char* name, bool writable);
  TensorView view_of_tuple(const nb::tuple& parts, const char* name) const;
  TensorView view_of_torch(nb::handle tensor, const char* name);
  bool borrow_torch(nb::handle tensor, const char* name, TensorView* view);
  void use_gpu(std::int64_t gpu, const char* name);
  Device device_of_torch(nb::handle tensor, const char* name);
  TensorView view_of(nb::handle data, nb::handle dtype, nb::handle shape, nb::handle stride, const char* name) const;
  TensorView view_of_array(nb::handle object, const char* name, bool writable);

  const char* operation_;
  Devices devices_;
  std::int64_t gpu_ = -1;
  std::vector<nb::ndarray<nb::ro>> held_;
};

// Scratch for one call on the CPU, kept by each thread while it is small and freed after the call when it is not.
class Scratch {
 public:
  Scratch() = default;
  explicit Scratch(std::size_t bytes) { get(bytes); }
  Workspace get(std::size_t bytes);
  operator Runtime() const;

 private:
  Workspace workspace_;
  WorkspaceBuffer large_;
};

// Scratch for one call on the current GPU, from torch's allocator: it is given back at once and used again in the order
// of the current stream. Made and destroyed with the GIL held.
class DeviceScratch {
 public:
  // gpu: the current one. For calls on a CPU, whatever it is.
  explicit DeviceScratch(std::int64_t gpu) : gpu_(gpu) {}
  DeviceScratch(const DeviceScratch&) = delete;
  DeviceScratch& operator=(const DeviceScratch&) = delete;
  ~DeviceScratch();
  // With or without the GIL.
  Workspace get(std::size_t bytes);

 private:
  std::int64_t gpu_;
  dlpack::ManagedTensor* managed_ = nullptr;
  nb::object tensor_;  // where torch's allocator has to be called through Python
};

// Makes instances of `tensor_type` be read as torch tensors; dtypes maps torch's dtypes to DType's numbers;
// allocate(bytes) gives a tensor in the current GPU's memory.
void use_torch(nb::type_object tensor_type, nb::dict dtypes, nb::callable allocate);

// As Python's bool().
bool truth(nb::handle object);

void bind_options(nb::module_& module);
void bind_runtime(nb::module_& module);
void bind_attention(nb::module_& module);
void bind_kv_cache(nb::module_& module);
void bind_int4_cache(nb::module_& module);
void bind_transformer(nb::module_& module);
void bind_lowbit(nb::module_& module);
void bind_linear(nb::module_& module);

}  // namespace heddle::python
