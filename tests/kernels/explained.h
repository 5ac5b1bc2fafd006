// What explain_*() says, and HEDDLE_KERNEL.
#pragma once

#include <cstdlib>
#include <string>
#include <vector>

#include "heddle/candidate.h"

namespace heddle {

// HEDDLE_KERNEL, for as long as this lives.
class Asked {
 public:
  explicit Asked(const char* name) { setenv("HEDDLE_KERNEL", name, 1); }
  ~Asked() { unsetenv("HEDDLE_KERNEL"); }
  Asked(const Asked&) = delete;
  Asked& operator=(const Asked&) = delete;
};

inline std::string chosen(const std::vector<Candidate>& list) {
  std::string names;
  for (const Candidate& c : list) {
    if (c.chosen) names += c.name;
  }
  return names;
}

// "cpu, reference, cuda"
inline std::string names_of(const std::vector<Candidate>& list) {
  std::string names;
  for (const Candidate& c : list) names += (names.empty() ? "" : ", ") + c.name;
  return names;
}

inline Candidate candidate_of(const std::vector<Candidate>& list, const std::string& name) {
  for (const Candidate& c : list) {
    if (c.name == name) return c;
  }
  return {.name = {}, .method = {}, .reason = "no such candidate", .plan = {}};
}

}  // namespace heddle
