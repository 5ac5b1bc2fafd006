// Nobody has compiled or run this file: it says what would have to be true there, for whoever has such a machine.
#include <dlfcn.h>
#include <fcntl.h>
#include <mach/mach.h>
#include <sys/sysctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <thread>

#include "core/os/os.h"

namespace heddle::os {
namespace {

// A number of the kernel's table; 0 where it has none of this name.
std::int64_t number_of(const char* name) {
  std::int64_t value = 0;
  std::size_t bytes = sizeof value;
  return ::sysctlbyname(name, &value, &bytes, nullptr, 0) == 0 ? value : 0;
}

}  // namespace

// The system has no masks of processors.
int processors() { return static_cast<int>(std::max(1u, std::thread::hardware_concurrency())); }

std::filesystem::path file_of(const void* address) {
  Dl_info info;
  if (dladdr(address, &info) == 0 || info.dli_fname == nullptr) return {};
  std::error_code failure;
  const std::filesystem::path found = std::filesystem::canonical(info.dli_fname, failure);
  return failure ? std::filesystem::path() : found;
}

int reserve(int fd, std::uint64_t bytes) {
  fstore_t store{};
  store.fst_flags = F_ALLOCATEALL;
  store.fst_posmode = F_PEOFPOSMODE;
  store.fst_length = static_cast<off_t>(bytes);
  if (::fcntl(fd, F_PREALLOCATE, &store) == -1 || ::ftruncate(fd, static_cast<off_t>(bytes)) == -1) return errno;
  return 0;
}

std::vector<Cache> caches() {
  std::vector<Cache> found;
  const auto add = [&](const char* name, int level, const char* kind) {
    if (const std::int64_t bytes = number_of(name); bytes > 0) found.push_back({level, kind, bytes});
  };
  add("hw.l1dcachesize", 1, "Data");
  add("hw.l1icachesize", 1, "Instruction");
  add("hw.l2cachesize", 2, "Unified");
  add("hw.l3cachesize", 3, "Unified");
  return found;
}

std::string processor_name() {
  char name[256] = "";
  std::size_t bytes = sizeof name - 1;
  return ::sysctlbyname("machdep.cpu.brand_string", name, &bytes, nullptr, 0) == 0 ? name : "";
}

// There are no control groups.
double processor_time() { return 0; }

Memory memory() {
  Memory found{number_of("hw.memsize"), 0};
  vm_statistics64_data_t pages{};
  mach_msg_type_number_t count = HOST_VM_INFO64_COUNT;
  if (::host_statistics64(::mach_host_self(), HOST_VM_INFO64, reinterpret_cast<host_info64_t>(&pages), &count) ==
      KERN_SUCCESS) {
    found.available = static_cast<std::int64_t>(pages.free_count + pages.inactive_count) * ::getpagesize();
  }
  return found;
}

}  // namespace heddle::os
