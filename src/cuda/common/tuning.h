// The file that `heddle tune` writes and HEDDLE_TUNING names.
#pragma once

#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

#include "cuda/cost.h"

namespace heddle::cuda {

// Of the file's form; another one is refused.
inline constexpr int kTuningSchema = 1;

// What costs were measured on, and for which version of Heddle; they say nothing of another.
struct TunedOn {
  std::string gpu;           // the device's name
  std::string capability;    // "9.0"
  int multiprocessors = 0;   // of the device, or of the part of it that was seen
  std::string version = {};  // of Heddle
  bool operator==(const TunedOn&) const = default;
  // "NVIDIA H200 (9.0, 132 multiprocessors) for version 0.1.0"
  std::string words() const {
    return gpu + " (" + capability + ", " + std::to_string(multiprocessors) + " multiprocessors) for version " +
           version;
  }
};

struct Tuning {
  TunedOn made;
  CostTable costs;
};

// `table` with the costs that the file gives; as it is where the file is for another version than `version`, which may
// have other kernels. Throws Error, naming file, line, value and rule, if it is no such file.
Tuning read_tuning(const std::string& path, const CostTable& table, std::string_view version);

// Such a file's text. kernels: {"sm90 d64": {"fixed": seconds, "flops": rate}, ...}, as Cost has them.
inline std::string tuning_text(const TunedOn& on, const nlohmann::ordered_json& kernels) {
  const nlohmann::ordered_json gpu = {
      {"name", on.gpu}, {"compute_capability", on.capability}, {"multiprocessors", on.multiprocessors}};
  const nlohmann::ordered_json file = {
      {"schema", kTuningSchema}, {"gpu", gpu}, {"version", on.version}, {"kernels", kernels}};
  return file.dump(2) + "\n";
}

}  // namespace heddle::cuda
