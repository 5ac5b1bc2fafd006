// The gate of adaptive sparse attention: of prefixes of a sequence, how far a head's pattern will do, and which
// pattern. What is computed is heddle.nn.AdaptiveGate's.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "heddle/runtime.h"
#include "model/asam_state.h"
#include "model/cpu_workspace.h"

namespace heddle {

struct AsamGateWeights {
  struct Network {
    FloatLinear first, second;  // ReLU between them
  };
  std::int64_t dim, heads, hidden;
  std::array<std::int64_t, 4> pools;  // bins of each pooling: dim, dim / 2, dim / 4, dim / 8
  FloatLinear features;
  HeldNorm norm;
  Network complexity, confidence, patterns;
  std::vector<float> threshold;  // [heads]
  float temperature;             // what logits are divided by, above 0

  static AsamGateWeights make(AsamStateReader& state, const AsamConfig& config, const std::string& prefix);
  std::int64_t bins() const;
  std::size_t bytes() const;
};

// What a gate says of B * R prefixes: one of each sequence, all that is in use, or one for each tile of rows.
struct AsamScores {
  const float* logits = nullptr;      // [B * R, H]: sigmoid is the gate
  const float* confidence = nullptr;  // [B * R, H]
  const float* patterns = nullptr;    // [B * R, 4]
};

// One call. Its places are among those of the layer's call.
class AsamGateCall {
 public:
  // step: 0, and one prefix, or from one tile of rows to the next.
  AsamGateCall(const AsamGateWeights& weights, std::int64_t batch, std::int64_t length, std::int64_t prefixes,
               std::int64_t step, CpuPlaces& places, CpuPlaces& of_worker);

  // x: [B, T, dim], contiguous. lengths: [B] or null. workspace and workers: where the places begin that the
  // constructor took.
  AsamScores run(Executor& executor, const float* x, const std::int32_t* lengths, std::byte* workspace,
                 std::byte* workers, std::size_t worker_bytes) const;

 private:
  // Positions of prefix r of a sequence, of which `used` are in use.
  std::int64_t end_of(std::int64_t r, std::int64_t used) const;
  void sum(const float* x, std::int64_t used, double* means, double* totals, std::int64_t part) const;
  void pool(const float* x, std::int64_t end, const double* mean, const double* totals, double* running,
            double* weights, float* pooled) const;
  void score(std::int64_t first, std::int64_t rows, std::byte* workspace, std::byte* scratch) const;

  const AsamGateWeights& weights_;
  const std::int64_t batch_, length_, prefixes_, step_, parts_;
  std::size_t means_ = 0;   // f64 [B, R, dim]: of x over a prefix
  std::size_t totals_ = 0;  // f64 [B, T + 1]: sums over the width and all positions before
  std::size_t pooled_ = 0;  // f32 [B * R, bins]
  std::size_t logits_ = 0, confidence_ = 0, patterns_ = 0;  // as in AsamScores
  // Of each worker:
  std::size_t running_ = 0;              // f64 [T + 1]
  std::size_t bin_weights_ = 0;          // f64 [bins]
  std::size_t wide_ = 0, features_ = 0;  // f32 [kLinearRows, hidden]
  std::size_t linear_ = 0;               // scratch of a linear layer
};

}  // namespace heddle
