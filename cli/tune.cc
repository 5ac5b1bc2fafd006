// heddle tune: measures on the current GPU what the candidates' estimates are made of.
#include <algorithm>
#include <iostream>
#include <memory>
#include <type_traits>

#include "choices.h"
#include "core/files.h"
#include "cuda/backend.h"
#include "cuda/common/tuning.h"
#include "cuda/cost.h"
#include "cuda/kernels.h"
#include "heddle/error.h"
#include "output.h"
#include "problem.h"
#include "tune_calls.h"
#include "verbs.h"

namespace heddle::cli {
namespace {

// A line of costs as this GPU has it: what is fixed by a small call; and the rate by which the estimate of the example
// is what was measured of it.
struct Measured {
  std::string_view name;
  const char* rate_name;       // "flops" or "bytes"
  double fixed = 0, rate = 0;  // seconds; a second
  double seconds = 0, estimate = 0;
  std::string refusal;

  template <class Problem>
  Measured(const Kernel<Problem>& kernel, const CostLine<Problem>& line)
      : name(line.name), rate_name(line.cost.bytes > 0 ? "bytes" : "flops") {
    const ExampleCall<Problem> large(kernel.name, line.example);
    const typename Problem::Example few = small_of(line.example);
    const ExampleCall<Problem> small(kernel.name, few);
    refusal = large.refusal();
    if (refusal.empty()) refusal = small.refusal();
    if (!refusal.empty()) return;
    seconds = large.measure();
    estimate = large.estimate();
    const double small_seconds = small.measure();
    // The small call's own work is so much of the large one's.
    const double share = cuda::work_of(line, few, kPass<Problem>) / cuda::work_of(line, line.example, kPass<Problem>);
    fixed = (small_seconds - share * seconds) / (1 - share);
    const double declared = line.cost.bytes > 0 ? line.cost.bytes : line.cost.flops;
    const auto estimate_at = [&](double of_rate) {
      Cost cost = line.cost;
      cost.fixed = fixed;
      (line.cost.bytes > 0 ? cost.bytes : cost.flops) = of_rate;
      const cuda::CostOverride here(line.name, cost);
      return large.estimate();
    };
    constexpr double kWithoutEnd = 1e9;
    const double without = estimate_at(kWithoutEnd * declared);
    rate = declared * (estimate_at(declared) - without) / std::max(seconds - without, 1e-9);
  }
};

struct Tune {
  CommonFlags common;
  std::string out;

  void run() const {
    const cuda::Gpus seen = cuda::gpus();
    if (seen.list.empty()) throw RuntimeError("[tune] " + seen.absence);
    const cuda::Gpu& gpu = seen.list.at(seen.current);
    Json costs = Json::object(), rows = Json::array();
    Table table({{"cost"},
                 {"fixed", Align::right},
                 {"TFLOP/s", Align::right},
                 {"TB/s", Align::right},
                 {"estimated", Align::right},
                 {"measured", Align::right}});
    const auto tell = [&](const Measured& found) {
      const std::string name(found.name);
      if (!found.refusal.empty()) {
        rows.push_back({{"kernel", name}, {"refusal", found.refusal}});
        if (!common.json) std::cerr << name << ": " << found.refusal << '\n';
        return;
      }
      const bool bytes = found.rate_name == std::string_view("bytes");
      costs[name] = {{"fixed", found.fixed}, {found.rate_name, found.rate}};
      rows.push_back({{"kernel", name},
                      {"fixed_seconds", found.fixed},
                      {found.rate_name, found.rate},
                      {"estimated_seconds", found.estimate},
                      {"seconds", found.seconds}});
      table.add({name, seconds_text(found.fixed), bytes ? "-" : fixed(found.rate / 1e12, 1),
                 bytes ? fixed(found.rate / 1e12, 2) : "-", seconds_text(found.estimate), seconds_text(found.seconds)});
    };
    cuda::for_each_cost([&](const auto& kernel, const auto& line) { tell(Measured(kernel, line)); });
    if (!out.empty()) {
      const std::string text = cuda::tuning_text(
          {gpu.name, std::to_string(gpu.major) + "." + std::to_string(gpu.minor), gpu.multiprocessors, version()},
          costs);
      OutputFile file("tune", out, OutputFile::Existing::replace);
      file.write(text.data(), text.size());
      file.finish();
    }
    if (common.json) {
      Json said = {{"gpu", gpu.name}, {"version", version()}, {"rows", rows}};
      if (!out.empty()) said["out"] = out;
      std::cout << said.dump(2) << '\n';
      return;
    }
    std::cout << gpu.name << "\n\n";
    table.print();
    if (!out.empty()) std::cout << "\nwritten to " << out << "; to use it: HEDDLE_TUNING=" << out << '\n';
  }
};

}  // namespace

void add_tune(CLI::App& app) {
  CLI::App* verb = app.add_subcommand("tune", "Measure, on the current GPU, what the choice among candidates rests on");
  examples(*verb, {"heddle tune", "heddle tune --out h200.json && HEDDLE_TUNING=h200.json heddle info"});
  const auto self = std::make_shared<Tune>();
  self->common.add_to(*verb, /*runs_kernels=*/false);
  verb->add_option("--out", self->out, "A file for HEDDLE_TUNING to name")->type_name(kFile);
  verb->callback([self] { self->run(); });
}

}  // namespace heddle::cli
