// heddle_lowbit_bench: quantisation and back of a 4096 x 4096 matrix, by format, rule and dtype. Rates count what is
// read and written once: weights and storage.
//   heddle_lowbit_bench --benchmark_filter='decode/nvfp4'
// HEDDLE_CPU_TARGET and HEDDLE_NUM_THREADS are obeyed. `copy` is the memory's own rate.
#include <benchmark/benchmark.h>

#include <cstring>
#include <memory>
#include <random>

#include "core/dtypes.h"
#include "heddle/heddle.h"
#include "run.h"

namespace {

using namespace heddle;
using lowbit::ScaleRule;

constexpr std::int64_t kExtent = 4096;

struct Memory {
  std::vector<std::byte> weights, back, stored;
  TensorView from, to;
  lowbit::QuantizedMatrix matrix;

  Memory(const std::string& format, DType dtype)
      : matrix(lowbit::storage(lowbit::format_named(format), kExtent, kExtent)) {
    const std::size_t bytes = kExtent * kExtent * size_of(dtype);
    weights.resize(bytes);
    back.resize(bytes);
    from = TensorView(weights.data(), dtype, {kExtent, kExtent});
    to = TensorView(back.data(), dtype, {kExtent, kExtent});
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (std::int64_t i = 0; i < kExtent * kExtent; ++i) store_element(weights.data(), dtype, i, normal(random) / 50);
    stored.resize(lowbit::storage_bytes(matrix));
    std::byte* at = stored.data();
    for (TensorView* view : {&matrix.codes, &matrix.global_scale, &matrix.scales, &matrix.zeros}) {
      if (!view->given()) continue;
      view->data = at;
      at += view->elements() * static_cast<std::int64_t>(size_of(view->dtype));
    }
  }
  std::int64_t moved() const { return static_cast<std::int64_t>(weights.size() + stored.size()); }
};

// One at a time: a matrix of float32 takes 64 MB, and another as much to come back to.
const Memory& memory_of(const std::string& format, DType dtype) {
  static std::unique_ptr<Memory> last;
  static std::string key;
  if (const std::string wanted = format + name_of(dtype); wanted != key) {
    last.reset();
    last = std::make_unique<Memory>(format, dtype);
    key = wanted;
  }
  return *last;
}

template <class Work>
void add(const std::string& name, const std::string& format, DType dtype, const Work& work) {
  benchmark::RegisterBenchmark(
      name.c_str(),
      [=](benchmark::State& state) {
        const Memory& memory = memory_of(format, dtype);
        work(memory);
        for (auto _ : state) work(memory);
        state.SetBytesProcessed(static_cast<std::int64_t>(state.iterations()) * memory.moved());
        state.counters["weights/s"] =
            benchmark::Counter(kExtent * kExtent, benchmark::Counter::kIsIterationInvariantRate);
      })
      ->UseRealTime()
      ->Unit(benchmark::kMillisecond);
}

void add_all() {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const std::string& format : lowbit::format_names()) {
      const std::string tail = format + "/" + name_of(dtype);
      for (const ScaleRule rule : {ScaleRule::plain, ScaleRule::four_six, ScaleRule::mse}) {
        if (rule == ScaleRule::four_six && format != "nvfp4") continue;
        add("encode/" + tail + "/" + lowbit::name_of(rule), format, dtype,
            [rule](const Memory& m) { lowbit::quantize(m.from, {.rule = rule, .importance = {}}, m.matrix); });
      }
      add("decode/" + tail, format, dtype, [](const Memory& m) { lowbit::dequantize(m.matrix, m.to); });
    }
  }
  benchmark::RegisterBenchmark("copy",
                               [](benchmark::State& state) {
                                 std::vector<std::byte> a(std::size_t{64} << 20), b(a.size());
                                 for (auto _ : state) {
                                   default_executor().parallel_for(64, [&](std::int64_t i, int) {
                                     std::memcpy(b.data() + (i << 20), a.data() + (i << 20), std::size_t{1} << 20);
                                   });
                                   benchmark::ClobberMemory();
                                 }
                                 state.SetBytesProcessed(static_cast<std::int64_t>(state.iterations() * 2 * a.size()));
                               })
      ->UseRealTime()
      ->Unit(benchmark::kMillisecond);
}

}  // namespace

int main(int argc, char** argv) { return heddle::bench::run(argc, argv, "heddle_lowbit_bench", add_all); }
