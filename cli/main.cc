// heddle: exact attention and low-bit weights from the command line. Exit codes: 0 done, 1 a check failed, 2 bad
// arguments or data, 3 the machine said no (a file, memory, a target).
#include <algorithm>
#include <iostream>
#include <new>
#include <numeric>
#include <string>
#include <vector>

#include "heddle/error.h"
#include "heddle/runtime.h"
#include "verbs.h"

namespace {

// Letters to insert, remove, replace or exchange with their neighbours until one word is the other.
std::size_t edits(const std::string& a, const std::string& b) {
  std::vector<std::size_t> before, last(b.size() + 1), row(b.size() + 1);
  std::iota(last.begin(), last.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (a[i - 1] != b[j - 1])});
      const bool exchanged = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (exchanged) row[j] = std::min(row[j], before[j - 2] + 1);
    }
    before = last;
    last = row;
  }
  return last[b.size()];
}

// Throws CLI::ExtrasError for a first word that names no subcommand, with the one that was probably meant.
void check_subcommand(const CLI::App& app, int argc, char** argv) {
  char** const word = std::find_if(argv + 1, argv + argc, [](const char* text) { return *text != '-'; });
  if (word == argv + argc) return;
  constexpr std::size_t kTypos = 2;
  const CLI::App* nearest = nullptr;
  std::size_t fewest = kTypos + 1;
  for (const CLI::App* verb : app.get_subcommands([](const CLI::App*) { return true; })) {
    const std::size_t found = edits(*word, verb->get_name());
    if (found == 0) return;
    if (found < fewest) {
      fewest = found;
      nearest = verb;
    }
  }
  std::string what = std::string("unknown subcommand '") + *word + "'";
  if (nearest != nullptr) what += "; did you mean " + nearest->get_name() + "?";
  throw CLI::ExtrasError(what, CLI::ExitCodes::ExtrasError);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Heddle: exact attention, forward and backward, and low-bit weights", "heddle");
  app.set_version_flag("--version", std::string("heddle ") + heddle::version());
  app.require_subcommand(1);
  heddle::cli::add_info(app);
  heddle::cli::add_run(app);
  heddle::cli::add_bench(app);
  heddle::cli::add_check(app);
  heddle::cli::add_tune(app);
  heddle::cli::add_explain(app);
  heddle::cli::add_memory(app);
  heddle::cli::add_quantize(app);
  try {
    check_subcommand(app, argc, argv);
    app.parse(argc, argv);
    std::cout.flush();
    return std::cout ? 0 : 3;
  } catch (const CLI::RuntimeError& error) {
    return error.get_exit_code();
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
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
