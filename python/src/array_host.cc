#include <string>
#include <string_view>
#include <utility>

#include "core/check.h"
#include "cuda/backend.h"
#include "cuda/stream_memory.h"
#include "dlpack_exchange.h"
#include "host.h"

namespace heddle::python {
namespace {

std::string name_of(nb::dlpack::dtype dtype) {
  const auto code = static_cast<nb::dlpack::dtype_code>(dtype.code);
  const char* kind = code == nb::dlpack::dtype_code::Float     ? "float"
                     : code == nb::dlpack::dtype_code::Bfloat  ? "bfloat"
                     : code == nb::dlpack::dtype_code::Int     ? "int"
                     : code == nb::dlpack::dtype_code::UInt    ? "uint"
                     : code == nb::dlpack::dtype_code::Complex ? "complex"
                                                               : nullptr;
  if (kind == nullptr) return "of an unknown dtype (DLPack code " + std::to_string(dtype.code) + ")";
  return kind + std::to_string(dtype.bits);
}

// A stream as __dlpack__ has it: the numbers are CUDA's handles, but that 0, the legacy default one, is 1, and -1 asks
// for nothing to be waited for.
std::int64_t dlpack_stream(std::uintptr_t stream) {
  if (stream == kNoStream) return -1;
  return stream == 0 ? 1 : static_cast<std::int64_t>(stream);
}

// By name until the first one comes, and then by its class's address, which stays: no other class comes to stand there.
bool is_numpys(nb::handle array) {
  static nb::handle ndarray;
  if (ndarray.is_valid()) return array.type().is(ndarray);
  const auto has = [&](const char* attribute, const char* words) {
    const nb::object found = nb::getattr(array.type(), attribute, nb::none());
    return PyUnicode_Check(found.ptr()) && PyUnicode_CompareWithASCIIString(found.ptr(), words) == 0;
  };
  if (!has("__name__", "ndarray") || !has("__module__", "numpy")) return false;
  ndarray = array.type().inc_ref();
  return true;
}

// (device type, number) as DLPack has them; (0, 0) of what does not say, and of numpy's, which need not be asked.
// CuPy's have the buffer protocol too, and are on a GPU.
std::pair<std::int64_t, std::int64_t> device_of(nb::handle array) {
  if (is_numpys(array) || !nb::hasattr(array, "__dlpack_device__")) return {0, 0};
  const nb::object device = array.attr("__dlpack_device__")();
  if (!PyTuple_Check(device.ptr()) || PyTuple_Size(device.ptr()) != 2) return {0, 0};
  return {int64_of(PyTuple_GetItem(device.ptr(), 0)), int64_of(PyTuple_GetItem(device.ptr(), 1))};
}

bool on_gpu(std::int64_t device_type) { return device_type == dlpack::kCuda || device_type == dlpack::kCudaManaged; }

// What the array's library exports for the stream, which waits from then on for what is still to be written to it.
nb::object exported(nb::handle array, std::uintptr_t stream) {
  const nb::object method = array.attr("__dlpack__");
  const nb::int_ number(dlpack_stream(stream));
  try {
    return method(nb::arg("stream") = number, nb::arg("max_version") = nb::make_tuple(1, 0));
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_TypeError)) throw;
  }
  return method(nb::arg("stream") = number);  // of a library that is older than max_version
}

class ArrayHost final : public Host {
 public:
  Seen see(nb::handle array, const Given& given) const override {
    const auto [type, number] = device_of(array);
    Seen seen;
    if (on_gpu(type) && cuda::built() && given.gpus) {
      const nb::object capsule = exported(array, given.stream);
      take(capsule, array, given, &seen);
      if (!on_gpu(seen.owner.device_type())) {
        given.refuse(text("says that it is on a GPU (DLPack device ", type,
                          "), and its library exports memory of device ", seen.owner.device_type()));
      }
      seen.view.device = Device::cuda;
      seen.gpu = number;
    } else {
      take(array, array, given, &seen);
      if (seen.owner.device_type() != nb::device::cpu::value) {
        const bool elsewhere = on_gpu(seen.owner.device_type()) && cuda::built();
        given.refuse(text("is not in CPU memory (DLPack device ", seen.owner.device_type(),
                          "): ", elsewhere ? "this operation runs on the CPU" : runs_on()));
      }
    }
    return seen;
  }

  GpuMemory allocate(std::int64_t, std::uintptr_t stream, std::size_t bytes) const override {
    void* const memory = cuda::take_memory(bytes, reinterpret_cast<void*>(stream));
    return {memory, memory, stream,
            [](void* owner, std::uintptr_t on) { cuda::give_memory_back(owner, reinterpret_cast<void*>(on)); }};
  }

 private:
  // source: the array, or what its library exported of it.
  static void take(nb::handle source, nb::handle array, const Given& given, Seen* seen) {
    nb::ndarray<nb::ro>& found = seen->owner;
    if (given.written) {
      nb::ndarray<> writable;
      if (nb::try_cast(source, writable)) {
        found = nb::ndarray<nb::ro>(writable);
      } else if (nb::try_cast(source, found)) {
        given.refuse("is read-only: it is written, so it must be writable");
      }
    } else {
      nb::try_cast(source, found);
    }
    if (!found.is_valid()) {
      const nb::str type = nb::inst_name(array);
      given.refuse(text("is a ", type.c_str(), ": it must be an array that supports DLPack, such as numpy's"));
    }
    TensorView& view = seen->view;
    if (!dtype_of(found.dtype(), &view.dtype)) {
      given.refuse("is " + name_of(found.dtype()) + ": " + dtype_rule(given));
    }
    if (found.ndim() < 1 || found.ndim() > kMaxRank) given.refuse(rank_rule(static_cast<std::int64_t>(found.ndim())));
    view.data = const_cast<void*>(static_cast<const void*>(found.data()));
    view.rank = static_cast<int>(found.ndim());
    for (int i = 0; i < view.rank; ++i) {
      view.shape[i] = static_cast<std::int64_t>(found.shape(i));
      view.stride[i] = found.stride(i);
    }
  }
};

}  // namespace

const Host& array_host() {
  static const ArrayHost host;
  return host;
}

}  // namespace heddle::python
