#include "machine.h"

#include <algorithm>
#include <chrono>

#include "heddle/runtime.h"

namespace heddle::cli {
namespace {

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
  found.model = os::processor_name();
  if (found.model.empty()) found.model = "unknown";
  found.processors = os::processors();
  found.processor_time = os::processor_time();
  found.caches = os::caches();
  found.memory = os::memory();
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
