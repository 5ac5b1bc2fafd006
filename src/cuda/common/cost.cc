#include "cuda/common/cost.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <optional>
#include <string>

#include "core/check.h"
#include "cuda/backend.h"
#include "cuda/common/device.h"
#include "problem/attended_pairs.h"
#include "cuda/common/tuning.h"
#include "heddle/runtime.h"

namespace heddle::cuda {
namespace {

// H200: `heddle tune`. The products of sm90_decode are those of mma.sync at 64 rows a kv head, the line after it is of
// warpgroups at 128; the products of sm80_decode are a guess.
constexpr CostTable kMeasured = {{
    {"sm90 d64", {6.2e-6, 516e12, 0}},
    {"sm90 d128", {7.0e-6, 703e12, 0}},
    {"sm90 d256", {6.8e-6, 781e12, 0}},
    {"sm80 d64", {6.4e-6, 328e12, 0}},
    {"sm80 d128", {6.3e-6, 381e12, 0}},
    {"sm80 d256", {6.8e-6, 339e12, 0}},
    {"sm80 f32", {10.9e-6, 62.9e12, 0}},
    {"sm80 tf32", {8.4e-6, 152e12, 0}},
    // By a driver, between calls of 2048 and 8192 keys. Fixed seconds are guesses.
    {"sm80_int8 d64", {14.0e-6, 363e12, 0}},
    {"sm80_int8 d128", {14.0e-6, 431e12, 0}},
    {"sm90_fp8 d64", {7.7e-6, 529e12, 0}},
    {"sm90_fp8 d128", {7.9e-6, 860e12, 0}},
    {"sm90_decode", {5.4e-6, 172e12, 4.31e12}},
    {"sm90_decode rows", {17.7e-6, 418e12, 0}},
    {"sm80_decode", {12.3e-6, 150e12, 3.51e12}},
    // At 8192 and 16384 rows and keys, by a driver. Fixed seconds are guesses.
    {"sm90_bwd d64", {15.0e-6, 520e12, 0}},
    {"sm90_bwd d128", {15.0e-6, 600e12, 0}},
    {"sm90_bwd d256", {15.0e-6, 490e12, 0}},
    // At 8192 rows and keys, f32 at 2048. Fixed seconds, and tf32, are guesses.
    {"sm80_bwd d64", {25.0e-6, 286e12, 0}},
    {"sm80_bwd d128", {25.0e-6, 316e12, 0}},
    {"sm80_bwd d256", {25.0e-6, 303e12, 0}},
    {"sm80_bwd f32", {40.0e-6, 44e12, 0}},
    {"sm80_bwd tf32", {40.0e-6, 90e12, 0}},
    {"naive_cuda", {15.5e-6, 0.568e12, 0}},
    {"baseline_cuda", {19.3e-6, 31.8e12, 0}},
}};

const char* tuning_path() {
  const char* path = std::getenv("HEDDLE_TUNING");
  return path != nullptr && *path != '\0' ? path : nullptr;
}

// Read once, whatever GPUs there are.
const std::optional<Tuning>& tuning() {
  static const std::optional<Tuning> file = [] {
    const char* path = tuning_path();
    return path != nullptr ? std::optional(read_tuning(path, kMeasured, version())) : std::nullopt;
  }();
  return file;
}

std::string capability(const DeviceProperties& device) { return text(device.major, ".", device.minor); }

// Whether it was made on such a device for this version.
bool serves(const Tuning& file, const DeviceProperties& device) {
  return file.made.multiprocessors == device.multiprocessors && file.made.gpu == device.name &&
         file.made.version == version() && file.made.capability == capability(device);
}

}  // namespace

const CostTable& measured_costs() { return kMeasured; }

std::string tuning_state() {
  const std::optional<Tuning>& file = tuning();
  if (!file) return "";
  const DeviceProperties& device = current_device();
  const std::string made = text("made on ", file->made.words());
  if (serves(*file, device)) return text(tuning_path(), ": used, ", made);
  const TunedOn here{device.name, capability(device), device.multiprocessors, version()};
  return text(tuning_path(), ": ignored, ", made, "; ",
              device.major == 0 ? "there is no GPU" : text("this is ", here.words()));
}

const Cost& cost_of(std::string_view name) {
  const std::optional<Tuning>& file = tuning();
  const CostTable& table = file && serves(*file, current_device()) ? file->costs : kMeasured;
  for (const CostLine& line : table) {
    if (line.name == name) return line.cost;
  }
  throw RuntimeError(text("[heddle] there is no cost of '", name, "'"));
}

double tiles_seconds(const AttentionProblem& p, const Cost& cost, const Cost& decode, double tiles, int tile_rows) {
  constexpr double kShareOfDecode = 0.95;  // of its bandwidth; measured at 64 sequences of 8192 keys, 8 to 128 rows
  const double multiprocessors = std::max(current_device().multiprocessors, 1);
  if (p.Sq == 0) return cost.fixed;
  const double keys = attended_pairs(p) / static_cast<double>(p.Sq), width = static_cast<double>(p.D + p.Dv);
  const double tile = 2 * width * keys * tile_rows;
  const double bytes = static_cast<double>(p.B * p.Hkv) * keys * width * static_cast<double>(size_of(p.k.dtype));
  return cost.fixed + std::max(std::ceil(tiles / multiprocessors) * multiprocessors * tile / cost.flops,
                               bytes / (kShareOfDecode * decode.bytes));
}

}  // namespace heddle::cuda
