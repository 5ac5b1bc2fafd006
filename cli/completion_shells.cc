// The scripts themselves: a table of verbs and flags in each shell's words, and the few lines that look things up in
// it.
#include <algorithm>

#include "completion.h"

namespace heddle::cli {
namespace {

std::string joined(const std::vector<std::string>& words, const std::string& between = " ") {
  std::string all;
  for (const std::string& word : words) all += (all.empty() ? "" : between) + word;
  return all;
}

std::string replaced(std::string text, const std::string& what, const std::string& by) {
  for (std::size_t at = 0; (at = text.find(what, at)) != std::string::npos; at += by.size()) {
    text.replace(at, what.size(), by);
  }
  return text;
}

// 'text', as bash and zsh read it.
std::string quoted(const std::string& text) { return "'" + replaced(text, "'", "'\\''") + "'"; }

// As fish reads it.
std::string fish_quoted(const std::string& text) {
  return "'" + replaced(replaced(text, "\\", "\\\\"), "'", "\\'") + "'";
}

// What zsh's _arguments and _describe take between brackets and colons.
std::string zsh_text(std::string text) {
  for (const char* special : {"\\", "[", "]", ":"}) text = replaced(text, special, std::string("\\") + special);
  return text;
}

const char* bash_kind(Values::Kind kind) {
  return kind == Values::Kind::file ? "file" : kind == Values::Kind::folder ? "folder" : "";
}

std::string zsh_action(const Values& values) {
  switch (values.kind) {
    case Values::Kind::names:
      return ":value:(" + joined(values.names) + ")";
    case Values::Kind::file:
      return ":file:_files";
    case Values::Kind::folder:
      return ":folder:_files -/";
    case Values::Kind::any:
      return ":value: ";
  }
  return "";
}

std::string zsh_function(const std::string& path) {
  return "_heddle" + (path.empty() ? "" : "_" + replaced(replaced(path, " ", "_"), "-", "_"));
}

// An _arguments specification of each spelling; one given excludes the others, unless it may be repeated.
std::string zsh_flag(const Flag& flag) {
  const bool takes = flag.values.count > 0, repeats = flag.values.count == Values::kMany;
  std::string lines, rest = "[" + zsh_text(flag.help) + "]";
  for (int i = 0; i < (repeats ? 1 : flag.values.count); ++i) rest += zsh_action(flag.values);
  for (const std::string& spelling : flag.spellings) {
    const std::string value = !takes || flag.values.count == 2 ? "" : spelling.starts_with("--") ? "=" : "+";
    const std::string before = repeats ? "*" : "(" + joined(flag.spellings) + ")";
    lines += " \\\n    " + quoted(before + spelling + value + rest);
  }
  return lines;
}

std::string fish_values(const Values& values) {
  switch (values.kind) {
    case Values::Kind::names:
      return " -x -a " + fish_quoted(joined(values.names));
    case Values::Kind::file:
      return " -r -F";
    case Values::Kind::folder:
      return " -x -a '(__fish_complete_directories)'";
    case Values::Kind::any:
      return values.count > 0 ? " -x" : "";
  }
  return "";
}

const Verb& at(const std::vector<Verb>& verbs, const std::string& path) {
  return *std::find_if(verbs.begin(), verbs.end(), [&](const Verb& verb) { return verb.path == path; });
}

}  // namespace

std::string bash_completion(const std::vector<Verb>& verbs) {
  std::string of_verbs, of_flags;
  for (const Verb& verb : verbs) {
    std::vector<std::string> flags, below = verb.values.names;
    for (const Flag& flag : verb.flags) {
      flags.insert(flags.end(), flag.spellings.begin(), flag.spellings.end());
      if (flag.values.count == 0) continue;
      std::vector<std::string> patterns;
      for (const std::string& spelling : flag.spellings) patterns.push_back(quoted(verb.path + " " + spelling));
      of_flags += "    " + joined(patterns, " | ") + ") count=" + std::to_string(flag.values.count) +
                  " words=" + quoted(joined(flag.values.names)) + " kind=" + bash_kind(flag.values.kind) + " ;;\n";
    }
    for (const std::string& path : verb.below) below.push_back(at(verbs, path).name());
    of_verbs += "    " + quoted(verb.path) + ") words=" + quoted(joined(below)) +
                " kind=" + bash_kind(verb.values.kind) + "\n      flags=" + quoted(joined(flags)) + " ;;\n";
  }
  return R"(# heddle's completion for bash, written by `heddle completion bash`.

# Sets what a verb, "explain linear" say, has behind it; fails where there is none.
_heddle_verb() {
  case "$1" in
)" + of_verbs +
         R"(    *) return 1 ;;
  esac
}

# Sets how many values a verb's flag takes, and which.
_heddle_flag() {
  count=0 words= kind=
  case "$1 $2" in
)" + of_flags +
         R"(  esac
}

_heddle() {
  local cur=${COMP_WORDS[COMP_CWORD]} verb= flag= left=0 count words kind flags word i
  COMPREPLY=()
  [[ $cur == = ]] && cur=
  for ((i = 1; i < COMP_CWORD; ++i)); do
    word=${COMP_WORDS[i]}
    if [[ $word == = ]]; then
      continue # of --flag=value, which bash splits
    elif [[ $word == -* && ! $word =~ ^-[0-9.] ]]; then
      _heddle_flag "$verb" "$word"
      flag=$word left=$count
    elif ((left > 0)); then
      ((--left))
    elif _heddle_verb "$verb${verb:+ }$word"; then
      verb+=${verb:+ }$word
    fi
  done
  _heddle_verb "$verb"
  if [[ $cur == -* ]]; then
    words=$flags kind=
  elif ((left > 0)); then
    _heddle_flag "$verb" "$flag"
  fi
  mapfile -t COMPREPLY < <(compgen -W "$words" -- "$cur")
  if [[ $kind == file ]]; then
    mapfile -t -O "${#COMPREPLY[@]}" COMPREPLY < <(compgen -f -- "$cur")
  elif [[ $kind == folder ]]; then
    mapfile -t -O "${#COMPREPLY[@]}" COMPREPLY < <(compgen -d -- "$cur")
  fi
  [[ -n $kind ]] && compopt -o filenames 2>/dev/null
  return 0
}

complete -F _heddle heddle
)";
}

std::string zsh_completion(const std::vector<Verb>& verbs) {
  std::string text = "#compdef heddle\n# heddle's completion for zsh, written by `heddle completion zsh`.\n";
  for (const Verb& verb : verbs) {
    text += "\n" + zsh_function(verb.path) + "() {\n";
    if (!verb.below.empty())
      text += "  local curcontext=$curcontext state\n  local -a line verbs\n  typeset -A opt_args\n";
    text += "  _arguments -C";
    for (const Flag& flag : verb.flags) text += zsh_flag(flag);
    if (verb.below.empty()) {
      if (verb.values.count > 0) text += " \\\n    " + quoted("1" + zsh_action(verb.values));
      text += "\n}\n";
      continue;
    }
    text += " \\\n    '1: :->verb' '*:: :->rest' && return\n  case $state in\n    verb)\n      verbs=(";
    std::string cases;
    for (const std::string& path : verb.below) {
      const Verb& sub = at(verbs, path);
      text += "\n        " + quoted(sub.name() + ":" + zsh_text(sub.help));
      cases += "\n        " + sub.name() + ") " + zsh_function(path) + " ;;";
    }
    text += "\n      )\n      _describe verb verbs ;;\n    rest)\n      case $words[1] in" + cases +
            "\n      esac ;;\n  esac\n}\n";
  }
  return text + "\nif [[ $funcstack[1] == _heddle ]]; then\n  _heddle \"$@\"\nelse\n  compdef _heddle heddle\nfi\n";
}

std::string fish_completion(const std::vector<Verb>& verbs) {
  std::string paths, lines;
  for (const Verb& verb : verbs) {
    if (!verb.path.empty()) paths += " " + fish_quoted(verb.path);
    const std::string here = "complete -c heddle -n " + fish_quoted("__heddle_at " + fish_quoted(verb.path));
    for (const std::string& path : verb.below) {
      const Verb& sub = at(verbs, path);
      lines += here + " -a " + sub.name() + " -d " + fish_quoted(sub.help) + "\n";
    }
    if (verb.values.count > 0) lines += here + fish_values(verb.values) + "\n";
    for (const Flag& flag : verb.flags) {
      lines += here;
      for (const std::string& spelling : flag.spellings) {
        lines += spelling.starts_with("--") ? " -l " + spelling.substr(2) : " -s " + spelling.substr(1);
      }
      lines += fish_values(flag.values) + " -d " + fish_quoted(flag.help) + "\n";
    }
  }
  return R"(# heddle's completion for fish, written by `heddle completion fish`.

# Whether the words so far name this verb, "explain linear" say.
function __heddle_at
  set -l path
  for word in (commandline -opc)[2..-1]
    if contains -- (string join -- ' ' $path $word))" +
         paths + R"(
      set -a path $word
    end
  end
  test "$path" = "$argv[1]"
end

complete -c heddle -f
)" + lines;
}

}  // namespace heddle::cli
