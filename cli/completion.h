// What shells complete of the command: every verb with its flags and their values, as CLI11 has them, and the scripts
// made of that.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace heddle::cli {

// What follows a flag, or a verb.
struct Values {
  enum class Kind : std::uint8_t { any, names, file, folder };
  int count = 0;  // kMany: one or more
  Kind kind = Kind::any;
  std::vector<std::string> names;
  static constexpr int kMany = 1000;
};

struct Flag {
  std::vector<std::string> spellings;  // "-t", "--dtype"
  std::string help;
  Values values;
};

struct Verb {
  std::string path;  // "explain linear"; "" is the command itself
  std::string help;
  std::vector<Flag> flags;
  Values values;                   // of its positional
  std::vector<std::string> below;  // paths of the verbs below it
  std::string name() const;        // the last word of its path
};

// The command's verbs, each before those below it.
std::vector<Verb> verbs_of(const CLI::App& app);

std::string bash_completion(const std::vector<Verb>& verbs);
std::string zsh_completion(const std::vector<Verb>& verbs);
std::string fish_completion(const std::vector<Verb>& verbs);

}  // namespace heddle::cli
