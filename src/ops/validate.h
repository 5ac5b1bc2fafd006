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

// Throws what was found on the host.
inline void require_none(const Check& check, const FirstBadIndex& found) {
  if (found) check.require(false, sentence(found.bad));
}

}  // namespace heddle
