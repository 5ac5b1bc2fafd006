// The module heddle._heddle: conversions and calls, no policy. The package around it decides what to allocate.
#include "convert.h"

NB_MODULE(_heddle, module) {
  heddle::python::bind_options(module);
  heddle::python::bind_runtime(module);
  heddle::python::bind_hosts(module);
  heddle::python::bind_attention(module);
  heddle::python::bind_kv_cache(module);
  heddle::python::bind_partial(module);
  heddle::python::bind_sparse(module);
  heddle::python::bind_adaptive(module);
  heddle::python::bind_nsa(module);
  heddle::python::bind_int4_cache(module);
  heddle::python::bind_transformer(module);
  heddle::python::bind_lowbit(module);
  heddle::python::bind_linear(module);
}
