// What the verbs below `heddle explain` have in common: where a call would run, and its candidates, told.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "choices.h"
#include "heddle/explain.h"
#include "problem.h"

namespace heddle::cli {

struct Explained {
  CommonFlags common;
  std::string device = "cpu";
  std::optional<std::string> gpu;  // not given: what is here

  void add_to(CLI::App& verb);
  // Sets threads and target. The GPU to assume, or null; `device` is then what the call's tensors are on. Throws for a
  // GPU that has no name or is not here.
  const GpuModel* begin();
  Device where() const { return device == "cuda" ? Device::cuda : Device::cpu; }

  // A table and the plan of what is chosen, under a line of the call and where it runs; or JSON: `call`, where, and the
  // candidates.
  void tell(const std::string& line, Json call, const std::vector<Candidate>& candidates) const;
};

// --dtype, where none is given.
inline std::string dtype_or_default(const std::string& dtype, Device device) {
  return !dtype.empty() ? dtype : device == Device::cuda ? "bf16" : "f32";
}

void add_explain_adaptive(CLI::App& explain);
void add_explain_linear(CLI::App& explain);
void add_explain_merge(CLI::App& explain);
void add_explain_sparse(CLI::App& explain);
// pool, select, gate, step
void add_explain_nsa(CLI::App& explain);
// rotary, append, append-int4, attention-int4
void add_explain_caches(CLI::App& explain);
// quantize, dequantize, unpack
void add_explain_lowbit(CLI::App& explain);

}  // namespace heddle::cli
