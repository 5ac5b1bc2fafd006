// HEDDLE_* variables: what those do that are set, and those that nobody reads.
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <exception>

#include "choices.h"
#include "doctor.h"
#include "ops/choice.h"
#include "ops/validate.h"
#include "words.h"

namespace heddle::cli {
namespace {

// All that the library reads, and its Python package.
const std::vector<std::string> kVariables = {"HEDDLE_CPU_TARGET", "HEDDLE_NUM_THREADS", "HEDDLE_KERNEL",
                                             "HEDDLE_TUNING",     "HEDDLE_VALIDATE",    "HEDDLE_RANKS_EXCHANGE"};

Finding forced_kernel(const std::string& name) {
  Finding out{"HEDDLE_KERNEL", Verdict::note, "'" + name + "': operations that have it run nothing else",
              "take it away where you did not mean to compare: the library chooses by itself."};
  if (names_a_kernel(name)) return out;
  out.verdict = Verdict::problem;
  out.found = "'" + name + "', which no operation has" + did_you_mean(name, kernel_names());
  out.advice = "give it a name that `heddle explain` lists, or take it away: every call is refused.";
  return out;
}

Finding validation(const std::string& value) {
  const char* const name = "HEDDLE_VALIDATE";
  try {
    if (!validates_by_default()) return {name, Verdict::ok, "'" + value + "': index data on a GPU is not checked"};
  } catch (const std::exception& refusal) {
    return {name, Verdict::problem, refusal.what(), "give it 1 or 0, or take it away."};
  }
  return {name, Verdict::note, "'" + value + "': one more kernel checks index data in front of calls on a GPU",
          "take it away where time counts."};
}

Finding exchange_of_ranks(const std::string& value) {
  const char* const name = "HEDDLE_RANKS_EXCHANGE";
  if (value == "nccl")
    return {name, Verdict::note, "'nccl': ranks of one host exchange by NCCL, and not by copy engines",
            "take it away where they reach each other's memory."};
  return {name, Verdict::problem, "'" + value + "': it must be nccl, and means nothing as it is",
          "give it nccl, on all ranks, or take it away."};
}

Finding unread(const std::string& name) {
  const std::string meant = did_you_mean(name, kVariables);
  if (meant.empty()) {
    return {name, Verdict::note, "nothing in the library reads it",
            "take it away, unless a build or a script of yours does."};
  }
  return {name, Verdict::problem, "nothing reads it" + meant, "give it the name that was meant."};
}

}  // namespace

std::string setting(const char* name) {
  const char* const value = std::getenv(name);
  return value != nullptr ? value : "";
}

Findings examine_settings() {
  Findings out;
  if (const std::string name = setting("HEDDLE_KERNEL"); !name.empty()) out.push_back(forced_kernel(name));
  if (const std::string value = setting("HEDDLE_VALIDATE"); !value.empty()) out.push_back(validation(value));
  if (const std::string value = setting("HEDDLE_RANKS_EXCHANGE"); !value.empty())
    out.push_back(exchange_of_ranks(value));
  std::vector<std::string> others;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry, name = text.substr(0, text.find('='));
    if (name.starts_with("HEDDLE") && std::ranges::find(kVariables, name) == kVariables.end()) others.push_back(name);
  }
  std::ranges::sort(others);
  for (const std::string& name : others) out.push_back(unread(name));
  return out;
}

}  // namespace heddle::cli
