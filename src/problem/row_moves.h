// Rows that go from one tensor to another.
#pragma once

#include <cstdint>

namespace heddle {

// Rows from, from + from_step ... of one tensor become rows to, to + to_step ... of another, `count` of them.
struct RowMove {
  std::int64_t from = 0, from_step = 1, to = 0, to_step = 1, count = 0;
};

}  // namespace heddle
