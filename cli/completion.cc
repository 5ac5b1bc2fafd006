// heddle completion: a shell's script, made of what CLI11 knows of the command.
#include "completion.h"

#include <algorithm>
#include <iostream>
#include <memory>

#include "choices.h"
#include "verbs.h"

namespace heddle::cli {
namespace {

// A type as help shows it: "FILE", "FOLDER", "TEXT:{forward,backward}".
Values values_of(const CLI::Option& option) {
  Values out;
  out.count = std::min(option.get_items_expected_max(), Values::kMany);
  if (out.count == Values::kMany && !option.get_allow_extra_args()) out.count = 1;
  const std::string type = option.get_type_name();
  const std::size_t open = type.find('{'), close = type.find('}');
  if (type == kFile || type == kFolder) {
    out.kind = type == kFile ? Values::Kind::file : Values::Kind::folder;
  } else if (open < close && close != std::string::npos) {
    out.kind = Values::Kind::names;
    out.names = CLI::detail::split(type.substr(open + 1, close - open - 1), ',');
  }
  return out;
}

void collect(const CLI::App& app, const std::string& path, std::vector<Verb>& verbs) {
  Verb verb{path, app.get_description(), {}, {}, {}};
  for (const CLI::Option* option : app.get_options()) {
    if (!option->nonpositional()) {
      verb.values = values_of(*option);
      continue;
    }
    Flag flag{{}, option->get_description(), values_of(*option)};
    for (const std::string& name : option->get_snames()) flag.spellings.push_back("-" + name);
    for (const std::string& name : option->get_lnames()) flag.spellings.push_back("--" + name);
    verb.flags.push_back(std::move(flag));
  }
  const auto below = app.get_subcommands([](const CLI::App*) { return true; });
  for (const CLI::App* sub : below) verb.below.push_back((path.empty() ? "" : path + " ") + sub->get_name());
  const std::vector<std::string> paths = verb.below;
  verbs.push_back(std::move(verb));
  for (std::size_t i = 0; i < below.size(); ++i) collect(*below[i], paths[i], verbs);
}

}  // namespace

std::string Verb::name() const { return path.substr(path.rfind(' ') + 1); }

std::vector<Verb> verbs_of(const CLI::App& app) {
  std::vector<Verb> verbs;
  collect(app, "", verbs);
  return verbs;
}

void add_completion(CLI::App& app) {
  CLI::App* verb = app.add_subcommand("completion", "A shell's script that completes verbs, flags and their values");
  examples(*verb, {"heddle completion bash > ~/.local/share/bash-completion/completions/heddle",
                   "heddle completion zsh > ~/.zfunc/_heddle",
                   "heddle completion fish > ~/.config/fish/completions/heddle.fish"});
  const auto shell = std::make_shared<std::string>();
  one_of(verb->add_option("shell", *shell, "Whose script to print"), {"bash", "zsh", "fish"});
  verb->callback([&app, shell] {
    if (shell->empty()) throw CLI::RequiredError("shell (bash, zsh or fish)");
    const std::vector<Verb> verbs = verbs_of(app);
    std::cout << (*shell == "bash"  ? bash_completion(verbs)
                  : *shell == "zsh" ? zsh_completion(verbs)
                                    : fish_completion(verbs));
  });
}

}  // namespace heddle::cli
