#include "checkpoint/quantize_plan.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include "checkpoint/layouts.h"
#include "checkpoint/write.h"
#include "core/in_quotes.h"
#include "lowbit/scale_rules.h"
#include "ops/lowbit/arguments.h"

namespace heddle::lowbit {
namespace {

const Check kCheck("quantize_checkpoint");
constexpr std::string_view kWeight = ".weight";
constexpr std::pair<const char*, DType> kFloats[] = {{"F32", DType::f32}, {"F16", DType::f16}, {"BF16", DType::bf16}};

// Null for a dtype that is not quantised.
const DType* float_of(const SafeTensors::Entry& entry) {
  const auto* found = std::find_if(std::begin(kFloats), std::end(kFloats),
                                   [&](const auto& known) { return entry.dtype == known.first; });
  return found != std::end(kFloats) ? &found->second : nullptr;
}

}  // namespace

QuantizePlan::QuantizePlan(const std::string& input, const QuantizeCheckpointOptions& options)
    : model(ModelFolder::open(input)), options_(options) {
  plan();
}

std::string QuantizePlan::where(const PlannedTensor& p) const {
  return text(model.files[p.file].source(), ": tensor ", in_quotes(p.name));
}

void QuantizePlan::plan() {
  LayerChooser chooser(options_);
  std::map<std::string, Format> formats;
  std::set<std::string> weights;  // 2-D, less ".weight"
  for (std::size_t file = 0; file < model.files.size(); ++file) {
    const auto& entries = model.files[file].entries();
    for (const auto& [name, entry] : entries) {
      check_not_quantised(file, name);
      PlannedTensor p{.name = name,
                      .layer = "",
                      .entry = &entry,
                      .file = file,
                      .choice = {},
                      .importance = {},
                      .bytes_after = entry.bytes};
      report.bytes_before += entry.bytes;
      if (name.ends_with(kWeight) && entry.shape.size() == 2) {
        const std::string layer = name.substr(0, name.size() - kWeight.size());
        weights.insert(layer);
        p.choice = chooser.choose(layer);
        if (p.choice.kind == LayerChoice::Kind::keep) report.kept.push_back(layer);
        if (p.choice.kind != LayerChoice::Kind::keep) take(layer, &p);
        if (p.choice.kind == LayerChoice::Kind::quantized) formats.emplace(layer, p.choice.format);
        if (p.choice.kind == LayerChoice::Kind::sixteen_bits) report.kept.push_back(layer);
      }
      if (entry.shape.size() == 3 && float_of(entry) != nullptr) {
        report.copied_3d.push_back({name, model.names[file], entry.shape, entry.bytes});
      }
      tensors.push_back(std::move(p));
    }
  }
  chooser.require_all_matched();
  for (const std::string& layer : options_.importance_layers) {
    kCheck.require(weights.contains(layer), "importance has ", in_quotes(layer), ", which is no layer of ",
                   model.folder.string(), ": its names are those of 2-D weights, less .weight");
  }
  std::sort(report.kept.begin(), report.kept.end());
  std::sort(report.copied_3d.begin(), report.copied_3d.end(),
            [](const CopiedTensor& a, const CopiedTensor& b) { return a.name < b.name; });
  kCheck.require(!formats.empty(), model.folder.string(), " has no layer to quantise: no 2-D weight is a linear ",
                 "layer of a Transformer by its name, and no rule names one");
  weigh();
  // Which formats go together is checked here, before anything is written.
  report.dtype = dtype_of_config();
  report.quantization_config =
      quantization_config_of(formats, report.kept, report.dtype.empty() ? "float32" : report.dtype);
  layers = static_cast<std::size_t>(
      std::count_if(tensors.begin(), tensors.end(), [](const PlannedTensor& p) { return !p.layer.empty(); }));
}

void QuantizePlan::check_not_quantised(std::size_t file, const std::string& tensor) const {
  const SafeTensors& from = model.files[file];
  const std::string layer = layer_of_tensor(tensor, [&](const std::string& name) {
    FoundTensor found;
    if (const auto place = from.entries().find(name); place != from.entries().end()) found.entry = &place->second;
    return found;
  });
  kCheck.require(layer.empty(), from.source(), ": tensor ", in_quotes(tensor),
                 " is of a layer that is quantised already");
}

// A layer that is to change: dtype, extents, and the bytes it will have.
void QuantizePlan::take(const std::string& layer, PlannedTensor* p) const {
  const SafeTensors::Entry& entry = *p->entry;
  const DType* dtype = float_of(entry);
  kCheck.require(dtype != nullptr, where(*p), " is ", entry.dtype, ": only F32, F16 and BF16 are quantised");
  p->dtype = *dtype;
  if (p->choice.kind == LayerChoice::Kind::sixteen_bits) {
    if (p->dtype != DType::f32) return;
    p->bytes_after = entry.bytes / 2;
    p->layer = layer;
    return;
  }
  p->layer = layer;
  const std::int64_t rows = entry.shape[0], columns = entry.shape[1], group = p->choice.format.group;
  kCheck.require(rows > 0 && columns > 0, where(*p), " is [", rows, ", ", columns, "]: it is empty");
  kCheck.require(group == 0 || columns % group == 0, where(*p), " is [", rows, ", ", columns, "]: K = ", columns,
                 " is no multiple of ", group, ", the group of ", name_of(p->choice.format),
                 "; give it another format, or keep it, by a rule");
  kCheck.require(has_rule(p->choice.format, p->choice.rule), where(*p), ": rule is ", name_of(p->choice.rule),
                 ", which ", name_of(p->choice.format), " does not have");
  p->bytes_after = 0;
  for (const auto& tensor : tensors_of_layer(layer, p->choice.format, rows, columns, p->dtype)) {
    p->bytes_after += tensor.bytes;
  }
}

// Asks for the importance of each layer that is quantised.
void QuantizePlan::weigh() {
  if (!options_.importance) return;
  for (PlannedTensor& p : tensors) {
    if (p.choice.kind != LayerChoice::Kind::quantized) continue;
    const TensorView importance = options_.importance(p.layer);
    const std::int64_t K = p.entry->shape[1];
    said_of(p, [&] {
      const float* values = checked_importance(kCheck, importance, p.choice.rule, K, Device::cpu);
      if (values != nullptr) p.importance.assign(values, values + K);
    });
  }
}

std::string QuantizePlan::dtype_of_config() const {
  for (const char* field : {"dtype", "torch_dtype"}) {
    const auto found = model.config.find(field);
    if (found != model.config.end() && found->is_string()) return found->get<std::string>();
  }
  return "";
}

}  // namespace heddle::lowbit
