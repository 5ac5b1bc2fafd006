#include "heddle/runtime.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "convert.h"
#include "cuda/backend.h"

namespace heddle::python {

void bind_runtime(nb::module_& module) {
  module.def("version", &version);
  module.def("cuda_built", &cuda::built);
  module.def("num_threads", &num_threads, nb::call_guard<nb::gil_scoped_release>());
  module.def("set_num_threads", &set_num_threads, nb::arg("threads"), nb::call_guard<nb::gil_scoped_release>());
  module.def("cpu_target", &cpu_target);
  module.def("cpu_targets", &cpu_targets);
  module.def("set_cpu_target", &set_cpu_target, nb::arg("name"));
}

}  // namespace heddle::python
