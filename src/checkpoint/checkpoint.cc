// Files of a checkpoint as one set of tensors, and its layers by name.
#include "heddle/checkpoint.h"

#include <algorithm>
#include <filesystem>
#include <set>
#include <utility>

#include "checkpoint/layouts.h"
#include "core/check.h"
#include "core/in_quotes.h"
#include "core/json.h"
#include "core/names.h"
#include "core/overlap.h"
#include "ops/lowbit/arguments.h"

namespace heddle::lowbit {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr NamedValue<Layout> kLayouts[] = {{"gpt_oss_mxfp4", Layout::gpt_oss_mxfp4},
                                           {"modelopt_nvfp4", Layout::modelopt_nvfp4},
                                           {"compressed_tensors_nvfp4", Layout::compressed_tensors_nvfp4},
                                           {"compressed_tensors_mxfp4", Layout::compressed_tensors_mxfp4},
                                           {"compressed_tensors_int4", Layout::compressed_tensors_int4},
                                           {"compressed_tensors_int8", Layout::compressed_tensors_int8},
                                           {"compressed_tensors_fp8", Layout::compressed_tensors_fp8},
                                           {"bitsandbytes", Layout::bitsandbytes},
                                           {"gptq", Layout::gptq},
                                           {"awq", Layout::awq}};

// A path's safetensors files, in the order of their names.
std::vector<std::string> files_of(const std::string& path) {
  std::error_code failure;
  if (!fs::is_directory(path, failure)) return {path};
  std::vector<std::string> files;
  for (auto entry = fs::directory_iterator(path, failure); !failure && entry != fs::directory_iterator();
       entry.increment(failure)) {
    if (entry->path().extension() == ".safetensors") files.push_back(entry->path().string());
  }
  if (failure) throw RuntimeError(text("[checkpoint] cannot read ", path, ": ", failure.message()));
  if (files.empty()) throw Error(text("[checkpoint] ", path, " has no *.safetensors"));
  std::sort(files.begin(), files.end());
  return files;
}

// What a field of a producer's JSON says, or "".
std::string string_of(const json& object, const char* field) {
  const auto found = object.find(field);
  return found != object.end() && found->is_string() ? found->get<std::string>() : std::string();
}

using FileOf = std::map<std::string, std::size_t>;

FindTensor finder(const std::vector<SafeTensors>& files, const FileOf& file_of) {
  return [&files, &file_of](const std::string& name) {
    FoundTensor found;
    const auto place = file_of.find(name);
    if (place == file_of.end()) return found;
    const SafeTensors& file = files[place->second];
    found.entry = &file.entries().at(name);
    found.where = file.source() + ": tensor " + in_quotes(name);
    return found;
  };
}

// 1 or 2; 0 if the folder has no file that says it. Most layers need none, so one that is no JSON object or cannot be
// read is as good as none.
int gptq_version_of(const fs::path& folder) {
  const std::pair<const char*, const char*> places[] = {{"config.json", "quantization_config"},
                                                        {"quantize_config.json", nullptr}};
  for (const auto& [file, field] : places) {
    json whole;
    try {
      whole = read_json("checkpoint", (folder / file).string(), kMaxConfigBytes);
    } catch (const RuntimeError&) {
      continue;
    }
    if (!whole.is_object() || (field != nullptr && !whole.contains(field))) continue;
    const json& config = field != nullptr ? whole[field] : whole;
    if (!config.is_object()) continue;
    const std::string method = string_of(config, "quant_method"), format = string_of(config, "checkpoint_format");
    if (method != "gptq" && !(method.empty() && config.contains("bits"))) continue;
    if (format == "gptq_v2") return 2;
    if (format.empty() || format == "gptq") return 1;  // files from before the field are version 1
  }
  return 0;
}

}  // namespace

const char* name_of(Layout layout) { return name_in(kLayouts, layout); }

Checkpoint::Checkpoint(std::vector<SafeTensors> files, const CheckpointOptions& options)
    : files_(std::move(files)), gptq_version_(options.gptq_version) {
  const Check check("checkpoint");
  check.require(gptq_version_ >= 0 && gptq_version_ <= 2, "gptq_version is ", gptq_version_,
                ": it must be 1, 2, or 0 for what the files' configuration says");
  for (std::size_t i = 0; i < files_.size(); ++i) {
    for (const auto& [name, entry] : files_[i].entries()) {
      const auto [place, added] = file_of_.emplace(name, i);
      check.require(added, "tensor ", in_quotes(name), " is in ", files_[place->second].source(), " and in ",
                    files_[i].source(), ": each must be in one file");
    }
  }
}

Checkpoint Checkpoint::open(const std::vector<std::string>& paths, const CheckpointOptions& options) {
  Check("checkpoint").require(!paths.empty(), "no path is given");
  std::vector<SafeTensors> files;
  CheckpointOptions known = options;
  for (const std::string& path : paths) {
    const std::vector<std::string> here = files_of(path);
    for (const std::string& file : here) files.push_back(SafeTensors::open(file));
    if (known.gptq_version == 0) known.gptq_version = gptq_version_of(fs::path(here[0]).parent_path());
  }
  return Checkpoint(std::move(files), known);
}

std::vector<StoredLayer> Checkpoint::layers() const {
  const FindTensor find = finder(files_, file_of_);
  std::set<std::string> names;
  for (const auto& [tensor, file] : file_of_) {
    std::string name = layer_of_tensor(tensor, find);
    if (!name.empty()) names.insert(std::move(name));
  }
  std::vector<StoredLayer> out;
  for (const std::string& name : names) {
    LayerSource source;
    try {
      describe_layer(name, find, gptq_version_, &source);
    } catch (const Error& error) {
      source.layer.refusal = error.what();
    }
    out.push_back(std::move(source.layer));
  }
  return out;
}

StoredLayer Checkpoint::layer(const std::string& name) const {
  LayerSource source;
  describe_layer(name, finder(files_, file_of_), gptq_version_, &source);
  return std::move(source.layer);
}

void Checkpoint::load(const std::string& name, const QuantizedMatrix& out, const LoadOptions& options,
                      const Runtime& runtime) const {
  const Check check("checkpoint");
  LayerSource source;
  describe_layer(name, finder(files_, file_of_), gptq_version_, &source);
  const StoredLayer& layer = source.layer;
  const std::string called = in_quotes(name), format = name_of(layer.format);
  check.require(options.expert >= 0 && options.expert<std::max<std::int64_t>(layer.experts, 1), "expert is ",
                                                      options.expert, ": layer ", called, " has ", layer.experts> 0
                    ? text(layer.experts, " of them, from 0")
                    : "one matrix, 0");
  check.require(options.reorder_columns || layer.column_order.empty(), "layer ", called,
                " has columns of a group that do not lie together (g_idx): it can be loaded with columns in another "
                "order, which reorder_columns allows and column_order names");
  check.require(out.format == layer.format && out.rows == layer.rows && out.columns == layer.columns, "out is for [",
                out.rows, ", ", out.columns, "] in ", name_of(out.format), ": layer ", called, " is [", layer.rows,
                ", ", layer.columns, "] in ", format);
  checked_matrix(check, out, "out");
  const std::pair<const TensorView*, const char*> written[] = {{&out.codes, "out.codes"},
                                                               {&out.scales, "out.scales"},
                                                               {&out.zeros, "out.zeros"},
                                                               {&out.global_scale, "out.global_scale"}};
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < i; ++j) {
      if (!written[i].first->given() || !written[j].first->given()) continue;
      check.require(!may_share_memory(*written[i].first, *written[j].first), written[i].second, " shares memory with ",
                    written[j].second);
    }
  }
  load_layer(source, options.expert, out, runtime.executor != nullptr ? *runtime.executor : default_executor());
}

}  // namespace heddle::lowbit
