#include "kit/lowbit_weights.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "core/check.h"
#include "core/dtypes.h"
#include "lowbit/formats.h"
#include "lowbit/scale_rules.h"
#include "ops/lowbit/arguments.h"
#include "reference/lowbit.h"

namespace heddle::kit {
namespace {

using lowbit::Element;

// Values and cuts of an element, its largest among them.
std::vector<float> tie_values(Element element) {
  std::vector<float> out;
  const auto both = [&](auto values, auto cuts) {
    for (const float x : values) out.insert(out.end(), {x, -x});
    for (const float x : cuts) out.insert(out.end(), {x, -x});
  };
  switch (element) {
    case Element::e2m1:
    case Element::e2m1_row:
      both(lowbit::E2M1::kMagnitudes, lowbit::E2M1::kCuts);
      break;
    case Element::nf4:
      both(lowbit::NF4::kValues, lowbit::NF4::kCuts);
      break;
    case Element::fp4_bnb:
      both(lowbit::FP4Bnb::kMagnitudes, lowbit::FP4Bnb::kCuts);
      break;
    default: {
      const bool int4 = element == Element::int4;
      for (int i = 0; i < (int4 ? 15 : 254); ++i) out.insert(out.end(), {i / 2.0f, -i / 2.0f});
      if (element == Element::e4m3) {
        for (unsigned bits = 0; bits < 126; ++bits) {
          const float low = lowbit::kE4M3Values[bits], high = lowbit::kE4M3Values[bits + 1];
          out.insert(out.end(), {(low + high) / 2, -(low + high) / 2});
        }
      }
    }
  }
  return out;
}

}  // namespace

HostTensor draw_weights(Draw draw, DType dtype, std::int64_t rows, std::int64_t columns, Element element,
                        std::uint32_t seed, Layout layout) {
  HostTensor weights = HostTensor::input(dtype, {rows, columns}, layout);
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  std::student_t_distribution<double> student(5);
  std::uniform_real_distribution<double> uniform(-1, 1);
  const std::vector<float> ties = tie_values(element);
  const float largest = lowbit::largest_of(element);
  const double huge = dtype == DType::f16 ? 65504 : element == Element::int4 ? 4e5 : 3.3e38;
  for (std::int64_t i = 0; i < rows * columns; ++i) {
    double w = 0;
    switch (draw) {
      case Draw::gaussian:
        w = normal(random);
        break;
      case Draw::student:
        w = student(random);
        break;
      case Draw::uniform:
        w = uniform(random);
        break;
      case Draw::ties:
        // Every block begins with the largest code; the first weight of all makes a global scale of 1, or nearly.
        w = i == 0 ? 6.0 * (seed % 2 ? 448 : 256) : i % 16 == 0 ? largest : ties[random() % ties.size()];
        break;
      case Draw::signs:
        w = i / columns % 2 == 0 ? (random() % 2 ? 0.0 : -0.0) : random() % 3 ? (random() % 2 ? 0.0 : -0.0) : 1e-3;
        break;
      case Draw::outliers:
        w = normal(random) * (random() % 40 == 0 ? 1000 : 1);
        break;
      case Draw::tiny:
        w = normal(random) * (dtype == DType::f16 ? 3e-7 : 4e-40);
        break;
      case Draw::huge:
        w = std::clamp(normal(random) / 2, -1.0, 1.0) * huge;
        break;
    }
    weights.set(i, w);
  }
  return weights;
}

QuantizedMemory::QuantizedMemory(const lowbit::Format& format, std::int64_t rows, std::int64_t columns)
    : matrix_(lowbit::storage(format, rows, columns)) {
  const auto give = [this](TensorView& view, const char* name) {
    if (!view.given()) return;
    const std::size_t bytes = static_cast<std::size_t>(view.elements()) * size_of(view.dtype);
    blocks_.push_back({name, std::vector<std::byte>(bytes + 2 * kGuard, kPoison)});
    view.data = blocks_.back().bytes.data() + kGuard;  // a vector's memory stays where it is when it is moved
  };
  give(matrix_.codes, "codes");
  give(matrix_.scales, "scales");
  give(matrix_.zeros, "zeros");
  give(matrix_.global_scale, "global_scale");
}

bool QuantizedMemory::guards_intact() const {
  const auto poisoned = [](std::byte b) { return b == kPoison; };
  return std::ranges::all_of(blocks_, [&](const Block& block) {
    return std::all_of(block.bytes.begin(), block.bytes.begin() + kGuard, poisoned) &&
           std::all_of(block.bytes.end() - kGuard, block.bytes.end(), poisoned);
  });
}

bool QuantizedMemory::untouched() const {
  return std::ranges::all_of(blocks_, [](const Block& block) {
    return std::ranges::all_of(block.bytes, [](std::byte b) { return b == kPoison; });
  });
}

std::string QuantizedMemory::difference(const QuantizedMemory& other) const {
  for (std::size_t b = 0; b < blocks_.size(); ++b) {
    const auto &mine = blocks_[b].bytes, &theirs = other.blocks_[b].bytes;
    const auto [at, there] = std::ranges::mismatch(mine, theirs);
    if (at == mine.end()) continue;
    return std::string(blocks_[b].name) + " byte " + std::to_string(at - mine.begin() - kGuard) + ": " +
           std::to_string(static_cast<int>(*at)) + " and " + std::to_string(static_cast<int>(*there));
  }
  return "";
}

namespace {

// The global scale as docs/formats.md defines it.
float plain_global_scale(const HostTensor& weights, lowbit::ScaleRule rule) {
  float amax = 0;
  for (std::int64_t i = 0; i < weights.elements(); ++i) {
    amax = std::max(amax, static_cast<float>(std::abs(weights.get(i))));
  }
  const float scale = amax / (rule == lowbit::ScaleRule::plain ? 6.0f * 448.0f : 6.0f * 256.0f);
  return scale > 0 ? scale : 1.0f;
}

}  // namespace

QuantizedByReference::QuantizedByReference(const HostTensor& weights, const lowbit::QuantizeOptions& options,
                                           const lowbit::Format& format)
    : memory(format, weights.view().shape[0], weights.view().shape[1]) {
  const Check check("reference");
  lowbit::QuantizeProblem problem = lowbit::checked_problem(check, weights.view(), options, memory.matrix());
  if (problem.global_scale == 0) problem.global_scale = plain_global_scale(weights, options.rule);
  reference::quantize(problem);
  for (std::int64_t n = 0; n < problem.out.N; ++n) {
    for (std::int64_t k = 0; k < problem.out.K; ++k) values.push_back(reference::dequantized(problem.out, n, k));
  }
}

std::string QuantizedByReference::difference(const HostTensor& weights, const lowbit::QuantizeOptions& options) const {
  const std::int64_t N = memory.matrix().rows, K = memory.matrix().columns;
  QuantizedMemory found(memory.matrix().format, N, K);
  lowbit::quantize(weights.view(), options, found.matrix());
  if (!found.guards_intact()) return "memory beside the storage was written";
  if (const std::string bytes = found.difference(memory); !bytes.empty()) return bytes;
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    const Layout layout = dtype == DType::bf16 ? Layout::padded_rows : Layout::contiguous;
    const HostTensor out = HostTensor::output(dtype, {N, K}, layout);
    lowbit::dequantize(found.matrix(), out.view());
    if (!out.damage().empty()) return out.damage();
    for (std::int64_t i = 0; i < N * K; ++i) {
      const double wanted = rounded(values[static_cast<std::size_t>(i)], dtype);
      if (out.get(i) == wanted) continue;
      return text(name_of(dtype), " [", i / K, ", ", i % K, "] decodes to ", out.get(i), " for ", wanted);
    }
  }
  return {};
}

std::vector<lowbit::ScaleRule> rules_of(const lowbit::Format& format) {
  std::vector<lowbit::ScaleRule> rules;
  for (int i = 0; i < 6; ++i) {
    if (const auto rule = static_cast<lowbit::ScaleRule>(i); lowbit::has_rule(format, rule)) rules.push_back(rule);
  }
  return rules;
}

}  // namespace heddle::kit
