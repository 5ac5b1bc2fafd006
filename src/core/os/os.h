// What differs from one operating system to the next. linux.cc; macos.cc is its twin, which nobody has compiled so far.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace heddle::os {

// Processors that this process may run on, at least one.
int processors();

// The program or shared library that `address` of its code lies in, as an absolute path; empty if the system does not
// say.
std::filesystem::path file_of(const void* address);

// Makes room for `bytes` in an open file, so that writing them later cannot fail for want of it. Returns 0 or an errno.
int reserve(int fd, std::uint64_t bytes);

struct Cache {
  int level = 0;
  std::string kind;  // "Data", "Instruction" or "Unified"
  std::int64_t bytes = 0;
};

// Of the first processor, nearest first; empty if the system does not say.
std::vector<Cache> caches();

// The processor's name; "" if the system does not say.
std::string processor_name();

// Of so many processors' time a control group (a container) lets this process have; 0 if there is no limit.
double processor_time();

struct Memory {
  std::int64_t total = 0, available = 0;  // bytes; 0 if the system does not say
};
Memory memory();

}  // namespace heddle::os
