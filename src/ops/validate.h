// Validate mode: whether a call asks for it, and its kernel.
#pragma once

#include "core/check.h"
#include "cuda/validate.h"
#include "heddle/runtime.h"
#include "problem/call_indices.h"

namespace heddle {

// Whether HEDDLE_VALIDATE asks for it. Throws RuntimeError if that is neither 0 nor 1.
bool validates_by_default();

// Whether index data of a call on `device` is to be checked there.
inline bool validates(const Runtime& runtime, Device device) {
  return device == Device::cuda && (runtime.validate ? *runtime.validate : validates_by_default());
}

// Puts the checks of a call's attention in front of it, if it asks for them.
inline void check_attention_indices(const char* operation, const AttentionProblem& problem, const Runtime& runtime,
                                    const KeyNames& names = {}) {
  if (validates(runtime, problem.device)) {
    cuda::check_indices(operation, AttentionIndices{problem, names}, runtime.stream);
  }
}

// Throws what was found on the host.
inline void require_none(const Check& check, const FirstBadIndex& found) {
  if (found) check.require(false, sentence(found.bad));
}

}  // namespace heddle
