#include "cuda/cost.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <optional>
#include <string>

#include "core/check.h"
#include "cuda/backend.h"
#include "cuda/common/device.h"
#include "cuda/common/tuning.h"
#include "cuda/kernels.h"
#include "heddle/runtime.h"
#include "problem/attended_pairs.h"

namespace heddle::cuda {
namespace {

thread_local const NamedCost* overriding = nullptr;

const char* tuning_path() {
  const char* path = std::getenv("HEDDLE_TUNING");
  return path != nullptr && *path != '\0' ? path : nullptr;
}

// Read once, whatever GPUs there are.
const std::optional<Tuning>& tuning() {
  static const std::optional<Tuning> file = [] {
    const char* path = tuning_path();
    return path != nullptr ? std::optional(read_tuning(path, measured_costs(), version())) : std::nullopt;
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

const CostTable& measured_costs() {
  static const CostTable table = [] {
    CostTable all;
    for_each_cost([&](const auto&, const auto& line) { all.push_back(named(line)); });
    return all;
  }();
  return table;
}

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

CostOverride::CostOverride(std::string_view line, const Cost& cost) : cost_{line, cost}, before_(overriding) {
  overriding = &cost_;
}
CostOverride::~CostOverride() { overriding = before_; }

const Cost* tuned_cost(std::string_view name) {
  if (overriding != nullptr && overriding->name == name) return &overriding->cost;
  const std::optional<Tuning>& file = tuning();
  if (!file || !serves(*file, current_device())) return nullptr;
  const auto line = std::ranges::find(file->costs, name, &NamedCost::name);
  if (line == file->costs.end()) throw RuntimeError(text("[heddle] there is no cost of '", name, "'"));
  return &line->cost;
}

Work work_of(const AttentionExample& call, Pass pass) {
  const double products = pass == Pass::forward ? 2 : 5;
  const auto rows = static_cast<double>(call.B * call.H * call.Sq), keys = static_cast<double>(call.Sk);
  const auto size = static_cast<double>(call.D);
  return {.flops = 2 * products * rows * keys * size,
          .bytes = 2 * static_cast<double>(call.B * call.Hkv) * keys * size * static_cast<double>(size_of(call.kv))};
}

Work work_of(const LinearExample& call, Pass) {
  const double weights = static_cast<double>(call.N) * static_cast<double>(call.K);
  double bytes = weights * static_cast<double>(size_of(call.dtype));
  if (call.order != WeightOrder::dense) {
    const lowbit::Format format = lowbit::format_named(call.format);
    bytes = static_cast<double>(packed_storage(format, call.N, call.K, /*gated=*/false, call.order).data.shape[0]);
  }
  return {.flops = 2 * static_cast<double>(call.M) * weights, .bytes = bytes};
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
