#include "cuda/common/cost.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>

#include "core/check.h"
#include "cuda/common/device.h"

namespace heddle::cuda {
namespace {

struct Line {
  std::string_view name;
  Cost cost;
};

using Table = std::array<Line, 14>;

// H200: `heddle tune`, but for decode, whose fixed costs are those of one sequence of 8192 keys in the benchmark;
// sm90_decode's products were fitted to calls of many rows, sm80_decode's are a guess.
constexpr Table kMeasured = {{
    {"sm90 d64", {6.1e-6, 520e12, 0}},
    {"sm90 d128", {6.9e-6, 708e12, 0}},
    {"sm90 d256", {6.8e-6, 789e12, 0}},
    {"sm80 d64", {7.7e-6, 332e12, 0}},
    {"sm80 d128", {7.8e-6, 377e12, 0}},
    {"sm80 d256", {8.1e-6, 332e12, 0}},
    {"sm80 f32", {10.5e-6, 63.5e12, 0}},
    {"sm80 tf32", {7.9e-6, 153e12, 0}},
    {"sm90_fp8 d64", {6.6e-6, 510e12, 0}},
    {"sm90_fp8 d128", {7.3e-6, 805e12, 0}},
    {"sm90_decode", {12.7e-6, 115e12, 4.07e12}},
    {"sm80_decode", {12.9e-6, 150e12, 3.46e12}},
    {"naive_cuda", {15.5e-6, 0.568e12, 0}},
    {"baseline_cuda", {19.3e-6, 31.7e12, 0}},
}};

Table tuned(const char* path) {
  Table table = kMeasured;
  const auto require = [&](bool good, const std::string& what) {
    if (!good) throw Error(text("[heddle] HEDDLE_TUNING is ", path, ": ", what, "; `heddle tune` writes such a file"));
  };
  std::ifstream file(path);
  require(file.good(), "there is no such file that can be read");
  const nlohmann::json json = nlohmann::json::parse(file, nullptr, false);
  require(json.is_object() && json.contains("kernels") && json["kernels"].is_object(), "it has no object 'kernels'");
  for (const auto& [name, values] : json["kernels"].items()) {
    const auto line =
        std::find_if(table.begin(), table.end(), [&, &key = name](const Line& x) { return x.name == key; });
    require(line != table.end(), text("'", name, "' is no kernel of this version"));
    const auto number = [&, &key = name, &object = values](const char* field, double& out, double least) {
      if (object.is_object() && !object.contains(field)) return;
      require(object.is_object() && object[field].is_number() && object[field].template get<double>() >= least,
              text("'", key, "' must be an object whose ", field, " is a number of at least ", least));
      out = object[field].template get<double>();
    };
    number("fixed", line->cost.fixed, 0.0);
    number("flops", line->cost.flops, 1.0);
    number("bytes", line->cost.bytes, 1.0);
  }
  return table;
}

}  // namespace

const Cost& cost_of(std::string_view name) {
  static const Table table = [] {
    const char* path = std::getenv("HEDDLE_TUNING");
    return path != nullptr && *path != '\0' ? tuned(path) : kMeasured;
  }();
  for (const Line& line : table) {
    if (line.name == name) return line.cost;
  }
  throw RuntimeError(text("[heddle] there is no cost of '", name, "'"));
}

double tiled_seconds(const Cost& cost, double tiles, double flops) {
  const double multiprocessors = std::max(current_device().multiprocessors, 1);
  return cost.fixed + std::ceil(tiles / multiprocessors) * multiprocessors * flops / cost.flops;
}

}  // namespace heddle::cuda
