// The folder of a model: its safetensors files, their index, config.json and what else lies there; and the folder that
// a new model is written into.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "core/json.h"
#include "heddle/safetensors.h"

namespace heddle::lowbit {

// Whether what has this name in a folder lies in it: the name is relative, and no part of it is empty, "." or "..".
bool stays_inside(std::string_view name);

// All names are as they stand in the folder, whatever the links behind them lead to.
struct ModelFolder {
  std::filesystem::path folder;
  std::vector<SafeTensors> files;    // in the order of their names
  std::vector<std::string> names;    // of the files
  std::string index_name;            // "" if there is none
  nlohmann::json index;              // as it is in the file
  nlohmann::json config;             // of config.json, an empty object where there is none
  std::vector<std::string> others;   // files that belong to the model as they are: tokenizer.json, ...
  std::vector<std::string> folders;  // of modules, an outer one before those in it; some are empty

  // A file, beside which only config.json counts, or a folder. Throws Error or RuntimeError: a file that is missing,
  // not what it should be, or does not hold the tensors that the index says; a tensor in two files.
  static ModelFolder open(const std::string& path);
};

// A folder under a temporary name beside `target`, removed with all that is in it unless it was finished.
class NewFolder {
 public:
  // Throws Error if `target` exists, RuntimeError if the folder cannot be made.
  explicit NewFolder(const std::string& target);
  ~NewFolder();
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;

  // Where a file or folder of that name goes; Error unless it stays_inside().
  std::string file(const std::string& name) const;
  // A folder in it, whose outer one is there; RuntimeError.
  void make_folder(const std::string& name) const;
  // Gives it its name.
  void finish();

 private:
  std::filesystem::path target_, path_;
};

}  // namespace heddle::lowbit
