// Numbers, timing and check of the rungs.
#include "ladder.cuh"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <thread>
#include <utility>
#include <vector>

namespace ladder {
namespace {

// Normally distributed numbers, counted by their position (Box-Muller over a hash).
__global__ void fill(bf16* x, std::int64_t count, std::uint32_t seed) {
  const auto hash = [](std::uint32_t n) {
    n = (n ^ n >> 16) * 0x7feb352du;
    n = (n ^ n >> 15) * 0x846ca68bu;
    return n ^ n >> 16;
  };
  for (std::int64_t n = blockIdx.x * std::int64_t{256} + threadIdx.x; n < count; n += std::int64_t{256} * gridDim.x) {
    const std::uint32_t word = hash(static_cast<std::uint32_t>(n) * 2 + seed), other = hash(word + 1);
    const float radius = sqrtf(-2 * logf((static_cast<float>(word >> 8) + 0.5f) / 16777216.0f));
    x[n] = __float2bfloat16(radius * cosf(6.2831853f * (static_cast<float>(other >> 8) / 16777216.0f)));
  }
}

// Median milliseconds of one call: up to 20 samples between events, fewer of what is slow.
template <class Launch>
double median_ms(const Launch& launch) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  std::vector<float> samples;
  double spent = 0;
  for (int n = 0; n < 23 && (n < 5 || spent < 400); ++n) {
    if (n == 2) std::this_thread::sleep_for(std::chrono::milliseconds(80));  // a chip that has cooled down
    check(cudaEventRecord(begin));
    launch();
    check(cudaEventRecord(end));
    check(cudaEventSynchronize(end));
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end));
    spent += ms;
    if (n >= 2) samples.push_back(ms);
  }
  std::nth_element(samples.begin(), samples.begin() + samples.size() / 2, samples.end());
  return samples[samples.size() / 2];
}

float rounded(double x) { return __bfloat162float(__float2bfloat16(static_cast<float>(x))); }

// The worst error of 64 rows against double precision, and what is allowed: twice the error of the plain computation,
// which rounds scores, probabilities and results to bfloat16, and half a unit in the last place of the largest result.
struct Verdict {
  double error = 0, bound = 0;
  bool passed() const { return error <= bound; }
};

Verdict judge(const Problem& p) {
  std::vector<bf16> q(p.elements()), k(q.size()), v(q.size()), o(q.size());
  for (auto [host, device] : {std::pair{&q, p.q}, {&k, p.k}, {&v, p.v}, {&o, p.o}}) {
    check(cudaMemcpy(host->data(), device, host->size() * sizeof(bf16), cudaMemcpyDeviceToHost));
  }
  Verdict verdict;
  double plain_error = 0, largest = 0;
  constexpr int kSamples = 64;
  for (int n = 0; n < kSamples; ++n) {
    const int i = static_cast<int>(std::int64_t{p.length - 1} * n / (kSamples - 1)), keys = p.keys(i);
    const std::int64_t head = p.head(n % p.batch, n * 5 % kHeads);
    const auto at = [&](const std::vector<bf16>& x, int row, int d) -> double {
      return __bfloat162float(x[head + row * kStride + d]);
    };
    std::vector<double> score(keys), exact(kSize), plain(kSize);
    double top = -INFINITY, sum = 0, plain_sum = 0;
    for (int j = 0; j < keys; ++j) {
      for (int d = 0; d < kSize; ++d) score[j] += at(q, i, d) * at(k, j, d);
      top = std::max(top, score[j] /= std::sqrt(double{kSize}));
    }
    for (int j = 0; j < keys; ++j) {
      sum += std::exp(score[j] - top);
      plain_sum += std::exp(rounded(score[j]) - rounded(top));
    }
    for (int j = 0; j < keys; ++j) {
      const double p_exact = std::exp(score[j] - top) / sum;
      const double p_plain = rounded(std::exp(rounded(score[j]) - rounded(top)) / plain_sum);
      for (int d = 0; d < kSize; ++d) {
        exact[d] += p_exact * at(v, j, d);
        plain[d] += p_plain * at(v, j, d);
      }
    }
    for (int d = 0; d < kSize; ++d) {
      const double error = std::abs(at(o, i, d) - exact[d]);
      if (error > verdict.error || std::isnan(error)) verdict.error = error;  // NaN stays
      plain_error = std::max(plain_error, std::abs(rounded(plain[d]) - exact[d]));
      largest = std::max(largest, std::abs(exact[d]));
    }
  }
  verdict.bound = 2 * plain_error + largest / 512;
  return verdict;
}

}  // namespace

int run(const char* name, int argc, char** argv, void (*launch)(const Problem&)) {
  Problem p;
  const auto argument = [&](int n, int otherwise) { return n < argc ? std::atoi(argv[n]) : otherwise; };
  p.length = argument(1, p.length);
  p.causal = argument(2, p.causal);
  if (p.length < 128 || p.length % 128 != 0) {
    std::fprintf(stderr, "S is %d: it must be a multiple of 128\n", p.length);
    return 2;
  }
  p.batch = argument(3, std::max(16384 / p.length, 1));
  std::uint32_t seed = 1;
  for (bf16** x : {&p.q, &p.k, &p.v, &p.o}) {
    check(cudaMalloc(x, p.elements() * sizeof(bf16)));
    fill<<<1024, 256>>>(*x, p.elements(), seed++ * 0x9e3779b9u);
  }
  check(cudaMemset(p.o, 0xff, p.elements() * sizeof(bf16)));  // NaN, wherever nothing is written
  const double ms = median_ms([&] { launch(p); });
  const Verdict verdict = judge(p);
  std::printf("%-22s S %5d  causal %d  %9.4f ms  %7.2f TFLOP/s  error %.2e, allowed %.2e: %s\n", name, p.length,
              p.causal, ms, p.flops() / ms / 1e9, verdict.error, verdict.bound, verdict.passed() ? "right" : "WRONG");
  for (bf16* x : {p.q, p.k, p.v, p.o}) cudaFree(x);
  return verdict.passed() ? 0 : 1;
}

}  // namespace ladder
