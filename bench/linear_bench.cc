// heddle_linear_bench: a linear layer of 4096 x 4096 weights by format, dtype and rows of x. Several matrices take
// turns, so that weights come from memory and not from a cache. Rates: FLOP/s, and bytes of packed weights.
//   heddle_linear_bench --benchmark_filter='nvfp4/bfloat16/1/'
// HEDDLE_CPU_TARGET and HEDDLE_NUM_THREADS are obeyed. linear_bench.py, beside it, compares with torch.
#include <benchmark/benchmark.h>

#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "core/dtypes.h"
#include "heddle/heddle.h"
#include "lowbit/packed.h"
#include "run.h"

namespace {

using namespace heddle;

constexpr std::int64_t kExtent = 4096;
constexpr int kMatrices = 8;

struct Aligned {
  std::unique_ptr<void, decltype(&std::free)> memory{nullptr, &std::free};
  explicit Aligned(std::size_t bytes) : memory(std::aligned_alloc(64, (bytes + 63) / 64 * 64), &std::free) {}
};

struct Layers {
  std::vector<Aligned> owned;
  std::vector<PackedWeights> weights;

  explicit Layers(const std::string& name) {
    const lowbit::Format format = lowbit::format_named(name);
    lowbit::QuantizedMatrix matrix = lowbit::storage(format, kExtent, kExtent);
    std::vector<std::byte> stored(lowbit::storage_bytes(matrix));
    std::byte* at = stored.data();
    for (TensorView* view : {&matrix.codes, &matrix.global_scale, &matrix.scales, &matrix.zeros}) {
      if (!view->given()) continue;
      view->data = at;
      at += view->elements() * static_cast<std::int64_t>(size_of(view->dtype));
    }
    std::vector<float> values(kExtent * kExtent);
    std::mt19937 random(1);
    std::uniform_real_distribution<float> draw(-0.05f, 0.05f);
    for (float& w : values) w = draw(random);
    lowbit::quantize(TensorView(values.data(), DType::f32, {kExtent, kExtent}), {}, matrix);
    for (int i = 0; i < kMatrices; ++i) {
      PackedWeights packed = packed_storage(format, kExtent, kExtent);
      owned.emplace_back(static_cast<std::size_t>(packed.data.shape[0]));
      packed.data.data = owned.back().memory.get();
      pack_weights(matrix, packed);
      weights.push_back(packed);
    }
  }
};

const Layers& layers_of(const std::string& format) {
  static std::unique_ptr<Layers> last;
  static std::string key;
  if (format != key) {
    last.reset();
    last = std::make_unique<Layers>(format);
    key = format;
  }
  return *last;
}

void add_all() {
  for (const std::string& format : lowbit::format_names()) {
    for (const auto& [dtype, int8] : {std::pair{DType::f32, false}, {DType::bf16, false}, {DType::bf16, true}}) {
      if (int8 && !lowbit::has_integers(lowbit::format_named(format))) continue;
      LinearOptions options;
      options.int8_x = int8;
      for (const std::int64_t M : {1, 2, 4, 8, 16, 32, 64, 128, 512}) {
        const std::string name = format + "/" + name_of(dtype) + (int8 ? "_int8/" : "/") + std::to_string(M);
        benchmark::RegisterBenchmark(
            name.c_str(),
            [=, dtype = dtype](benchmark::State& state) {
              const Layers& layers = layers_of(format);
              std::vector<std::byte> x(static_cast<std::size_t>(M * kExtent) * size_of(dtype)), y(x.size());
              std::mt19937 random(1);
              std::normal_distribution<float> normal;
              for (std::int64_t i = 0; i < M * kExtent; ++i) store_element(x.data(), dtype, i, normal(random));
              const TensorView from(x.data(), dtype, {M, kExtent}), to(y.data(), dtype, {M, kExtent});
              WorkspaceBuffer buffer;
              Runtime runtime;
              runtime.workspace = buffer.get(linear_forward_workspace(from, layers.weights[0], options));
              std::size_t turn = 0;
              for (auto _ : state) linear_forward(from, layers.weights[turn++ % kMatrices], to, options, runtime);
              state.SetBytesProcessed(state.iterations() * layers.weights[0].data.shape[0]);
              state.counters["FLOP/s"] = benchmark::Counter(2.0 * static_cast<double>(M) * kExtent * kExtent,
                                                            benchmark::Counter::kIsIterationInvariantRate);
            })
            ->UseRealTime()
            ->Unit(benchmark::kMillisecond);
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) { return heddle::bench::run(argc, argv, "heddle_linear_bench", add_all); }
