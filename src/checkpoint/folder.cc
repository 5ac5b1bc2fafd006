#include "checkpoint/folder.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <set>
#include <string_view>

#include <sys/stat.h>
#include <unistd.h>

#include "core/check.h"
#include "core/in_quotes.h"

namespace heddle::lowbit {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr std::string_view kIndex = ".safetensors.index.json", kConfig = "config.json";
// Weights in other forms, which the quantised ones replace.
constexpr std::string_view kWeights[] = {".safetensors", ".bin",  ".pt",  ".pth",    ".ckpt", ".h5",        ".msgpack",
                                         ".onnx",        ".gguf", ".npz", ".tflite", ".ot",   ".index.json"};

const Check kCheck("quantize_checkpoint");

json read_object(const fs::path& path, std::size_t max_bytes) {
  json found = read_json("quantize_checkpoint", path.string(), max_bytes);
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

[[noreturn]] void cannot(const char* what, const fs::path& path, const std::error_code& failure) {
  throw RuntimeError(text("[quantize_checkpoint] cannot ", what, " ", path.string(), ": ", failure.message()));
}

template <class Action>
void for_each_name(const fs::path& folder, const Action& action) {
  std::error_code failure;
  for (auto entry = fs::directory_iterator(folder, failure); !failure && entry != fs::directory_iterator();
       entry.increment(failure)) {
    action(entry->path().filename().string());
  }
  if (failure) cannot("read", folder, failure);
}

// A file, or a folder with all that is in it. Caches of models link files, so these links are followed. A link to a
// folder is refused: it may lead to any tree there is, or to one that it lies in.
void add(const std::string& name, ModelFolder* model) {
  const fs::path path = model->folder / name;
  std::error_code failure;
  const bool link = fs::is_symlink(path, failure);
  const fs::file_status status = fs::status(path, failure);
  if (failure) cannot(link ? "follow the link" : "read", path, failure);
  if (fs::is_regular_file(status)) {
    model->others.push_back(name);
    return;
  }
  kCheck.require(fs::is_directory(status), path.string(), " is neither a file nor a folder: it cannot be copied");
  kCheck.require(!link, path.string(), " is a link to a folder: only links to files are followed");
  model->folders.push_back(name);
  for_each_name(path, [&](const std::string& inner) { add(name + "/" + inner, model); });
}

// The files that the index names, each tensor in the one it says.
std::vector<std::string> files_of_index(const ModelFolder& model) {
  const std::string where = (model.folder / model.index_name).string();
  const auto map = model.index.find("weight_map");
  const auto metadata = model.index.find("metadata");
  kCheck.require(metadata == model.index.end() || metadata->is_object() || metadata->is_null(), where,
                 ": metadata is no object");
  kCheck.require(map != model.index.end() && map->is_object() && !map->empty(), where, " has no weight_map");
  std::set<std::string> names;
  for (const auto& [tensor, file] : map->items()) {
    kCheck.require(file.is_string(), where, ": weight_map of ", in_quotes(tensor), " is no file's name");
    const auto name = file.get<std::string>();
    kCheck.require(stays_inside(name) && name.find('/') == std::string::npos && name.ends_with(".safetensors"), where,
                   ": weight_map of ", in_quotes(tensor), " is ", in_quotes(name),
                   ": it must be a safetensors file of the folder");
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
  const json& map = model.index["weight_map"];
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

bool stays_inside(std::string_view name) {
  if (name.find('\0') != std::string_view::npos) return false;  // where the system would take it to end
  for (std::size_t begin = 0; begin <= name.size();) {
    const std::size_t end = std::min(name.find('/', begin), name.size());
    const std::string_view part = name.substr(begin, end - begin);
    if (part.empty() || part == "." || part == "..") return false;
    begin = end + 1;
  }
  return true;
}

ModelFolder ModelFolder::open(const std::string& path) {
  ModelFolder model;
  std::error_code failure;
  const fs::path given(path);
  if (!fs::is_directory(given, failure)) {
    model.folder = given.has_parent_path() ? given.parent_path() : fs::path(".");
    model.names = {given.filename().string()};
  } else {
    model.folder = given;
    for_each_name(given, [&](const std::string& name) {
      if (fs::is_directory(given / name, failure)) {
        if (is_module(name)) add(name, &model);
      } else if (name.ends_with(kIndex)) {
        kCheck.require(model.index_name.empty(), path, " has two indices, ", in_quotes(model.index_name), " and ",
                       in_quotes(name));
        model.index_name = name;
      } else if (name.ends_with(".safetensors")) {
        model.names.push_back(name);
      } else if (name != kConfig && !holds_weights(name)) {
        add(name, &model);
      }
    });
    if (!model.index_name.empty()) {
      model.index = read_object(model.folder / model.index_name, kMaxIndexBytes);
      model.names = files_of_index(model);
    }
    kCheck.require(!model.names.empty(), path, " has no *.safetensors");
  }
  std::sort(model.names.begin(), model.names.end());
  std::sort(model.others.begin(), model.others.end());
  std::sort(model.folders.begin(), model.folders.end());
  for (const std::string& name : model.names) model.files.push_back(SafeTensors::open((model.folder / name).string()));
  check_tensors(model);
  const fs::path config = model.folder / kConfig;
  // Not exists(), to which a link that leads nowhere is no file.
  const bool is_there = fs::symlink_status(config, failure).type() != fs::file_type::not_found;
  model.config = is_there ? read_object(config, kMaxConfigBytes) : json::object();
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

std::string NewFolder::file(const std::string& name) const {
  kCheck.require(stays_inside(name), "output ", target_.string(), ": ", in_quotes(name),
                 " is no name in it: names are relative, without parts that are empty, '.' or '..'");
  return (path_ / name).string();
}

void NewFolder::make_folder(const std::string& name) const {
  const std::string path = file(name);
  if (::mkdir(path.c_str(), 0777) == 0) return;
  throw RuntimeError(text("[quantize_checkpoint] cannot make the folder ", path, ": ", std::strerror(errno)));
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
