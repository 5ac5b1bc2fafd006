// Every candidate of this build, and whether it runs here.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "heddle/candidate.h"
#include "heddle/linear.h"
#include "tensors.h"

namespace heddle::cli {

struct CandidateFact {
  std::string name, method, device;  // "cpu", "cuda"
  std::string refusal;               // why it does not run here; "" if it does
};

struct Operation {
  const char* name;
  std::vector<CandidateFact> candidates;
};

// Each candidate is asked about plain calls on its own device, among them one of what it is for. Those of a GPU look at
// the one that is there.
std::vector<Operation> operations();

// A linear layer of one row of x, to ask about: W [size, size].
struct LinearSample {
  StandIns views;
  TensorView x, dx;
  PackedWeights weights;

  LinearSample(Device device, const char* format, WeightOrder order, std::int64_t size);
};

}  // namespace heddle::cli
