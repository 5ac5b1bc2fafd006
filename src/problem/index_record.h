// How a kernel hands over what it found: through memory that the host and the GPU share, without either waiting.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "problem/index_rules.h"

namespace heddle {

// Of one stream. Findings are counted by whoever writes or takes them, so nothing is ever reset: a finding lies here
// while one more was written than taken, and a kernel writes only while none does.
struct alignas(128) IndexRecord {
  std::uint32_t written = 0, taken = 0;
  const char* operation = "";
  BadIndex bad;
};

// "[operation] sentence" of what lies there, which is then taken; empty if nothing does. One thread at a time.
inline std::string take(IndexRecord& record) {
  std::atomic_ref<std::uint32_t> written(record.written), taken(record.taken);
  const std::uint32_t before = taken.load(std::memory_order_relaxed);
  if (written.load(std::memory_order_acquire) == before) return "";
  std::string out = "[" + std::string(record.operation) + "] " + sentence(record.bad);
  taken.store(before + 1, std::memory_order_release);
  return out;
}

}  // namespace heddle
