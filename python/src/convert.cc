#include "convert.h"

#include <algorithm>
#include <string_view>

#include "core/check.h"
#include "cuda/backend.h"
#include "dlpack_exchange.h"
#include "heddle/error.h"

namespace heddle::python {
namespace {

// The dtypes that an argument of this name may have.
std::string rule_of(std::string_view name) {
  for (const std::string_view index :
       {"cu_seqlens", "seqused", "seqlens", "page_table", "cache_", "offsets", "token_", "draft_"}) {
    if (name.starts_with(index)) return "it must be int32";
  }
  for (const std::string_view stored : {"codes", "scales", "zeros", "global_scale"}) {
    if (name == stored) return "see heddle.lowbit.QuantizedTensor";
  }
  if (name == "mask") return "it must be bool (true = attend); pass numbers that are added as bias";
  return "it must be float32, float16 or bfloat16";
}

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

bool dtype_of(nb::dlpack::dtype dtype, DType* out) {
  using Code = nb::dlpack::dtype_code;
  const auto code = static_cast<Code>(dtype.code);
  if (dtype.lanes != 1) return false;
  if (code == Code::Float && dtype.bits == 32) return *out = DType::f32, true;
  if (code == Code::Float && dtype.bits == 16) return *out = DType::f16, true;
  if (code == Code::Bfloat && dtype.bits == 16) return *out = DType::bf16, true;
  if (code == Code::Int && dtype.bits == 32) return *out = DType::i32, true;
  if (dtype.code == dlpack::kFloat8E4m3fn && dtype.bits == 8) return *out = DType::f8e4m3, true;
  if (code == Code::Bool && dtype.bits == 8) return *out = DType::boolean, true;
  if (code == Code::UInt && dtype.bits == 8) return *out = DType::u8, true;
  if (code == Code::Int && dtype.bits == 8) return *out = DType::i8, true;
  return false;
}

std::int64_t int64_of(PyObject* object) {
  const long long value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred()) throw nb::python_error();
  return value;
}

// What reading a torch tensor needs; empty until torch is in use. Never destroyed: it may outlive the interpreter.
struct Torch {
  nb::object type;
  nb::dict dtypes;
  nb::callable allocate;
  nb::str dtype{"dtype"}, data_ptr{"data_ptr"}, shape{"shape"}, stride{"stride"}, is_cpu{"is_cpu"}, is_cuda{"is_cuda"},
      get_device{"get_device"};
  const dlpack::ExchangeApi* api = nullptr;  // absent from old versions

  static Torch& get() {
    static auto* torch = new Torch;
    return *torch;
  }
  bool is_tensor(nb::handle object) const {
    return type.is_valid() && PyObject_TypeCheck(object.ptr(), reinterpret_cast<PyTypeObject*>(type.ptr())) != 0;
  }
};

nb::object call(nb::handle object, nb::handle method) {
  PyObject* result = PyObject_CallMethodNoArgs(object.ptr(), method.ptr());
  if (result == nullptr) throw nb::python_error();
  return nb::steal(result);
}

// What to give instead of an object whose memory is not what it stands for; empty for all others. By the class's name:
// its module may not be there.
std::string_view instead_of(PyTypeObject* type) {
  for (; type != nullptr; type = type->tp_base) {
    const std::string_view name = type->tp_name;
    if (name == "CausalBias") {
      return "is a CausalBias, whose memory holds no values: say causal='top_left' for causal_upper_left or "
             "causal='bottom_right' for causal_lower_right";
    }
    if (name == "MaskedArray") return "is a MaskedArray, whose mask would not be read: give its data";
  }
  return {};
}

// Where this build runs, for tensors that are somewhere else.
const char* runs_on() {
  return cuda::built() ? "Heddle runs on the CPU and on NVIDIA GPUs" : "this build of Heddle runs on the CPU";
}

}  // namespace

bool truth(nb::handle object) {
  const int value = PyObject_IsTrue(object.ptr());
  if (value < 0) throw nb::python_error();
  return value != 0;
}

void use_torch(nb::type_object tensor_type, nb::dict dtypes, nb::callable allocate) {
  Torch& torch = Torch::get();
  torch.type = tensor_type;
  torch.dtypes = dtypes;
  torch.allocate = allocate;
  if (!nb::hasattr(tensor_type, dlpack::kAttribute)) return;
  const nb::object capsule = nb::getattr(tensor_type, dlpack::kAttribute);
  if (PyCapsule_IsValid(capsule.ptr(), dlpack::kCapsule) == 0) return;
  const auto* api = static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsule));
  if (api->version.major == 1) torch.api = api;
}

void Arguments::refuse(const char* name, const std::string& what) const {
  throw Error("[" + std::string(operation_) + "] " + name + " " + what);
}

// After a conversion has failed with Python's own words, which do not say of what.
void Arguments::refuse_kind(nb::handle object, const char* name, const char* kind) const {
  if (PyErr_ExceptionMatches(PyExc_TypeError) == 0 && PyErr_ExceptionMatches(PyExc_ValueError) == 0 &&
      PyErr_ExceptionMatches(PyExc_OverflowError) == 0) {
    throw nb::python_error();
  }
  PyErr_Clear();
  const bool shown =
      object.is_none() || PyUnicode_Check(object.ptr()) || PyLong_Check(object.ptr()) || PyFloat_Check(object.ptr());
  const nb::str value = shown ? nb::repr(object) : nb::inst_name(object);
  throw nb::type_error(
      text("[", operation_, "] ", name, shown ? " is " : " is a ", value.c_str(), ": it must be ", kind).c_str());
}

double Arguments::number(nb::handle object, const char* name) const {
  const double value = PyFloat_AsDouble(object.ptr());
  if (value == -1.0 && PyErr_Occurred()) refuse_kind(object, name, "a number");
  return value;
}

std::int64_t Arguments::integer(nb::handle object, const char* name) const {
  const long long value = PyLong_AsLongLong(object.ptr());
  if (value == -1 && PyErr_Occurred()) refuse_kind(object, name, "an integer of 64 bits");
  return value;
}

const char* Arguments::string(nb::handle object, const char* name) const {
  const char* found = PyUnicode_AsUTF8(object.ptr());
  if (found == nullptr) refuse_kind(object, name, "a string");
  return found;
}

TensorView Arguments::view(nb::handle object, const char* name, bool writable) {
  if (object.is_none()) return {};
  if (const std::string_view words = instead_of(Py_TYPE(object.ptr())); !words.empty())
    refuse(name, std::string(words));
  if (Torch::get().is_tensor(object)) return view_of_torch(object, name);
  if (PyTuple_CheckExact(object.ptr())) return view_of_tuple(nb::borrow<nb::tuple>(object), name);
  return view_of_array(object, name, writable);
}

TensorView Arguments::view_of(nb::handle data, nb::handle dtype, nb::handle shape, nb::handle stride,
                              const char* name) const {
  const Py_ssize_t rank = PyTuple_Size(shape.ptr());
  if (rank < 0 || PyTuple_Size(stride.ptr()) != rank) throw nb::python_error();
  if (rank < 1 || rank > kMaxRank) {
    refuse(name, "has " + std::to_string(rank) + " dimensions: it must have 1 to " + std::to_string(kMaxRank));
  }
  TensorView view;
  view.data = PyLong_AsVoidPtr(data.ptr());
  if (view.data == nullptr && PyErr_Occurred()) throw nb::python_error();
  view.dtype = static_cast<DType>(int64_of(dtype.ptr()));
  view.rank = static_cast<int>(rank);
  for (Py_ssize_t i = 0; i < rank; ++i) {
    view.shape[i] = int64_of(NB_TUPLE_GET_ITEM(shape.ptr(), i));
    view.stride[i] = int64_of(NB_TUPLE_GET_ITEM(stride.ptr(), i));
  }
  return view;
}

TensorView Arguments::view_of_tuple(const nb::tuple& parts, const char* name) const {
  if (parts.size() != 4) refuse(name, "is a tuple: it must be an array");
  return view_of(parts[0], parts[1], parts[2], parts[3], name);
}

Device Arguments::device_of_torch(nb::handle tensor, const char* name) {
  const Torch& torch = Torch::get();
  if (nb::getattr(tensor, torch.is_cpu).ptr() == Py_True) return Device::cpu;
  const auto where = [&] { return "is on " + std::string(nb::str(nb::getattr(tensor, "device")).c_str()); };
  if (!cuda::built() || nb::getattr(tensor, torch.is_cuda).ptr() != Py_True) refuse(name, where() + ": " + runs_on());
  if (devices_ == Devices::cpu) refuse(name, where() + ": this operation runs on the CPU");
  use_gpu(int64_of(call(tensor, torch.get_device).ptr()), name);
  return Device::cuda;
}

void Arguments::use_gpu(std::int64_t gpu, const char* name) {
  if (gpu_ >= 0 && gpu != gpu_) {
    refuse(name, "is on cuda:" + std::to_string(gpu) + " and another tensor on cuda:" + std::to_string(gpu_) +
                     ": they must be on one GPU");
  }
  gpu_ = gpu;
}

// Without Python calls. False for whatever is not plain: view_of_torch() then finds the words.
bool Arguments::borrow_torch(nb::handle tensor, const char* name, TensorView* view) {
  dlpack::Tensor found{};
  if (Torch::get().api->borrow(tensor.ptr(), &found) != 0) {
    PyErr_Clear();
    return false;
  }
  const bool gpu = found.device_type == dlpack::kCuda && cuda::built() && devices_ == Devices::any;
  if (!gpu && found.device_type != dlpack::kCpu) return false;
  if (found.ndim < 1 || found.ndim > kMaxRank) return false;
  if (!dtype_of({found.dtype.code, found.dtype.bits, found.dtype.lanes}, &view->dtype)) return false;
  if (gpu) use_gpu(found.device_id, name);
  view->device = gpu ? Device::cuda : Device::cpu;
  view->data = static_cast<std::byte*>(found.data) + found.byte_offset;
  view->rank = found.ndim;
  std::copy_n(found.shape, found.ndim, view->shape.begin());
  std::copy_n(found.strides, found.ndim, view->stride.begin());
  return true;
}

TensorView Arguments::view_of_torch(nb::handle tensor, const char* name) {
  const Torch& torch = Torch::get();
  if (TensorView plain; torch.api != nullptr && torch.api->borrow != nullptr && borrow_torch(tensor, name, &plain))
    return plain;
  const Device device = device_of_torch(tensor, name);
  const nb::object dtype = nb::getattr(tensor, torch.dtype);
  PyObject* code = PyDict_GetItemWithError(torch.dtypes.ptr(), dtype.ptr());
  if (code == nullptr) {
    if (PyErr_Occurred()) throw nb::python_error();
    const nb::str full = nb::str(dtype);  // "torch.float64"
    std::string_view text = full.c_str();
    if (text.starts_with("torch.")) text.remove_prefix(6);
    refuse(name, "is " + std::string(text) + ": " + rule_of(name));
  }
  TensorView view =
      view_of(call(tensor, torch.data_ptr), code, nb::getattr(tensor, torch.shape), call(tensor, torch.stride), name);
  view.device = device;
  return view;
}

TensorView Arguments::view_of_array(nb::handle object, const char* name, bool writable) {
  nb::ndarray<nb::ro> array;
  if (!nb::try_cast(object, array)) {
    const nb::str type = nb::inst_name(object);
    refuse(name, "is a " + std::string(type.c_str()) + ": it must be an array that supports DLPack, such as numpy's");
  }
  if (writable) {
    nb::ndarray<> checked;
    if (!nb::try_cast(object, checked)) refuse(name, "is read-only: it is written, so it must be writable");
  }
  if (array.device_type() != nb::device::cpu::value) {
    refuse(name, "is not in CPU memory (DLPack device " + std::to_string(array.device_type()) +
                     "): " + (cuda::built() ? "of arrays in GPU memory, Heddle reads torch tensors" : runs_on()));
  }
  TensorView view;
  if (!dtype_of(array.dtype(), &view.dtype)) refuse(name, "is " + name_of(array.dtype()) + ": " + rule_of(name));
  if (array.ndim() < 1 || array.ndim() > kMaxRank) {
    refuse(name, "has " + std::to_string(array.ndim()) + " dimensions: it must have 1 to " + std::to_string(kMaxRank));
  }
  view.data = const_cast<void*>(static_cast<const void*>(array.data()));
  view.rank = static_cast<int>(array.ndim());
  for (int i = 0; i < view.rank; ++i) {
    view.shape[i] = static_cast<std::int64_t>(array.shape(i));
    view.stride[i] = array.stride(i);
  }
  held_.push_back(std::move(array));
  return view;
}

Workspace Scratch::get(std::size_t bytes) {
  constexpr std::size_t kKept = std::size_t{32} << 20;
  thread_local WorkspaceBuffer small;
  if (bytes > 0) workspace_ = bytes <= kKept ? small.get(bytes) : large_.get(bytes);
  return workspace_;
}

Scratch::operator Runtime() const {
  Runtime runtime;
  runtime.workspace = workspace_;
  return runtime;
}

DeviceScratch::~DeviceScratch() {
  if (managed_ != nullptr) managed_->deleter(managed_);
}

Workspace DeviceScratch::get(std::size_t bytes) {
  if (bytes == 0) return {};
  const Torch& torch = Torch::get();
  if (torch.api != nullptr) {
    auto extent = static_cast<std::int64_t>(bytes);
    dlpack::Tensor prototype{.device_type = dlpack::kCuda,
                             .device_id = static_cast<std::int32_t>(gpu_),
                             .ndim = 1,
                             .dtype = {.code = dlpack::kUnsigned, .bits = 8, .lanes = 1},
                             .shape = &extent};
    const auto ignore = [](void*, const char*, const char*) {};  // Python's allocator, asked next, has better words
    if (torch.api->allocate(&prototype, &managed_, nullptr, ignore) == 0) return {managed_->tensor.data, bytes};
    managed_ = nullptr;
  }
  nb::gil_scoped_acquire held;
  tensor_ = torch.allocate(bytes);
  return {PyLong_AsVoidPtr(call(tensor_, torch.data_ptr).ptr()), bytes};
}

}  // namespace heddle::python
