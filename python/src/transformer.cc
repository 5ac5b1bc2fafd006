#include "heddle/transformer.h"

#include <nanobind/stl/string.h>

#include <cstring>

#include "convert.h"
#include "heddle/error.h"

namespace heddle::python {
namespace {

Encoder* load(const std::string& folder, const std::string& dtype, const std::string& method) {
  EncoderOptions options;
  if (dtype == "float32") {
    options.dtype = DType::f32;
  } else if (dtype == "bfloat16") {
    options.dtype = DType::bf16;
  } else {
    throw Error("[encoder_load] dtype is '" + dtype + "': it must be 'float32' or 'bfloat16'");
  }
  options.method = method;
  nb::gil_scoped_release released;
  return new Encoder(Encoder::load(folder, options));
}

nb::dict config(const Encoder& encoder) {
  const EncoderConfig& values = encoder.config();
  nb::dict out;
  out["hidden"] = values.hidden;
  out["layers"] = values.layers;
  out["heads"] = values.heads;
  out["intermediate"] = values.intermediate;
  out["vocabulary"] = values.vocabulary;
  out["positions"] = values.positions;
  out["token_types"] = values.token_types;
  out["layer_norm_epsilon"] = values.layer_norm_epsilon;
  return out;
}

// Returns the stage times in seconds.
nb::dict encode(const Encoder& encoder, nb::handle token_ids, nb::handle cu_seqlens, nb::handle embeddings,
                nb::handle hidden_states, bool normalize, std::int64_t longest) {
  Arguments arguments("encode");
  const TensorView ids = arguments.read(token_ids, "token_ids"), lengths = arguments.read(cu_seqlens, "cu_seqlens");
  const TensorView out = arguments.write(embeddings, "embeddings");
  const TensorView hidden = arguments.write(hidden_states, "hidden_states");
  EncoderTimes times;
  {
    nb::gil_scoped_release released;
    const Scratch scratch(encoder.workspace(ids.elements(), lengths.elements() - 1, longest));
    encoder.encode(ids, lengths, out, hidden, normalize, scratch, &times);
  }
  nb::dict seconds;
  seconds["embedding"] = times.embedding;
  seconds["attention"] = times.attention;
  seconds["linear"] = times.linear;
  seconds["norm_and_activation"] = times.norm_and_activation;
  seconds["pooling"] = times.pooling;
  return seconds;
}

}  // namespace

void bind_transformer(nb::module_& module) {
  nb::class_<Encoder>(module, "Encoder")
      .def_static("load", &load, nb::arg("folder"), nb::arg("dtype"), nb::arg("method"), nb::rv_policy::take_ownership)
      .def_prop_ro("config", &config)
      .def_prop_ro("weight_bytes", &Encoder::weight_bytes)
      .def("workspace",
           [](const Encoder& e, std::int64_t t, std::int64_t s, std::int64_t l) { return e.workspace(t, s, l); })
      .def("encode", &encode, nb::arg("token_ids"), nb::arg("cu_seqlens"), nb::arg("embeddings"),
           nb::arg("hidden_states").none(), nb::arg("normalize"), nb::arg("longest"));
}

}  // namespace heddle::python
