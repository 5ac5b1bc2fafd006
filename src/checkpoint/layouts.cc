// Which layout a layer has.
#include <string_view>
#include <utility>

#include "checkpoint/reader.h"

namespace heddle::lowbit {
namespace {

constexpr std::string_view kQuantState = ".weight.quant_state.bitsandbytes__";

// Codes of 8 bits, which a .weight_scale belongs to.
bool has_bytes(const FoundTensor& weight) {
  return weight.entry != nullptr && (weight.entry->dtype == "I8" || weight.entry->dtype == "F8_E4M3");
}

}  // namespace

std::string layer_of_tensor(const std::string& tensor, const FindTensor& find) {
  const auto without = [&](std::string_view suffix) { return tensor.substr(0, tensor.size() - suffix.size()); };
  for (const std::string_view suffix : {".qweight", ".weight_packed", ".weight_scale_2"}) {
    if (tensor.ends_with(suffix)) return without(suffix);
  }
  if (constexpr std::string_view kScale = ".weight_scale"; tensor.ends_with(kScale)) {
    const std::string name = without(kScale);
    if (has_bytes(find(name + ".weight"))) return name;
  }
  for (const char* type : {"nf4", "fp4"}) {
    const std::string suffix = std::string(kQuantState) + type;
    if (tensor.ends_with(suffix)) return without(suffix);
  }
  // Others may call a tensor "blocks"; gpt-oss has its scales beside it.
  for (const auto& [blocks, scales] : {std::pair{".blocks", ".scales"}, std::pair{"_blocks", "_scales"}}) {
    if (tensor.ends_with(blocks) && find(without(blocks) + scales).entry != nullptr) return without(blocks);
  }
  return {};
}

void describe_layer(const std::string& name, const FindTensor& find, int gptq_version, LayerSource* out) {
  LayerReader r(name, find, gptq_version, out);
  r.out.layer.name = r.name;
  std::vector<std::string> markers;
  void (*read)(LayerReader&) = nullptr;
  const auto mark = [&](const std::string& tensor, void (*with)(LayerReader&)) {
    if (r.find(tensor).entry == nullptr) return;
    markers.push_back(tensor);
    read = with;
  };
  mark(r.name + ".blocks", read_gpt_oss);
  mark(r.name + "_blocks", read_gpt_oss);
  mark(r.name + ".weight_scale_2", read_modelopt);
  mark(r.name + ".weight_packed", read_compressed_tensors);
  if (markers.empty() && has_bytes(r.find(r.name + ".weight")))
    mark(r.name + ".weight_scale", read_compressed_tensors_bytes);
  mark(r.name + std::string(kQuantState) + "nf4", read_bitsandbytes);
  mark(r.name + std::string(kQuantState) + "fp4", read_bitsandbytes);
  mark(r.name + ".qweight", read_gptq_or_awq);
  if (markers.empty()) {
    const FoundTensor weight = r.find(r.name + ".weight");
    r.check.require(weight.entry == nullptr, weight.where, " is ", weight.entry ? weight.entry->dtype : "", ": layer ",
                    in_quotes(r.name), " is not in 4 or 8 bits, or in a layout that is not read");
    throw Error(text("[checkpoint] no layer ", in_quotes(r.name),
                     ": none of its .qweight, .weight_packed, .weight_scale_2, .weight.quant_state.bitsandbytes__nf4 "
                     "or __fp4, .blocks and _blocks is there, nor .weight_scale beside a .weight of I8 or F8_E4M3"));
  }
  r.check.require(markers.size() == 1, "layer ", in_quotes(r.name), " has both ", in_quotes(markers[0]), " and ",
                  in_quotes(markers[markers.size() - 1]), ": its layout is not clear");
  r.marker = markers[0];
  read(r);
}

}  // namespace heddle::lowbit
