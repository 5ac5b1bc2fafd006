// heddle_linear_tiles: every tile of Hopper's linear kernels alone, shared through the workspace and in clusters: what
// the candidates' estimates rest on (src/cuda/sm90/linear_*/candidate.cc). Without the pass over x.
//   heddle_linear_tiles w4a16|w4a8 N K M...     K: a multiple of 128
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "cuda/any/linear/plan.h"
#include "cuda/common/device.h"
#include "cuda/common/tensor_map.h"
#include "cuda/sm90/linear_w4a16/variants.h"
#include "cuda/sm90/linear_w4a8/variants.h"
#include "kit/device_mirror.h"

namespace {

using namespace heddle;
using cuda::linear::Plan;
template <class Block>
using Variant = cuda::sm90::linear::Variant<Block>;

constexpr int kRounds = 7, kLaunches = 60;
constexpr double kRotatedBytes = 240e6;  // of weights, so that they come from memory

template <class Block>
constexpr bool kEightBits = !std::is_same_v<Block, lowbit::FragmentBlock>;

// Some scales near one another, any codes.
template <class Block>
std::vector<Block> random_blocks(std::size_t count) {
  std::vector<Block> blocks(count);
  std::mt19937_64 random(1);
  auto* const words = reinterpret_cast<std::uint64_t*>(blocks.data());
  for (std::size_t i = 0; i < count * sizeof(Block) / 8; ++i) words[i] = random();
  for (Block& block : blocks) {
    if constexpr (kEightBits<Block>) {
      for (auto& row : block.exponents) {
        for (std::uint8_t& exponent : row) exponent = static_cast<std::uint8_t>(4 + exponent % 4);
      }
    } else {
      for (auto& row : block.scales) {
        for (std::uint8_t& scale : row) scale = static_cast<std::uint8_t>(0x70 + scale % 16);
      }
    }
  }
  return blocks;
}

template <class Block>
class Problem {
 public:
  Problem(std::int64_t rows, std::int64_t columns, std::int64_t tokens)
      : n(rows),
        k(columns),
        m(tokens),
        row_blocks(lowbit::blocks_of_rows(n)),
        column_blocks(lowbit::blocks_of_columns(k)),
        copy_bytes(static_cast<std::size_t>(row_blocks * column_blocks) * sizeof(Block)),
        copies(std::max(2, static_cast<int>(kRotatedBytes / static_cast<double>(copy_bytes)) + 1)),
        weights(copy_bytes * static_cast<std::size_t>(copies)),
        row_scales(static_cast<std::size_t>(row_blocks * lowbit::kBlockRows) * sizeof(float)),
        token_scales(static_cast<std::size_t>(m) * sizeof(float)),
        y(static_cast<std::size_t>(m * n) * 2) {
    const std::vector<Block> blocks = random_blocks<Block>(static_cast<std::size_t>(row_blocks * column_blocks));
    for (int i = 0; i < copies; ++i) weights.write(static_cast<std::size_t>(i) * copy_bytes, blocks.data(), copy_bytes);
    const std::vector<float> ones(std::max(row_scales.bytes(), token_scales.bytes()) / sizeof(float), 1e-3f);
    row_scales.write(0, ones.data(), row_scales.bytes());
    token_scales.write(0, ones.data(), token_scales.bytes());
    kit::HostTensor values = kit::HostTensor::input(kEightBits<Block> ? DType::f8e4m3 : DType::bf16, {m, k});
    std::mt19937 random(7);
    std::normal_distribution<float> normal(0.0f, kEightBits<Block> ? 100.0f : 1.0f);
    for (std::int64_t i = 0; i < values.elements(); ++i) values.set(i, std::clamp(normal(random), -448.0f, 448.0f));
    x = kit::DeviceTensor(values);
  }

  // Seconds of a launch among others that follow it.
  double seconds(const Variant<Block>& v, const Plan& plan) {
    scratch = kit::DeviceMemory(plan.partial_bytes + plan.mark_bytes + 1, 0);
    const kit::DeviceGraph graph(stream, [&] {
      for (int i = 0; i < kLaunches; ++i) launch(v, plan, i % copies);
    });
    std::vector<double> rounds;
    for (int i = 0; i <= kRounds; ++i) {
      const auto start = std::chrono::steady_clock::now();
      graph.replay(stream);
      stream.synchronize();
      if (i > 0) {
        rounds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / kLaunches);
      }
    }
    std::sort(rounds.begin(), rounds.end());
    return rounds[kRounds / 2];
  }

  const std::int64_t n, k, m, row_blocks, column_blocks;

 private:
  void launch(const Variant<Block>& v, const Plan& plan, int copy) {
    const std::int64_t panel = kEightBits<Block> ? 128 : 64;  // columns of x in a row of the swizzle
    cuda::sm90::linear::Params<Block> p{};
    p.x_rows = cuda::sm90::linear::box_rows(v.tile.tokens, m);
    p.x = cuda::make_tensor_map(x.view().data, kEightBits<Block> ? DType::f8e4m3 : DType::bf16,
                                cuda::TensorMapShape<4>{.extent = {panel, m, k / panel, 1},
                                                        .stride = {k, panel, m * k},
                                                        .box = {static_cast<int>(panel), p.x_rows, v.x_panels, 1}});
    p.weights = reinterpret_cast<const Block*>(static_cast<const std::byte*>(weights.data()) +
                                               static_cast<std::size_t>(copy) * copy_bytes);
    p.out.row_scales = static_cast<const float*>(row_scales.data());
    p.out.token_scales = kEightBits<Block> ? static_cast<const float*>(token_scales.data()) : nullptr;
    p.out.y = y.data();
    p.out.y_stride = n;
    p.out.m = static_cast<int>(m);
    p.out.n = static_cast<int>(n);
    p.schedule.units = plan.units;
    p.schedule.k_blocks = static_cast<int>(column_blocks);
    p.schedule.row_blocks = static_cast<int>(row_blocks);
    p.schedule.row_tiles = plan.row_tiles;
    p.schedule.tiles = plan.tiles;
    p.schedule.shared_tiles = plan.shared_tiles;
    p.schedule.cluster = plan.cluster;
    p.schedule.partials = static_cast<float4*>(scratch.data());
    p.schedule.marks = reinterpret_cast<std::uint64_t*>(static_cast<std::byte*>(scratch.data()) + plan.partial_bytes);
    p.schedule.mark = ++mark;
    v.launch(p, plan.grid, static_cast<cudaStream_t>(stream.get()));
  }

  const std::size_t copy_bytes;
  const int copies;
  kit::DeviceMemory weights, row_scales, token_scales, y, scratch;
  kit::DeviceTensor x;
  kit::DeviceStream stream;
  std::uint64_t mark = 0;
};

template <class Block>
void measure(const std::vector<const Variant<Block>*>& variants, std::int64_t n, std::int64_t k, std::int64_t m) {
  Problem<Block> problem(n, k, m);
  const int multiprocessors = cuda::current_device().multiprocessors;
  const auto print = [&](const Variant<Block>& v, const Plan& plan) {
    std::printf("%lld x %lld M %lld  %3d x %-3d  CTAs %3d, cluster %d, tiles %d, shared %d  %8.2f us\n",
                static_cast<long long>(n), static_cast<long long>(k), static_cast<long long>(m),
                v.tile.row_blocks * lowbit::kBlockRows, v.tile.tokens, plan.grid, plan.cluster, plan.tiles,
                plan.shared_tiles, 1e6 * problem.seconds(v, plan));
    std::fflush(stdout);
  };
  for (const Variant<Block>* v : variants) {
    const Plan plan = cuda::linear::plan_of(v->tile, m, problem.row_blocks, problem.column_blocks, multiprocessors);
    print(*v, plan);
    const Plan in_clusters = cuda::linear::clustered(plan, v->tile, multiprocessors, v->clusters_at_once);
    if (in_clusters.cluster > 1) print(*v, in_clusters);
  }
}

}  // namespace

int main(int argc, char** argv) try {
  const std::string products = argc > 1 ? argv[1] : "";
  const std::int64_t n = argc > 2 ? std::atoll(argv[2]) : 0, k = argc > 3 ? std::atoll(argv[3]) : 0;
  if (argc < 5 || (products != "w4a16" && products != "w4a8") || n <= 0 || n % 8 != 0 || k <= 0 || k % 128 != 0) {
    std::fprintf(stderr, "heddle_linear_tiles w4a16|w4a8 N K M...   N: a multiple of 8, K: of 128\n");
    return 2;
  }
  const kit::Gpu gpu = kit::current_gpu();
  if (gpu.name.empty() || gpu.major != 9) {
    std::fprintf(stderr, "heddle_linear_tiles: it takes a Hopper GPU; %s\n",
                 gpu.name.empty() ? gpu.absence.c_str() : gpu.name.c_str());
    return 3;
  }
  for (int i = 4; i < argc; ++i) {
    const std::int64_t m = std::atoll(argv[i]);
    if (m <= 0) continue;
    if (products == "w4a16") {
      std::vector<const Variant<lowbit::FragmentBlock>*> variants;
      for (const auto& v : cuda::sm90::linear_w4a16::variants(DType::bf16)) variants.push_back(&v);
      measure(variants, n, k, m);
    } else {
      std::vector<const Variant<lowbit::FragmentBlock8>*> variants;
      for (const auto& v : cuda::sm90::linear_w4a8::variants(DType::bf16)) variants.push_back(&v.fragment);
      measure(variants, n, k, m);
    }
  }
} catch (const std::exception& error) {
  std::fprintf(stderr, "heddle_linear_tiles: %s\n", error.what());
  return 3;
}
