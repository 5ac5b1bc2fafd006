#include "machine.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <sstream>
#include <thread>

#include "heddle/runtime.h"

namespace heddle::cli {
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

constexpr int kSums = 12;  // enough to hide 4 to 5 cycles of latency on two units
constexpr std::int64_t kSteps = 1 << 20;

// `Vector` is a GCC vector of floats; the compiler contracts a * b + c where the function's target has FMA.
template <class Vector>
[[gnu::always_inline]] inline float multiply_add_loop(float seed) {
  Vector sums[kSums];
  const Vector a = Vector{} + (1.0f + seed), b = Vector{} + seed;
  for (int i = 0; i < kSums; ++i) sums[i] = Vector{} + static_cast<float>(i);
  for (std::int64_t step = 0; step < kSteps; ++step) {
    for (int i = 0; i < kSums; ++i) sums[i] = sums[i] * a + b;
  }
  Vector total{};
  for (int i = 0; i < kSums; ++i) total += sums[i];
  return total[0];
}

using Vector4 [[gnu::vector_size(16)]] = float;

#if defined(__x86_64__)
using Vector8 [[gnu::vector_size(32)]] = float;
using Vector16 [[gnu::vector_size(64)]] = float;
[[gnu::target("avx512f"), gnu::noinline]] float loop16(float seed) { return multiply_add_loop<Vector16>(seed); }
[[gnu::target("avx2,fma"), gnu::noinline]] float loop8(float seed) { return multiply_add_loop<Vector8>(seed); }
#endif
[[gnu::noinline]] float loop4(float seed) { return multiply_add_loop<Vector4>(seed); }

struct Loop {
  float (*run)(float seed);
  int lanes;
};

Loop widest_loop() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return {loop16, 16};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return {loop8, 8};
#endif
  return {loop4, 4};
}

}  // namespace

Machine machine() {
  Machine found;
  found.model = value_of("/proc/cpuinfo", "model name");
  if (found.model.empty()) found.model = "unknown";
  cpu_set_t set;
  found.processors = sched_getaffinity(0, sizeof(set), &set) == 0
                         ? CPU_COUNT(&set)
                         : static_cast<int>(std::thread::hardware_concurrency());
  found.processor_time = processor_time();
  for (int index = 0;; ++index) {
    const std::string folder = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + "/";
    const std::string level = first_line(folder + "level"), size = first_line(folder + "size");
    if (level.empty() || size.empty()) break;
    const std::int64_t unit = size.back() == 'K' ? 1024 : size.back() == 'M' ? 1 << 20 : 1;
    found.caches.push_back({std::stoi(level), first_line(folder + "type"), std::stoll(size) * unit});
  }
  found.memory_total = kilobytes_of("MemTotal");
  found.memory_available = kilobytes_of("MemAvailable");
  return found;
}

double measured_peak_flops(int threads) {
  const Loop loop = widest_loop();
  const auto pool = make_thread_pool(threads);
  std::vector<float> results(static_cast<std::size_t>(threads) * 16);  // a cache line each
  const std::int64_t runs = threads;
  double best = 0;
  for (int repeat = 0; repeat < 64; ++repeat) {
    const auto begin = std::chrono::steady_clock::now();
    // The seed is tiny but not a constant, so that the loop must run.
    pool->parallel_for(runs, [&](std::int64_t i, int) {
      results[static_cast<std::size_t>(i) * 16] = loop.run(1e-9f * static_cast<float>(repeat + 1));
    });
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - begin;
    const double operations = 2.0 * static_cast<double>(kSteps) * kSums * loop.lanes * static_cast<double>(runs);
    best = std::max(best, operations / time.count());
  }
  return best;
}

}  // namespace heddle::cli
