// Every candidate of this build, and whether it runs here.
#pragma once

#include <string>
#include <vector>

#include "heddle/candidate.h"

namespace heddle::cli {

struct CandidateFact {
  std::string name, method, device;  // "cpu", "cuda"
  std::string refusal;               // why it does not run here; "" if it does
};

struct Operation {
  const char* name;
  std::vector<CandidateFact> candidates;
};

// Each candidate is asked about a plain call on its own device: one that has what it is for where there is one.
std::vector<Operation> operations();

}  // namespace heddle::cli
