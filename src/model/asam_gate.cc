#include "model/asam_gate.h"

#include <algorithm>
#include <cmath>

#include "cpu/kernels.h"
#include "cpu/row_ops.h"

namespace heddle {
namespace {

constexpr std::int64_t kColumns = 64;  // whose sums one task has

// Sixteen sums, so that a compiler may take several products at once.
double dot(const double* a, const float* b, std::int64_t count) {
  constexpr std::int64_t kSums = 16;
  double sums[kSums] = {};
  std::int64_t i = 0;
  for (; i + kSums <= count; i += kSums) {
    for (std::int64_t j = 0; j < kSums; ++j) sums[j] += a[i + j] * static_cast<double>(b[i + j]);
  }
  double total = 0;
  for (; i < count; ++i) total += a[i] * static_cast<double>(b[i]);
  for (const double sum : sums) total += sum;
  return total;
}

double* doubles(std::byte* at) { return reinterpret_cast<double*>(at); }
float* floats(std::byte* at) { return reinterpret_cast<float*>(at); }

}  // namespace

AsamGateWeights AsamGateWeights::make(AsamStateReader& state, const AsamConfig& config, const std::string& prefix) {
  const std::int64_t heads = config.num_heads, hidden = config.gate_hidden_dim;
  std::array<std::int64_t, 4> pools;
  std::int64_t bins = 0;
  for (std::size_t i = 0; i < pools.size(); ++i) bins += pools[i] = std::max<std::int64_t>(1, config.dim >> i);
  const auto network = [&](const char* name, std::int64_t out) {
    FloatLinear first = state.linear(prefix + name + ".0", hidden / 2, hidden);
    return Network{std::move(first), state.linear(prefix + name + ".2", out, hidden / 2)};
  };
  FloatLinear features = state.linear(prefix + "feature_proj.0", hidden, bins);
  HeldNorm norm = state.norm(prefix + "feature_proj.1", hidden);
  Network complexity = network("complexity_estimator", heads), confidence = network("confidence_predictor", heads);
  Network patterns = network("pattern_selector", kAsamChoices);
  std::vector<float> threshold = state.values(prefix + "sparse_threshold", {heads});
  const float temperature = std::max(std::abs(state.values(prefix + "gate_temp", {1})[0]), 1e-6f);
  return {config.dim,
          heads,
          hidden,
          pools,
          std::move(features),
          std::move(norm),
          std::move(complexity),
          std::move(confidence),
          std::move(patterns),
          std::move(threshold),
          temperature};
}

std::int64_t AsamGateWeights::bins() const {
  std::int64_t out = 0;
  for (const std::int64_t size : pools) out += size;
  return out;
}

std::size_t AsamGateWeights::bytes() const {
  std::size_t out = features.weight_bytes() + norm.weight.size() + norm.bias.size() + sizeof(float) * threshold.size();
  for (const Network* network : {&complexity, &confidence, &patterns}) {
    out += network->first.weight_bytes() + network->second.weight_bytes();
  }
  return out;
}

AsamGateCall::AsamGateCall(const AsamGateWeights& weights, std::int64_t batch, std::int64_t length,
                           std::int64_t prefixes, std::int64_t step, CpuPlaces& places, CpuPlaces& of_worker)
    : weights_(weights),
      batch_(batch),
      length_(length),
      prefixes_(prefixes),
      step_(step),
      parts_((weights.dim + kColumns - 1) / kColumns) {
  const auto take = [](CpuPlaces& from, std::size_t element, std::int64_t count) {
    return from.take(element * static_cast<std::size_t>(count));
  };
  const std::int64_t rows = whole_steps(batch * prefixes);
  means_ = take(places, sizeof(double), batch * prefixes * weights.dim);
  totals_ = take(places, sizeof(double), batch * (length + 1));
  pooled_ = take(places, sizeof(float), rows * weights.bins());
  logits_ = take(places, sizeof(float), rows * weights.heads);
  confidence_ = take(places, sizeof(float), rows * weights.heads);
  patterns_ = take(places, sizeof(float), rows * kAsamChoices);
  running_ = take(of_worker, sizeof(double), length + 1);
  bin_weights_ = take(of_worker, sizeof(double), weights.bins());
  wide_ = take(of_worker, sizeof(float), kLinearRows * weights.hidden);
  features_ = take(of_worker, sizeof(float), kLinearRows * weights.hidden);
  std::size_t scratch = weights.features.scratch_bytes();
  for (const AsamGateWeights::Network* network : {&weights.complexity, &weights.confidence, &weights.patterns}) {
    scratch = std::max({scratch, network->first.scratch_bytes(), network->second.scratch_bytes()});
  }
  linear_ = of_worker.take(scratch);
}

std::int64_t AsamGateCall::end_of(std::int64_t r, std::int64_t used) const {
  return step_ == 0 ? used : std::min(r * step_ + 1, used);
}

AsamScores AsamGateCall::run(Executor& executor, const float* x, const std::int32_t* lengths, std::byte* workspace,
                             std::byte* workers, std::size_t worker_bytes) const {
  const std::int64_t dim = weights_.dim;
  const auto used = [&](std::int64_t b) { return lengths == nullptr ? length_ : std::int64_t{lengths[b]}; };
  const auto scratch = [&](int worker) { return workers + worker_bytes * static_cast<std::size_t>(worker); };
  double *means = doubles(workspace + means_), *totals = doubles(workspace + totals_);
  parallel_for(executor, batch_ * (parts_ + 1), [&](std::int64_t index, int) {
    const std::int64_t b = index / (parts_ + 1);
    sum(x + b * length_ * dim, used(b), means + b * prefixes_ * dim, totals + b * (length_ + 1), index % (parts_ + 1));
  });
  parallel_for(executor, batch_ * prefixes_, [&](std::int64_t index, int worker) {
    // The longest first: they cost most.
    const std::int64_t b = index % batch_, r = prefixes_ - 1 - index / batch_, row = b * prefixes_ + r;
    pool(x + b * length_ * dim, end_of(r, used(b)), means + row * dim, totals + b * (length_ + 1),
         doubles(scratch(worker) + running_), doubles(scratch(worker) + bin_weights_),
         floats(workspace + pooled_) + row * weights_.bins());
  });
  over_rows(executor, batch_ * prefixes_,
            [&](std::int64_t first, std::int64_t rows, int worker) { score(first, rows, workspace, scratch(worker)); });
  return {floats(workspace + logits_), floats(workspace + confidence_), floats(workspace + patterns_)};
}

// Of a sequence x [T, dim]: some columns' means over each prefix, or, as the last part, sums over all columns.
void AsamGateCall::sum(const float* x, std::int64_t used, double* means, double* totals, std::int64_t part) const {
  const std::int64_t dim = weights_.dim;
  if (part == parts_) {
    totals[0] = 0;
    for (std::int64_t t = 0; t < used; ++t) {
      double of_row = 0;
      for (std::int64_t j = 0; j < dim; ++j) of_row += static_cast<double>(x[t * dim + j]);
      totals[t + 1] = totals[t] + of_row;
    }
    return;
  }
  const std::int64_t first = part * kColumns, count = std::min(kColumns, dim - first);
  double sums[kColumns] = {};
  std::int64_t t = 0;
  for (std::int64_t r = 0; r < prefixes_; ++r) {
    const std::int64_t end = end_of(r, used);
    for (; t < end; ++t) {
      for (std::int64_t j = 0; j < count; ++j) sums[j] += static_cast<double>(x[t * dim + first + j]);
    }
    for (std::int64_t j = 0; j < count; ++j) means[r * dim + first + j] = sums[j] / static_cast<double>(end);
  }
}

// A bin of a prefix is a difference of running sums. These are f64: at a bin of one position in thousands little would
// be left of f32.
void AsamGateCall::pool(const float* x, std::int64_t end, const double* mean, const double* totals, double* running,
                        double* weights, float* pooled) const {
  running[0] = 0;
  for (std::int64_t t = 0; t < end; ++t) running[t + 1] = running[t] + dot(mean, x + t * weights_.dim, weights_.dim);
  const auto for_each_bin = [&](const auto& visit) {
    std::int64_t bin = 0;
    for (const std::int64_t size : weights_.pools) {
      for (std::int64_t place = 0; place < size; ++place, ++bin) {
        const std::int64_t from = place * end / size, to = ((place + 1) * end + size - 1) / size;
        visit(bin, [=](const double* sums) { return (sums[to] - sums[from]) / static_cast<double>(to - from); });
      }
    }
  };
  double largest = -INFINITY, total = 0;
  for_each_bin([&](std::int64_t bin, const auto& average) {
    weights[bin] = average(running);
    largest = std::max(largest, weights[bin]);
  });
  for_each_bin([&](std::int64_t bin, const auto&) { total += weights[bin] = std::exp(weights[bin] - largest); });
  for_each_bin([&](std::int64_t bin, const auto& average) {
    pooled[bin] = static_cast<float>(average(totals) * (weights[bin] / total));
  });
}

void AsamGateCall::score(std::int64_t first, std::int64_t rows, std::byte* workspace, std::byte* scratch) const {
  const AsamGateWeights& w = weights_;
  const std::int64_t hidden = w.hidden, heads = w.heads;
  float *wide = floats(scratch + wide_), *features = floats(scratch + features_);
  std::byte* linear = scratch + linear_;
  w.features.run(floats(workspace + pooled_) + first * w.bins(), wide, rows, linear);
  for (std::int64_t i = 0; i < rows; ++i) {
    cpu::kernels().linear.norm_row(w.norm.parameters(), reinterpret_cast<const std::byte*>(wide + i * hidden),
                                   DType::f32, hidden, reinterpret_cast<std::byte*>(features + i * hidden), DType::f32);
  }
  gelu(features, rows * hidden, DType::f32, features);
  const auto run = [&](const AsamGateWeights::Network& network, float* out) {
    network.first.run(features, wide, rows, linear);
    for (std::int64_t i = 0; i < rows * (hidden / 2); ++i) wide[i] = std::max(wide[i], 0.0f);
    network.second.run(wide, out, rows, linear);
  };
  float *logits = floats(workspace + logits_) + first * heads,
        *confidence = floats(workspace + confidence_) + first * heads;
  run(w.complexity, logits);
  run(w.confidence, confidence);
  run(w.patterns, floats(workspace + patterns_) + first * kAsamChoices);
  for (std::int64_t i = 0; i < rows * heads; ++i) {
    confidence[i] = 1 / (1 + std::exp(-confidence[i]));
    logits[i] = (w.threshold[static_cast<std::size_t>(i % heads)] - logits[i]) * confidence[i] / w.temperature;
  }
}

}  // namespace heddle
