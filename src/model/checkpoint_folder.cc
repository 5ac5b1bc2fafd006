#include "model/checkpoint_folder.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <map>
#include <set>
#include <string_view>

#include <sys/stat.h>
#include <unistd.h>

#include "core/check.h"
#include "model/in_quotes.h"

namespace heddle::lowbit {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

constexpr std::string_view kIndex = ".safetensors.index.json";
// Weights in other forms, which the quantised ones replace.
constexpr std::string_view kWeights[] = {".safetensors", ".bin",  ".pt",  ".pth",    ".ckpt", ".h5",        ".msgpack",
                                         ".onnx",        ".gguf", ".npz", ".tflite", ".ot",   ".index.json"};

const Check kCheck("quantize_checkpoint");

ordered_json read_object(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw RuntimeError(text("[quantize_checkpoint] cannot open ", path.string(), ": ", std::strerror(errno)));
  ordered_json found = ordered_json::parse(in, nullptr, false);
  kCheck.require(found.is_object(), path.string(), " is not a JSON object");
  return found;
}

bool holds_weights(const std::string& name) {
  return std::any_of(std::begin(kWeights), std::end(kWeights),
                     [&](std::string_view suffix) { return name.ends_with(suffix); });
}

// "1_Pooling": a module of sentence-transformers behind the encoder.
bool is_module(const std::string& name) {
  const std::size_t digits = name.find_first_not_of("0123456789");
  return digits != std::string::npos && digits > 0 && name[digits] == '_';
}

void add_files_below(const fs::path& folder, const std::string& name, std::vector<std::string>* out) {
  for (const auto& entry : fs::recursive_directory_iterator(folder / name)) {
    if (entry.is_regular_file()) out->push_back(fs::relative(entry.path(), folder).string());
  }
}

// The files that the index names, each tensor in the one it says.
std::vector<std::string> files_of_index(const ModelFolder& model) {
  const std::string where = (model.folder / model.index_name).string();
  const auto map = model.index.find("weight_map");
  kCheck.require(map != model.index.end() && map->is_object() && !map->empty(), where, " has no weight_map");
  std::set<std::string> names;
  for (const auto& [tensor, file] : map->items()) {
    kCheck.require(file.is_string(), where, ": weight_map of ", in_quotes(tensor), " is no file's name");
    const auto name = file.get<std::string>();
    kCheck.require(fs::path(name).filename() == name && name.ends_with(".safetensors"), where, ": weight_map of ",
                   in_quotes(tensor), " is ", in_quotes(name), ": it must be a safetensors file of the folder");
    names.insert(name);
  }
  return {names.begin(), names.end()};
}

void check_tensors(const ModelFolder& model) {
  std::map<std::string, std::size_t> file_of;
  for (std::size_t i = 0; i < model.files.size(); ++i) {
    for (const auto& [name, entry] : model.files[i].entries()) {
      const auto [place, added] = file_of.emplace(name, i);
      kCheck.require(added, "tensor ", in_quotes(name), " is in ", model.files[place->second].source(), " and in ",
                     model.files[i].source(), ": each must be in one file");
    }
  }
  if (model.index_name.empty()) return;
  const std::string where = (model.folder / model.index_name).string();
  const ordered_json& map = model.index["weight_map"];
  for (const auto& [tensor, file] : map.items()) {
    const auto found = file_of.find(tensor);
    kCheck.require(found != file_of.end() && model.names[found->second] == file.get<std::string>(), where, ": tensor ",
                   in_quotes(tensor), " is not in ", in_quotes(file.get<std::string>()));
  }
  for (const auto& [tensor, i] : file_of) {
    kCheck.require(map.contains(tensor), model.files[i].source(), ": tensor ", in_quotes(tensor), " is not in ", where);
  }
}

}  // namespace

ModelFolder ModelFolder::open(const std::string& path) {
  ModelFolder model;
  std::error_code failure;
  const fs::path given(path);
  if (!fs::is_directory(given, failure)) {
    model.folder = given.has_parent_path() ? given.parent_path() : fs::path(".");
    model.names = {given.filename().string()};
  } else {
    model.folder = given;
    for (auto entry = fs::directory_iterator(given, failure); !failure && entry != fs::directory_iterator();
         entry.increment(failure)) {
      const std::string name = entry->path().filename().string();
      if (entry->is_directory() && is_module(name)) add_files_below(given, name, &model.others);
      if (!entry->is_regular_file()) continue;
      if (name.ends_with(kIndex)) {
        kCheck.require(model.index_name.empty(), path, " has two indices, ", in_quotes(model.index_name), " and ",
                       in_quotes(name));
        model.index_name = name;
      } else if (name.ends_with(".safetensors")) {
        model.names.push_back(name);
      } else if (name != "config.json" && !holds_weights(name)) {
        model.others.push_back(name);
      }
    }
    if (failure) throw RuntimeError(text("[quantize_checkpoint] cannot read ", path, ": ", failure.message()));
    if (!model.index_name.empty()) {
      model.index = read_object(model.folder / model.index_name);
      model.names = files_of_index(model);
    }
    kCheck.require(!model.names.empty(), path, " has no *.safetensors");
  }
  std::sort(model.names.begin(), model.names.end());
  std::sort(model.others.begin(), model.others.end());
  for (const std::string& name : model.names) model.files.push_back(SafeTensors::open((model.folder / name).string()));
  check_tensors(model);
  const fs::path config = model.folder / "config.json";
  model.config = fs::exists(config, failure) ? read_object(config) : ordered_json::object();
  kCheck.require(!model.config.contains("quantization_config"), config.string(),
                 " has a quantization_config: the checkpoint is quantised already");
  return model;
}

NewFolder::NewFolder(const std::string& target) : target_(target) {
  while (target_.has_relative_path() && !target_.has_filename()) target_ = target_.parent_path();
  std::error_code failure;
  kCheck.require(!target_.empty(), "output is empty");
  kCheck.require(!fs::exists(fs::symlink_status(target_, failure)), "output ", target_.string(),
                 " exists: it must be a new folder");
  std::string name;
  for (int i = 0; i < 100; ++i) {  // another thread, or what a process of this number left
    name = text(target_.string(), ".partial-", ::getpid(), "-", i);
    if (::mkdir(name.c_str(), 0777) == 0) {
      path_ = name;
      return;
    }
    if (errno != EEXIST) break;
  }
  throw RuntimeError(text("[quantize_checkpoint] cannot make the folder ", name, ": ", std::strerror(errno)));
}

NewFolder::~NewFolder() {
  std::error_code ignored;
  if (!path_.empty()) fs::remove_all(path_, ignored);
}

void NewFolder::finish() {
  // Without RENAME_NOREPLACE an empty folder of that name, made meanwhile, would be replaced; a full one refuses.
  if (::rename(path_.c_str(), target_.c_str()) != 0) {
    throw RuntimeError(text("[quantize_checkpoint] cannot rename ", path_.string(), " to ", target_.string(), ": ",
                            std::strerror(errno)));
  }
  path_.clear();
}

}  // namespace heddle::lowbit
