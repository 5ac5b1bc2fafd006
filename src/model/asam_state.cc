#include "model/asam_state.h"

#include <cmath>

#include "core/dtypes.h"
#include "core/in_quotes.h"

namespace heddle {

std::vector<float> AsamStateReader::values(const std::string& name, std::initializer_list<std::int64_t> shape) {
  known_.insert(name);
  const TensorView expected(nullptr, DType::f32, shape);
  const auto found = state_.find(name);
  check_.require(found != state_.end() && found->second.given(), name, " is missing: it must be ", expected);
  const TensorView& view = found->second;
  check_.require(view.device == Device::cpu, name, " is on a GPU: weights are given in the CPU's memory");
  check_.require(view.rank == expected.rank && view.shape == expected.shape, name, " is ", view, ": it must be ",
                 expected, " for this configuration");
  check_.require(view.dtype == DType::f32 || view.dtype == DType::f16 || view.dtype == DType::bf16, name, " is ",
                 name_of(view.dtype), ": it must be float32, float16 or bfloat16");
  check_.addressable(view, name.c_str());
  std::vector<float> out(static_cast<std::size_t>(view.elements()));
  for (std::int64_t natural = 0; natural < view.elements(); ++natural) {
    std::int64_t offset = 0, rest = natural;
    for (int i = view.rank - 1; i >= 0; --i) {
      offset += rest % view.shape[i] * view.stride[i];
      rest /= view.shape[i];
    }
    const float value = load_element(view.data, view.dtype, offset);
    check_.require(std::isfinite(value), name, " holds ", value, " at element ", natural, ": weights must be finite");
    out[static_cast<std::size_t>(natural)] = value;
  }
  return out;
}

FloatLinear AsamStateReader::linear(const std::string& name, std::int64_t out, std::int64_t in, bool bias) {
  const std::vector<float> weight = values(name + ".weight", {out, in});
  const std::vector<float> added =
      bias ? values(name + ".bias", {out}) : std::vector<float>(static_cast<std::size_t>(out));
  return FloatLinear(weight.data(), added.data(), out, in, DType::f32, DType::f32);
}

HeldNorm AsamStateReader::norm(const std::string& name, std::int64_t size) {
  const auto held = [&](const std::string& part) {
    const std::vector<float> of = values(name + part, {size});
    return WeightMemory(of.data(), of.size(), DType::f32, Device::cpu);
  };
  WeightMemory weight = held(".weight");
  return {Norm::layer_norm, kAsamNormEps, std::move(weight), held(".bias")};
}

void AsamStateReader::require_no_others(const char* of) const {
  for (const auto& [name, view] : state_) {
    if (known_.contains(name)) continue;
    check_.require(name.find("_pattern_modules.") == std::string::npos, in_quotes(name),
                   " is what the public package's layer keeps of its patterns: load such a state dict into "
                   "heddle.nn.ASAMLayer in Python, and give what its state_dict() has then");
    check_.require(false, in_quotes(name), " is no tensor of ", of, " of this configuration");
  }
}

AsamState asam_state(const Check& check, const SafeTensors& file, const std::string& prefix) {
  AsamState out;
  for (const auto& [name, entry] : file.entries()) {
    if (name.starts_with(prefix)) out.emplace(name.substr(prefix.size()), file.tensor(name));
  }
  check.require(prefix.empty() || !out.empty(), file.source(), " has no tensor whose name begins with ",
                in_quotes(prefix));
  return out;
}

}  // namespace heddle
