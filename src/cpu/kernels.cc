// Which SIMD targets are built in, which this processor runs, and which one is used.
#include "cpu/kernels.h"

#include <atomic>
#include <cstdlib>

#include <hwy/detect_compiler_arch.h>
#if HWY_ARCH_X86
#include <cpuid.h>
#endif

#include "core/check.h"
#include "cpu/left_out_targets.h"
#include "heddle/runtime.h"

namespace heddle::cpu {

// Null: left out of this build (HEDDLE_X86_TARGETS).
#if HWY_ARCH_X86
#ifdef HEDDLE_WITHOUT_SSE4
constexpr const Kernels* kSse4 = nullptr;
#else
namespace sse4 {
extern const Kernels kKernels;
}
constexpr const Kernels* kSse4 = &sse4::kKernels;
#endif
#ifdef HEDDLE_WITHOUT_AVX2
constexpr const Kernels* kAvx2 = nullptr;
#else
namespace avx2 {
extern const Kernels kKernels;
}
constexpr const Kernels* kAvx2 = &avx2::kKernels;
#endif
#ifdef HEDDLE_WITHOUT_AVX512
constexpr const Kernels* kAvx512 = nullptr;
#else
namespace avx512 {
extern const Kernels kKernels;
}
constexpr const Kernels* kAvx512 = &avx512::kKernels;
#endif
#ifdef HEDDLE_WITHOUT_AVX512_BF16
constexpr const Kernels* kAvx512Bf16 = nullptr;
#else
namespace avx512_bf16 {
extern const Kernels kKernels;
}
constexpr const Kernels* kAvx512Bf16 = &avx512_bf16::kKernels;
#endif
#elif HWY_ARCH_ARM
namespace neon {
extern const Kernels kKernels;
}
#endif
#ifdef HEDDLE_EMU128
namespace emu128 {
extern const Kernels kKernels;
}
#endif

namespace {

struct Target {
  const char* name;
  const Kernels* kernels;  // null: left out
  bool runs_here;
};

// Of this architecture, best first.
std::vector<Target> known_targets() {
  std::vector<Target> targets;
#if HWY_ARCH_X86
  __builtin_cpu_init();
  // F16C (leaf 1, ECX bit 29) and AVX512_BF16 (leaf 7.1, EAX bit 5) are unknown to clang 14's __builtin_cpu_supports.
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool has_f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx >> 29 & 1) != 0;
  const bool has_bf16 = __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax >> 5 & 1) != 0;
  const bool with_sse4 =
      __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("aes");
  const bool with_avx2 = with_sse4 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                         __builtin_cpu_supports("bmi2") && has_f16c;
  const bool with_avx512 = with_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
  const bool with_bf16 = with_avx512 && has_bf16 && __builtin_cpu_supports("avx512vnni");  // all that have the one
  // Zen 4 multiplies bf16 pairs at twice the rate of f32; on Sapphire Rapids they were measured at 0.6 of it, so
  // Intel's processors widen to f32.
  const Target wide{"avx512", kAvx512, with_avx512}, pairs{"avx512_bf16", kAvx512Bf16, with_bf16};
  const bool slow_pairs = __builtin_cpu_is("intel");
  targets.push_back(slow_pairs ? wide : pairs);
  targets.push_back(slow_pairs ? pairs : wide);
  targets.push_back({"avx2", kAvx2, with_avx2});
  targets.push_back({"sse4", kSse4, with_sse4});
#elif HWY_ARCH_ARM
  targets.push_back({"neon", &neon::kKernels, true});
#endif
#ifdef HEDDLE_EMU128
  targets.push_back({"emu128", &emu128::kKernels, true});
#endif
  return targets;
}

std::vector<Target> built_targets() {
  std::vector<Target> targets = known_targets();
  std::erase_if(targets, [](const Target& target) { return target.kernels == nullptr; });
  return targets;
}

const Kernels* find(const std::string& name) {
  std::string known, runs;
  for (const Target& target : built_targets()) {
    if (name == target.name) {
      if (!target.runs_here) throw RuntimeError(text("CPU target '", name, "': this processor does not support it"));
      return target.kernels;
    }
    known += (known.empty() ? "" : ", ") + std::string(target.name);
  }
  throw RuntimeError(text("CPU target '", name, "' is not built into this library; it has ", known));
}

const Kernels* default_kernels() {
  const char* name = std::getenv("HEDDLE_CPU_TARGET");
  if (name != nullptr && *name != '\0') return find(name);
  const auto& available = available_kernels();
  if (available.empty()) throw RuntimeError("no CPU target of this build runs on this processor (SSE4.2 is the least)");
  return available.front();
}

std::atomic<const Kernels*> chosen{nullptr};

}  // namespace

const std::vector<const Kernels*>& available_kernels() {
  static const std::vector<const Kernels*> list = [] {
    std::vector<const Kernels*> found;
    for (const Target& target : built_targets()) {
      if (target.runs_here) found.push_back(target.kernels);
    }
    return found;
  }();
  return list;
}

std::vector<std::string> better_targets_left_out() {
  std::vector<std::string> names;
  for (const Target& target : known_targets()) {
    if (!target.runs_here) continue;
    if (target.kernels != nullptr) break;
    names.emplace_back(target.name);
  }
  return names;
}

const Kernels& kernels() {
  const Kernels* now = chosen.load(std::memory_order_acquire);
  if (now == nullptr) {
    now = default_kernels();
    chosen.store(now, std::memory_order_release);
  }
  return *now;
}

}  // namespace heddle::cpu

namespace heddle {

std::string cpu_target() { return cpu::kernels().name; }

std::vector<std::string> cpu_targets() {
  std::vector<std::string> names;
  for (const cpu::Kernels* kernels : cpu::available_kernels()) names.emplace_back(kernels->name);
  return names;
}

void set_cpu_target(const std::string& name) {
  cpu::chosen.store(name.empty() ? cpu::default_kernels() : cpu::find(name), std::memory_order_release);
}

}  // namespace heddle
