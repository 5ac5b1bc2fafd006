// heddle_block_bench: a Transformer block on a GPU by the precision of its layers and the rows of x, as a graph's
// replay and as a call from the host.
//   heddle_block_bench [hidden heads kv_heads intermediate]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "heddle/heddle.h"
#include "heddle/transformer_block.h"
#include "kit/device_mirror.h"

namespace {

using namespace heddle;

constexpr int kRounds = 7;
constexpr double kRoundSeconds = 0.1;

struct Weights {
  std::vector<float> values[6];
  TransformerBlockWeights views;

  explicit Weights(const TransformerBlockOptions& o) {
    const std::int64_t h = o.hidden;
    matrix(0, (o.heads + 2 * o.kv_heads) * (h / o.heads), h, views.qkv);
    matrix(1, h, h, views.out);
    matrix(2, 2 * o.intermediate, h, views.up);
    matrix(3, h, o.intermediate, views.down);
    for (int i = 4; i < 6; ++i) {
      values[i].assign(static_cast<std::size_t>(h), 1.0f);
      (i == 4 ? views.norm1 : views.norm2) = TensorView(values[i].data(), DType::f32, {h});
    }
  }
  void matrix(int i, std::int64_t rows, std::int64_t columns, TensorView& view) {
    std::mt19937 random(static_cast<unsigned>(i));
    std::uniform_real_distribution<float> draw(-0.02f, 0.02f);
    values[i].resize(static_cast<std::size_t>(rows * columns));
    for (float& value : values[i]) value = draw(random);
    view = TensorView(values[i].data(), DType::f32, {rows, columns});
  }
};

// The median of rounds of calls, waited for at the end of each.
double seconds_of(const std::function<void()>& call, const kit::DeviceStream& stream) {
  using Clock = std::chrono::steady_clock;
  const auto time = [&](int calls) {
    const auto start = Clock::now();
    for (int i = 0; i < calls; ++i) call();
    stream.synchronize();
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  time(3);
  const int calls = std::max(1, static_cast<int>(kRoundSeconds / time(1)));
  std::vector<double> rounds;
  for (int i = 0; i < kRounds; ++i) rounds.push_back(time(calls) / calls);
  std::sort(rounds.begin(), rounds.end());
  return rounds[kRounds / 2];
}

void measure(const TransformerBlock& block, const std::string& name, std::int64_t sequences, std::int64_t length) {
  const TransformerBlockOptions& o = block.options();
  const std::int64_t total = sequences * length;
  kit::HostTensor rows = kit::HostTensor::input(o.dtype, {total, o.hidden});
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  for (std::int64_t i = 0; i < rows.elements(); ++i) rows.set(i, normal(random));
  const kit::DeviceTensor x(rows), y(rows);
  std::vector<std::int32_t> offsets;
  for (std::int64_t i = 0; i <= sequences; ++i) offsets.push_back(static_cast<std::int32_t>(i * length));
  kit::DeviceMemory cu(offsets.size() * sizeof(std::int32_t));
  cu.write(0, offsets.data(), cu.bytes());
  TensorView cu_seqlens(cu.data(), DType::i32, {sequences + 1});
  cu_seqlens.device = Device::cuda;
  const kit::DeviceMemory scratch(block.workspace(total, sequences, length));
  const kit::DeviceStream stream;
  Runtime runtime;
  runtime.stream = stream.get();
  runtime.workspace = {scratch.data(), scratch.bytes()};
  const auto call = [&] { block.forward(x.view(), cu_seqlens, y.view(), runtime, length); };
  const double from_host = seconds_of(call, stream);
  const kit::DeviceGraph graph(stream, call);
  const double replayed = seconds_of([&] { graph.replay(stream); }, stream);
  std::printf("%-9s %3lld x %-5lld  graph %9.1f us  host %9.1f us  weights %7.1f MiB  workspace %7.1f MiB\n",
              name.c_str(), static_cast<long long>(sequences), static_cast<long long>(length), 1e6 * replayed,
              1e6 * from_host, static_cast<double>(block.weight_bytes()) / 0x1p20,
              static_cast<double>(scratch.bytes()) / 0x1p20);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 1 && argc != 5) {
    std::fprintf(stderr, "heddle_block_bench [hidden heads kv_heads intermediate]\n");
    return 2;
  }
  const kit::Gpu gpu = kit::current_gpu();
  if (gpu.name.empty()) {
    std::fprintf(stderr, "heddle_block_bench: %s\n", gpu.absence.c_str());
    return 3;
  }
  const auto size = [&](int i, std::int64_t otherwise) { return argc > i ? std::atoll(argv[i]) : otherwise; };
  TransformerBlockOptions options{.hidden = size(1, 4096),
                                  .heads = size(2, 32),
                                  .kv_heads = size(3, 8),
                                  .intermediate = size(4, 14336),
                                  .norm = Norm::rms_norm,
                                  .activation = Activation::swiglu,
                                  .causal = Causal::top_left,
                                  .dtype = DType::bf16,
                                  .device = Device::cuda};
  std::printf("%s: hidden %lld, heads %lld/%lld, intermediate %lld, rms_norm, swiglu, causal, bfloat16\n",
              gpu.name.c_str(), static_cast<long long>(options.hidden), static_cast<long long>(options.heads),
              static_cast<long long>(options.kv_heads), static_cast<long long>(options.intermediate));
  const Weights weights(options);
  for (const char* format : {"bfloat16", "nvfp4", "int8_row", "int4_g128"}) {
    options.layers = {{"*", format}};
    const TransformerBlock block(options, weights.views);
    for (const auto& [sequences, length] : {std::pair{8, 512}, {16, 1}, {1, 1}}) {
      measure(block, format, sequences, length);
    }
  }
} catch (const std::exception& error) {
  std::fprintf(stderr, "heddle_block_bench: %s\n", error.what());
  return 3;
}
