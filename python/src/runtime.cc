#include "heddle/runtime.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "convert.h"
#include "cuda/backend.h"
#include "cuda/rank_memory.h"
#include "cuda/validate.h"
#include "heddle/error.h"
#include "ops/validate.h"

namespace heddle::python {
namespace {

void raise(const std::string& found) {
  if (!found.empty()) throw Error(found);
}

}  // namespace

void bind_runtime(nb::module_& module) {
  module.def("version", &version);
  module.def("cuda_built", &cuda::built);
  module.def("validates", &validates_by_default);
  // What was found on a stream of the current GPU, or on all of a GPU.
  module.def(
      "raise_bad_index", [](std::uintptr_t stream) { raise(poll_error(reinterpret_cast<void*>(stream))); },
      nb::arg("stream"));
  module.def(
      "raise_bad_indices", [](int gpu) { raise(cuda::take_bad_indices(gpu)); }, nb::arg("gpu"));
  // Of the capture that a stream of the current GPU is in; 0: of none.
  module.def(
      "capture_id", [](std::uintptr_t stream) { return cuda::capture_id(reinterpret_cast<void*>(stream)); },
      nb::arg("stream"));
  // Between memories of GPUs, by a copy engine.
  module.def(
      "copy_rows",
      [](std::uintptr_t to, std::size_t to_pitch, std::uintptr_t from, std::size_t from_pitch, std::size_t width,
         std::size_t rows, std::uintptr_t stream) {
        cuda::copy_rows_on_gpu(reinterpret_cast<void*>(to), to_pitch, reinterpret_cast<const void*>(from), from_pitch,
                               width, rows, reinterpret_cast<void*>(stream));
      },
      nb::arg("to"), nb::arg("to_pitch"), nb::arg("from_"), nb::arg("from_pitch"), nb::arg("width"), nb::arg("rows"),
      nb::arg("stream"));
  module.def("num_threads", &num_threads, nb::call_guard<nb::gil_scoped_release>());
  module.def("set_num_threads", &set_num_threads, nb::arg("threads"), nb::call_guard<nb::gil_scoped_release>());
  module.def("cpu_target", &cpu_target);
  module.def("cpu_targets", &cpu_targets);
  module.def("set_cpu_target", &set_cpu_target, nb::arg("name"));
}

}  // namespace heddle::python
