// What a call may use of the machine, and whether its workspace suffices.
#pragma once

#include <cstddef>

#include "core/check.h"
#include "heddle/runtime.h"

namespace heddle {

inline Executor& executor_of(const Runtime& runtime) {
  return runtime.executor != nullptr ? *runtime.executor : default_executor();
}
inline int workers_of(const Runtime& runtime) { return executor_of(runtime).workers(); }

// Throws unless `workspace` has `needed` bytes, aligned to 64. advice: how a caller learns that number.
void check_workspace(const Check& check, const Workspace& workspace, std::size_t needed,
                     const char* advice = "ask the operation's workspace query");

}  // namespace heddle
