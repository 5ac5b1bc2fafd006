#include "heddle/transformer.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <utility>
#include <vector>

#include "convert.h"
#include "heddle/error.h"

namespace heddle::python {
namespace {

using Rules = std::vector<std::pair<std::string, std::string>>;  // (pattern, format)

Encoder* load(const std::string& folder, const std::string& dtype, const std::string& method, const Rules& layers,
              bool cuda) {
  EncoderOptions options;
  if (dtype == "float32") {
    options.dtype = DType::f32;
  } else if (dtype == "bfloat16") {
    options.dtype = DType::bf16;
  } else if (dtype == "float16" && cuda) {
    options.dtype = DType::f16;
  } else {
    throw Error("[encoder_load] dtype is '" + dtype + "': it must be " +
                (cuda ? "'float16' or 'bfloat16', on a GPU" : "'float32' or 'bfloat16'"));
  }
  options.device = cuda ? Device::cuda : Device::cpu;
  options.method = method;
  for (const auto& [pattern, format] : layers) options.layers.push_back({pattern, format});
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

// (name, format, rows, columns, weight_bytes, changed, max, max_row, max_column)
nb::list layers(const Encoder& encoder) {
  nb::list out;
  for (const EncoderLayerInfo& layer : encoder.layers()) {
    const PackingError& error = layer.packing_error;
    out.append(nb::make_tuple(layer.name, layer.format, layer.rows, layer.columns, layer.weight_bytes, error.changed,
                              error.max, error.max_row, error.max_column));
  }
  return out;
}

// ((pattern, format)..., (layers, format, weight_bytes, error)..., error, weight_bytes)
nb::tuple choose(const std::string& folder, nb::handle token_ids, nb::handle cu_seqlens, double error,
                 const std::vector<std::string>& formats) {
  Arguments arguments("choose_precisions");
  const TensorView ids = arguments.read(token_ids, "token_ids"), lengths = arguments.read(cu_seqlens, "cu_seqlens");
  PrecisionOptions options;
  options.error = error;
  options.formats = formats;
  PrecisionChoice choice;
  {
    nb::gil_scoped_release released;
    choice = choose_precisions(folder, ids, lengths, options);
  }
  Rules rules;
  for (const lowbit::LayerRule& rule : choice.layers) rules.emplace_back(rule.pattern, rule.format);
  nb::list trials;
  for (const PrecisionChoice::Trial& trial : choice.trials) {
    trials.append(nb::make_tuple(trial.layers, trial.format, trial.weight_bytes, trial.error));
  }
  return nb::make_tuple(rules, trials, choice.error, choice.weight_bytes);
}

// Returns the stage times in seconds; on a GPU, where stream is that of the outputs, none.
nb::dict encode(const Encoder& encoder, nb::handle token_ids, nb::handle cu_seqlens, nb::handle embeddings,
                nb::handle hidden_states, bool normalize, std::int64_t longest, std::uintptr_t stream) {
  const bool gpu = encoder.device() == Device::cuda;
  Arguments arguments("encode", gpu ? Arguments::Devices::any : Arguments::Devices::cpu, stream);
  const TensorView ids = arguments.read(token_ids, "token_ids"), lengths = arguments.read(cu_seqlens, "cu_seqlens");
  const TensorView out = arguments.write(embeddings, "embeddings");
  const TensorView hidden = arguments.write(hidden_states, "hidden_states");
  EncoderTimes times;
  nb::dict seconds;
  CallScratch scratch(arguments);  // outlives what follows: given back with the GIL held
  {
    nb::gil_scoped_release released;
    Runtime runtime = arguments.runtime();
    runtime.workspace = scratch.get(encoder.workspace(ids.elements(), lengths.elements() - 1, longest));
    encoder.encode(ids, lengths, out, hidden, normalize, runtime, gpu ? nullptr : &times);
  }
  if (gpu) return seconds;
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
      .def_static("load", &load, nb::arg("folder"), nb::arg("dtype"), nb::arg("method"), nb::arg("layers"),
                  nb::arg("cuda"), nb::rv_policy::take_ownership)
      .def_static("choose_precisions", &choose, nb::arg("folder"), nb::arg("token_ids"), nb::arg("cu_seqlens"),
                  nb::arg("error"), nb::arg("formats"))
      .def_prop_ro("layers", &layers)
      .def_prop_ro("config", &config)
      .def_prop_ro("weight_bytes", &Encoder::weight_bytes)
      .def("workspace",
           [](const Encoder& e, std::int64_t t, std::int64_t s, std::int64_t l) { return e.workspace(t, s, l); })
      .def("encode", &encode, nb::arg("token_ids"), nb::arg("cu_seqlens"), nb::arg("embeddings"),
           nb::arg("hidden_states").none(), nb::arg("normalize"), nb::arg("longest"), nb::arg("stream") = 0);
}

}  // namespace heddle::python
