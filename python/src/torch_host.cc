#include <algorithm>
#include <string>
#include <string_view>

#include "convert.h"
#include "cuda/backend.h"
#include "dlpack_exchange.h"
#include "host.h"

namespace heddle::python {
namespace {

nb::object call(nb::handle object, nb::handle method) {
  PyObject* self = object.ptr();
  PyObject* result = PyObject_VectorcallMethod(method.ptr(), &self, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
  if (result == nullptr) throw nb::python_error();
  return nb::steal(result);
}

// Never destroyed: it may outlive the interpreter.
class TorchHost final : public Host {
 public:
  static TorchHost& get() {
    static auto* host = new TorchHost;
    return *host;
  }

  void use(nb::type_object tensor_type, nb::dict dtypes, nb::callable allocate) {
    type_ = tensor_type;
    dtypes_ = dtypes;
    allocate_ = allocate;
    if (!nb::hasattr(tensor_type, dlpack::kAttribute)) return;
    const nb::object capsule = nb::getattr(tensor_type, dlpack::kAttribute);
    if (PyCapsule_IsValid(capsule.ptr(), dlpack::kCapsule) == 0) return;
    const auto* api = static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsule));
    if (api->version.major == 1) api_ = api;
  }

  bool owns(nb::handle object) const {
    return type_.is_valid() && PyObject_TypeCheck(object.ptr(), reinterpret_cast<PyTypeObject*>(type_.ptr())) != 0;
  }

  Seen see(nb::handle tensor, const Given& given) const override {
    Seen seen;
    if (api_ != nullptr && api_->borrow != nullptr && borrow(tensor, given, &seen)) return seen;
    const std::int64_t gpu = gpu_of(tensor, given);
    const nb::object dtype = nb::getattr(tensor, dtype_);
    PyObject* code = PyDict_GetItemWithError(dtypes_.ptr(), dtype.ptr());
    if (code == nullptr) {
      if (PyErr_Occurred()) throw nb::python_error();
      const nb::str full = nb::str(dtype);  // "torch.float64"
      std::string_view words = full.c_str();
      if (words.starts_with("torch.")) words.remove_prefix(6);
      given.refuse("is " + std::string(words) + ": " + dtype_rule(given));
    }
    seen.view = view_of(call(tensor, data_ptr_), code, nb::getattr(tensor, shape_), call(tensor, stride_), given);
    seen.view.device = gpu >= 0 ? Device::cuda : Device::cpu;
    seen.gpu = gpu;
    return seen;
  }

  GpuMemory allocate(std::int64_t gpu, std::uintptr_t stream, std::size_t bytes) const override {
    if (api_ != nullptr) {
      auto extent = static_cast<std::int64_t>(bytes);
      dlpack::Tensor prototype{.device_type = dlpack::kCuda,
                               .device_id = static_cast<std::int32_t>(gpu),
                               .ndim = 1,
                               .dtype = {.code = dlpack::kUnsigned, .bits = 8, .lanes = 1},
                               .shape = &extent};
      dlpack::ManagedTensor* managed = nullptr;
      const auto ignore = [](void*, const char*, const char*) {};  // Python's allocator, asked next, has better words
      if (api_->allocate(&prototype, &managed, nullptr, ignore) == 0) {
        const auto give_back = [](void* owner, std::uintptr_t) {
          auto* const memory = static_cast<dlpack::ManagedTensor*>(owner);
          memory->deleter(memory);
        };
        return {managed->tensor.data, managed, stream, give_back};
      }
    }
    const nb::gil_scoped_acquire held;
    nb::object tensor = allocate_(bytes);
    void* const data = PyLong_AsVoidPtr(call(tensor, data_ptr_).ptr());
    return {data, tensor.release().ptr(), stream, [](void* owner, std::uintptr_t) {
              const nb::gil_scoped_acquire held;
              Py_DECREF(static_cast<PyObject*>(owner));
            }};
  }

 private:
  // Without Python calls. False for whatever is not plain: see() then finds the words.
  bool borrow(nb::handle tensor, const Given& given, Seen* seen) const {
    dlpack::Tensor found{};
    if (api_->borrow(tensor.ptr(), &found) != 0) {
      PyErr_Clear();
      return false;
    }
    const bool gpu = found.device_type == dlpack::kCuda && cuda::built() && given.gpus;
    if (!gpu && found.device_type != dlpack::kCpu) return false;
    if (found.ndim < 1 || found.ndim > kMaxRank) return false;
    TensorView& view = seen->view;
    if (!dtype_of({found.dtype.code, found.dtype.bits, found.dtype.lanes}, &view.dtype)) return false;
    if (gpu) seen->gpu = found.device_id;
    view.device = gpu ? Device::cuda : Device::cpu;
    view.data = static_cast<std::byte*>(found.data) + found.byte_offset;
    view.rank = found.ndim;
    std::copy_n(found.shape, found.ndim, view.shape.begin());
    std::copy_n(found.strides, found.ndim, view.stride.begin());
    return true;
  }

  // -1 for the CPU.
  std::int64_t gpu_of(nb::handle tensor, const Given& given) const {
    if (nb::getattr(tensor, is_cpu_).ptr() == Py_True) return -1;
    const auto where = [&] { return "is on " + std::string(nb::str(nb::getattr(tensor, "device")).c_str()); };
    if (!cuda::built() || nb::getattr(tensor, is_cuda_).ptr() != Py_True) given.refuse(where() + ": " + runs_on());
    if (!given.gpus) given.refuse(where() + ": this operation runs on the CPU");
    return int64_of(call(tensor, get_device_).ptr());
  }

  nb::object type_;
  nb::dict dtypes_;
  nb::callable allocate_;
  nb::str dtype_{"dtype"}, data_ptr_{"data_ptr"}, shape_{"shape"}, stride_{"stride"}, is_cpu_{"is_cpu"},
      is_cuda_{"is_cuda"}, get_device_{"get_device"};
  const dlpack::ExchangeApi* api_ = nullptr;  // absent from old versions
};

}  // namespace

const Host& torch_host() { return TorchHost::get(); }
bool is_torch(nb::handle object) { return TorchHost::get().owns(object); }

void use_torch(nb::type_object tensor_type, nb::dict dtypes, nb::callable allocate) {
  TorchHost::get().use(tensor_type, dtypes, allocate);
}

}  // namespace heddle::python
