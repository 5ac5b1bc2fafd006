// What explain_*() answers.
#pragma once

#include <cstddef>
#include <string>

#include "heddle/tensor.h"

namespace heddle {

// One kernel that could serve a call.
struct Candidate {
  std::string name;  // as `force` takes it
  // "flash", "baseline" or "naive" (attention), "linear", "rotary", "append", "quantize", "dequantize", "unpack",
  // "merge", "pool", "select", "gate", "nsa_step" or "reference"
  std::string method;
  Device device = Device::cpu;
  bool supported = false;
  std::string reason;    // why not, if not supported
  double seconds = 0.0;  // estimated, if supported
  std::size_t workspace = 0;
  std::string plan;  // what it would run, in words, if supported: its variant, tiles, how keys are split
  bool chosen = false;
  // Linear layers on a GPU: `seconds` over those estimated of a product of 16-bit weights; else 0.
  double of_16bit = 0.0;
};

}  // namespace heddle
