// Sums of dK and dV in f32: where they lie, which task adds to which, and how they are joined and written. All of it
// follows from the problem alone, so every bit is the same with any number of threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "core/check.h"
#include "core/parallel.h"
#include "cpu/kernels.h"
#include "cpu/plan.h"
#include "problem/attended_pairs.h"

namespace heddle::cpu {

class KeyGradients {
 public:
  // parts: what the rows of a kv head can be cut into. Few heads are cut into tasks, so that a machine with several
  // cores has work; each keeps sums of its own.
  KeyGradients(const AttentionBackwardProblem& p, std::int64_t parts)
      : p_(p),
        cuts_(std::clamp<std::int64_t>(ceil_div(kFewTasks, std::max<std::int64_t>(p.B * p.Hkv, 1)), 1,
                                       std::max<std::int64_t>(parts, 1))),
        dk_floats_(rows() * kernels().gradient_width(p.D)),
        floats_(round_up(dk_floats_ + rows() * kernels().gradient_width(p.Dv), 16)) {}

  std::int64_t cuts() const { return cuts_; }
  std::int64_t floats() const { return floats_; }  // of one cut's dK and dV
  // With one cut a worker sums one kv head after the other; with more, each task has sums of its own.
  std::size_t bytes(int workers) const {
    return static_cast<std::size_t>((cuts_ == 1 ? workers : p_.B * p_.Hkv * cuts_) * floats_) * 4;
  }
  std::string describe() const { return cuts_ == 1 ? "a kv head to a thread" : text(cuts_, " parts of a kv head"); }

  // sum(b, kv_head, cut, dk, dv, worker) writes the sums of rows' parts cut, cut + cuts(), ...; memory: bytes().
  template <class Sum>
  void run(Executor& executor, float* memory, const Sum& sum) const {
    const Kernels& k = kernels();
    parallel_for(executor, p_.B * p_.Hkv * cuts_, [&](std::int64_t index, int worker) {
      const std::int64_t b = index / cuts_ / p_.Hkv, kv_head = index / cuts_ % p_.Hkv;
      float* const dk = memory + (cuts_ == 1 ? worker : index) * floats_;
      sum(b, kv_head, index % cuts_, dk, dk + dk_floats_, worker);
      if (cuts_ == 1) write(k, b, kv_head, dk);
    });
    if (cuts_ == 1) return;
    parallel_for(executor, p_.B * p_.Hkv, [&](std::int64_t index, int) {
      write(k, index / p_.Hkv, index % p_.Hkv, memory + index * cuts_ * floats_);
    });
  }

 private:
  static constexpr std::int64_t kFewTasks = 16;

  std::int64_t rows() const { return round_up(p_.Sk, kKeyBlock); }
  void write(const Kernels& k, std::int64_t b, std::int64_t kv_head, float* sums) const {
    if (p_.dk) k.write_gradient(p_, p_.dk, p_.D, p_.scale, b, kv_head, sums, cuts_, floats_);
    if (p_.dv) k.write_gradient(p_, p_.dv, p_.Dv, 1.0f, b, kv_head, sums + dk_floats_, cuts_, floats_);
  }

  const AttentionBackwardProblem& p_;
  const std::int64_t cuts_, dk_floats_, floats_;
};

// Of kernels whose tasks are tiles of rows by tiles of keys.
inline KeyGradients gradients_of_tiles(const AttentionBackwardProblem& p) {
  return {p, ceil_div(p.Sq * p.G, backward_rows(p))};
}
inline std::string describe_tiles(const AttentionBackwardProblem& p, int workers) {
  return text(kernels().name, ", tiles of ", backward_rows(p), " rows x ", kKeyBlock, " keys, ",
              gradients_of_tiles(p).describe(), ", ", workers, workers == 1 ? " thread" : " threads");
}
// Seconds. beside: what a pair takes beside the five products.
inline double seconds_of_tiles(const AttentionBackwardProblem& p, int workers, double beside) {
  const double rate = p.dtype == DType::bf16 ? kernels().bf16_rate : kernels().f32_rate;
  const double pairs = static_cast<double>(p.B * p.H) * attended_pairs(p);
  return 6e-6 + pairs * (6.0 * static_cast<double>(p.D) + 4.0 * static_cast<double>(p.Dv) + beside) / (rate * workers);
}

}  // namespace heddle::cpu
