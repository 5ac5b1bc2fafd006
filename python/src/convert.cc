#include "convert.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <string_view>
#include <utility>

#include "core/check.h"
#include "heddle/error.h"

namespace heddle::python {
namespace {

// What to give instead of an object whose memory is not what it stands for; empty for all others. By the class's name:
// its module may not be there. The stable ABI gives names as Python's strings alone, so classes that passed are
// remembered, and kept: no other class may come to stand at their addresses.
std::string_view instead_of(PyTypeObject* given) {
  static std::array<PyTypeObject*, 8> passed{};
  static std::size_t oldest = 0;
  if (std::find(passed.begin(), passed.end(), given) != passed.end()) return {};
  for (auto* type = given; type != nullptr; type = static_cast<PyTypeObject*>(PyType_GetSlot(type, Py_tp_base))) {
    const auto name = nb::steal<nb::object>(PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__name__"));
    const char* const words = name.is_valid() ? PyUnicode_AsUTF8AndSize(name.ptr(), nullptr) : nullptr;
    if (words == nullptr) throw nb::python_error();
    if (std::string_view(words) == "CausalBias") {
      return "is a CausalBias, whose memory holds no values: say causal='top_left' for causal_upper_left or "
             "causal='bottom_right' for causal_lower_right";
    }
    if (std::string_view(words) == "MaskedArray") {
      return "is a MaskedArray, whose mask would not be read: give its data";
    }
  }
  Py_INCREF(reinterpret_cast<PyObject*>(given));
  PyTypeObject* const forgotten = std::exchange(passed[oldest], given);
  oldest = (oldest + 1) % passed.size();
  Py_XDECREF(reinterpret_cast<PyObject*>(forgotten));
  return {};
}

}  // namespace

bool truth(nb::handle object) {
  const int value = PyObject_IsTrue(object.ptr());
  if (value < 0) throw nb::python_error();
  return value != 0;
}

void Arguments::refuse(const char* name, const std::string& what) const {
  throw Error("[" + std::string(operation_) + "] " + name + " " + what);
}

// After a conversion has failed with Python's own words, which do not say of what; its error is set.
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
  const char* found = PyUnicode_AsUTF8AndSize(object.ptr(), nullptr);
  if (found == nullptr) refuse_kind(object, name, "a string");
  return found;
}

bool Arguments::flag(nb::handle object, const char* name) const {
  if (PyBool_Check(object.ptr()) == 0) {
    PyErr_SetNone(PyExc_TypeError);
    refuse_kind(object, name, "True or False");
  }
  return object.is(nb::bool_(true));
}

TensorView Arguments::view(nb::handle object, const char* name, bool writable) {
  if (object.is_none()) return {};
  const Given given{operation_, name, writable, devices_ == Devices::any, stream_};
  if (const std::string_view words = instead_of(Py_TYPE(object.ptr())); !words.empty()) {
    given.refuse(std::string(words));
  }
  if (PyTuple_CheckExact(object.ptr())) {
    if (PyTuple_Size(object.ptr()) != 4) given.refuse("is a tuple: it must be an array");
    const auto part = [&](Py_ssize_t i) { return nb::handle(NB_TUPLE_GET_ITEM(object.ptr(), i)); };
    return view_of(part(0), part(1), part(2), part(3), given);
  }
  Seen seen = see(object, given);
  if (seen.gpu >= 0) {
    if (gpu_ >= 0 && seen.gpu != gpu_) {
      given.refuse(text("is on cuda:", seen.gpu, " and another tensor on cuda:", gpu_, ": they must be on one GPU"));
    }
    gpu_ = seen.gpu;
  }
  if (seen.owner.is_valid()) held_.push_back(std::move(seen.owner));
  return seen.view;
}

Seen Arguments::see(nb::handle object, const Given& given) {
  const bool torch = is_torch(object);
  const Host& own = torch ? torch_host() : array_host();
  Seen seen = own.see(object, given);
  if (seen.gpu < 0) return seen;
  if (host_ == nullptr) host_ = &own;
  // torch's view does not wait for torch's stream: where the call is on another library's, its DLPack export does.
  return torch && host_ != &own ? array_host().see(object, given) : std::move(seen);
}

Runtime Arguments::runtime() const {
  Runtime runtime;
  runtime.stream = reinterpret_cast<void*>(stream_);
  return runtime;
}

Workspace Scratch::get(std::size_t bytes) {
  constexpr std::size_t kKept = std::size_t{32} << 20;
  thread_local WorkspaceBuffer small;
  if (bytes > 0) workspace_ = bytes <= kKept ? small.get(bytes) : large_.get(bytes);
  return workspace_;
}

Workspace CallScratch::get(std::size_t bytes) {
  if (bytes == 0) return {};
  if (call_.gpu_ < 0) return scratch_.get(bytes);
  memory_ = call_.host_->allocate(call_.gpu_, call_.stream_, bytes);
  return {memory_.data(), bytes};
}

TensorView stand_in(const TensorView& like, DType dtype) {
  TensorView view = like;
  view.dtype = dtype;
  view.stride = contiguous_strides(view.rank, view.shape);
  view.data = nullptr;
  view.alignment = 64;  // as an allocator's
  return view;
}

nb::list told(const std::vector<Candidate>& candidates) {
  nb::list out;
  for (const Candidate& c : candidates) {
    out.append(
        nb::make_tuple(c.name, c.method, c.supported, c.reason, c.seconds, c.workspace, c.chosen, c.plan, c.of_16bit));
  }
  return out;
}

}  // namespace heddle::python
