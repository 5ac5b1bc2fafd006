#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <sched.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <system_error>
#include <thread>

#include "core/os/os.h"

namespace heddle::os {
namespace {

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// "key : value" or "key: 123 kB" in a file of such lines.
std::string value_of(const char* path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const auto colon = line.find(':');
    if (line.compare(0, key.size(), key) != 0 || colon == std::string::npos) continue;
    const auto begin = line.find_first_not_of(" \t", colon + 1);
    return begin == std::string::npos ? "" : line.substr(begin);
  }
  return "";
}

std::int64_t kilobytes_of(const char* key) {
  std::int64_t kilobytes = 0;
  std::istringstream(value_of("/proc/meminfo", key)) >> kilobytes;
  return kilobytes * 1024;
}

}  // namespace

int processors() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

std::filesystem::path file_of(const void* address) {
  Dl_info info;
  link_map* map = nullptr;
  if (dladdr1(address, &info, reinterpret_cast<void**>(&map), RTLD_DL_LINKMAP) == 0 || map == nullptr) return {};
  // The program itself has no name there, and dladdr would give its argv[0], which may be anything.
  std::error_code failure;
  const std::filesystem::path file =
      map->l_name[0] == '\0' ? std::filesystem::read_symlink("/proc/self/exe", failure) : map->l_name;
  const std::filesystem::path found = std::filesystem::canonical(file, failure);
  return failure ? std::filesystem::path() : found;
}

int reserve(int fd, std::uint64_t bytes) { return ::posix_fallocate(fd, 0, static_cast<off_t>(bytes)); }

std::vector<Cache> caches() {
  std::vector<Cache> found;
  for (int index = 0;; ++index) {
    const std::string folder = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + "/";
    const std::string level = first_line(folder + "level"), size = first_line(folder + "size");
    if (level.empty() || size.empty()) return found;
    const std::int64_t unit = size.back() == 'K' ? 1024 : size.back() == 'M' ? 1 << 20 : 1;
    found.push_back({std::stoi(level), first_line(folder + "type"), std::stoll(size) * unit});
  }
}

std::string processor_name() { return value_of("/proc/cpuinfo", "model name"); }

// The least that the group of this process and those around it allow. In a container its own group is the root.
double processor_time() {
  double least = 0;
  const auto take = [&](double quota, double period) {
    if (quota > 0 && period > 0 && (least == 0 || quota / period < least)) least = quota / period;
  };
  const std::string root = "/sys/fs/cgroup";
  std::string group = value_of("/proc/self/cgroup", "0:");  // "0::/a/b": behind the first colon ":/a/b"
  group.erase(0, group.find('/'));
  if (group == "/") group.clear();
  for (;;) {
    double quota = 0, period = 0;  // "max 100000" has no quota
    std::istringstream(first_line(root + group + "/cpu.max")) >> quota >> period;
    take(quota, period);
    if (group.empty()) break;
    group.erase(group.find_last_of('/'));
  }
  const auto number = [&](const char* file) {
    double value = 0;
    std::istringstream(first_line(root + file)) >> value;
    return value;
  };
  take(number("/cpu/cpu.cfs_quota_us"), number("/cpu/cpu.cfs_period_us"));  // of the older hierarchy
  return least;
}

Memory memory() { return {kilobytes_of("MemTotal"), kilobytes_of("MemAvailable")}; }

}  // namespace heddle::os
