// Tasks on an executor without an allocation: std::function keeps a reference to the task and not a copy, which need
// not fit into it. parallel_for() returns when all is done, so the task outlives it.
#pragma once

#include <cstdint>
#include <functional>

#include "heddle/runtime.h"

namespace heddle {

template <class Task>
void parallel_for(Executor& executor, std::int64_t count, const Task& task) {
  executor.parallel_for(count, std::ref(task));
}

}  // namespace heddle
