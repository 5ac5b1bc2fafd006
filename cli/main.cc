// heddle: exact attention and low-bit weights from the command line. Exit codes: 0 done, 1 a check failed, 2 bad
// arguments or data, 3 the machine said no (a file, memory, a target).
#include <algorithm>
#include <iostream>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "heddle/error.h"
#include "heddle/runtime.h"
#include "verbs.h"
#include "words.h"

namespace {

std::string unknown(const char* kind, const std::string& word, const std::vector<std::string>& names) {
  return std::string("unknown ") + kind + " '" + word + "'" + heddle::cli::did_you_mean(word, names);
}

std::vector<std::string> verbs_of(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* verb : app.get_subcommands([](const CLI::App*) { return true; })) {
    names.push_back(verb->get_name());
  }
  return names;
}

std::vector<std::string> flags_of(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  }
  return names;
}

// Throws CLI::ExtrasError for a first word that names no subcommand, with the one that was probably meant.
void check_subcommand(const CLI::App& app, int argc, char** argv) {
  char** const word = std::find_if(argv + 1, argv + argc, [](const char* text) { return *text != '-'; });
  if (word == argv + argc) return;
  const std::vector<std::string> verbs = verbs_of(app);
  if (std::ranges::find(verbs, *word) != verbs.end()) return;
  throw CLI::ExtrasError(unknown("subcommand", *word, verbs), CLI::ExitCodes::ExtrasError);
}

// Of a command line that was refused: the flag that its verb has not, or the word where the verb has others below it.
// "" if all words are known. A misspelt flag may be why another one is missing, so it is told instead of that.
std::string unknown_word(const CLI::App& app) {
  const std::vector<std::string> left = app.remaining();
  for (const std::string& word : left) {
    if (word.starts_with("--") && word != "--") return unknown("flag", word.substr(0, word.find('=')), flags_of(app));
  }
  const std::vector<std::string> verbs = verbs_of(app);
  // Beside a flag that is unknown a word is its value.
  if (!left.empty() && !verbs.empty()) return unknown("subcommand", left.front(), verbs);
  for (const CLI::App* verb : app.get_subcommands()) {
    if (std::string what = unknown_word(*verb); !what.empty()) return what;
  }
  return "";
}

// Of "Could not convert: --length = x", as CLI11 says it of what is no number: the flag, its value and the rule.
std::string no_number(const CLI::ParseError& error) {
  constexpr std::string_view kBefore = "Could not convert: ", kBetween = " = ";
  const std::string said = error.what();
  const auto between = said.find(kBetween);
  if (!said.starts_with(kBefore) || between == std::string::npos) return "";
  return said.substr(kBefore.size(), between - kBefore.size()) + " is '" + said.substr(between + kBetween.size()) +
         "': it must be a number that fits";
}

int refused(const CLI::App& app, const CLI::ParseError& error) {
  std::string what = error.get_exit_code() == 0 ? "" : unknown_word(app);
  if (what.empty()) what = no_number(error);
  if (what.empty()) return app.exit(error) == 0 ? 0 : 2;
  app.exit(CLI::ExtrasError(what, CLI::ExitCodes::ExtrasError));
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Heddle: exact attention, forward and backward, and low-bit weights", "heddle");
  app.set_version_flag("--version", std::string("heddle ") + heddle::version());
  app.require_subcommand(1);
  heddle::cli::add_doctor(app);
  heddle::cli::add_info(app);
  heddle::cli::add_run(app);
  heddle::cli::add_bench(app);
  heddle::cli::add_check(app);
  heddle::cli::add_tune(app);
  heddle::cli::add_explain(app);
  heddle::cli::add_memory(app);
  heddle::cli::add_quantize(app);
  heddle::cli::add_draw(app);
  heddle::cli::add_completion(app);
  try {
    check_subcommand(app, argc, argv);
    app.parse(argc, argv);
    std::cout.flush();
    return std::cout ? 0 : 3;
  } catch (const CLI::RuntimeError& error) {
    return error.get_exit_code();
  } catch (const CLI::ParseError& error) {
    return refused(app, error);
  } catch (const heddle::Error& error) {
    std::cerr << "heddle: " << error.what() << '\n';
    return 2;
  } catch (const std::bad_alloc&) {
    std::cerr << "heddle: the memory for this problem cannot be had; `heddle memory` says what it needs\n";
    return 3;
  } catch (const std::exception& error) {
    std::cerr << "heddle: " << error.what() << '\n';
    return 3;
  }
}
