// A host: a library whose arrays Heddle takes. Here is what of it must be C++, how its arrays are seen as tensors and
// whose memory on a GPU a call borrows; python/heddle/hosts has a module for each, which knows the library's streams,
// makes results and has the operations.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <string>

#include "heddle/tensor.h"

namespace heddle::python {

namespace nb = nanobind;

// What a call says of one of its arrays.
struct Given {
  const char* operation;
  const char* name;           // as errors call it
  bool written = false;       // else it is only read
  bool gpus = false;          // whether the operation runs on GPUs
  std::uintptr_t stream = 0;  // on which it does so

  [[noreturn]] void refuse(const std::string& what) const;
};

// A stream for calls that read no data: arrays need not be ready.
constexpr std::uintptr_t kNoStream = ~std::uintptr_t{0};

// An array as a tensor.
struct Seen {
  TensorView view;
  std::int64_t gpu = -1;      // the one that it is on
  nb::ndarray<nb::ro> owner;  // what the view points into, where that is not the array itself
};

// Memory on a GPU for one call, in the order of its stream. Made and given back with the GIL held or without.
class GpuMemory {
 public:
  using GiveBack = void (*)(void* owner, std::uintptr_t stream);

  GpuMemory() = default;
  GpuMemory(void* data, void* owner, std::uintptr_t stream, GiveBack give_back)
      : data_(data), owner_(owner), stream_(stream), give_back_(give_back) {}
  GpuMemory(const GpuMemory&) = delete;
  GpuMemory& operator=(const GpuMemory&) = delete;
  GpuMemory& operator=(GpuMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(owner_, other.owner_);
    std::swap(stream_, other.stream_);
    std::swap(give_back_, other.give_back_);
    return *this;
  }
  ~GpuMemory() {
    if (give_back_ != nullptr) give_back_(owner_, stream_);
  }
  void* data() const { return data_; }

 private:
  void *data_ = nullptr, *owner_ = nullptr;
  std::uintptr_t stream_ = 0;
  GiveBack give_back_ = nullptr;
};

class Host {
 public:
  // What the array holds; on a GPU, once what was asked of it before on other streams is done, as given.stream sees it.
  // Throws Error for what cannot be read, naming it.
  virtual Seen see(nb::handle array, const Given& given) const = 0;
  // `bytes` on that GPU, which is the current one. Throws RuntimeError.
  virtual GpuMemory allocate(std::int64_t gpu, std::uintptr_t stream, std::size_t bytes) const = 0;

 protected:
  ~Host() = default;
};

// torch, once it is in use: its tensors are seen without import protocols, and its allocator lends memory.
const Host& torch_host();
bool is_torch(nb::handle object);

// All others. On the CPU what supports DLPack or the buffer protocol; on a GPU what supports DLPack, by which its
// library makes data ready on the call's stream. Memory is CUDA's, in the order of the stream.
const Host& array_host();

// Of all hosts: views of parts that an adapter has taken apart, and words.
bool dtype_of(nb::dlpack::dtype dtype, DType* out);
TensorView view_of(nb::handle data, nb::handle dtype, nb::handle shape, nb::handle stride, const Given& given);
std::int64_t int64_of(PyObject* object);
const char* dtype_rule(const Given& given);  // which dtypes the argument may have
std::string rank_rule(std::int64_t rank);    // of one that is not from 1 to kMaxRank
const char* runs_on();                       // where this build runs, for arrays that are somewhere else

void bind_hosts(nb::module_& module);

}  // namespace heddle::python
