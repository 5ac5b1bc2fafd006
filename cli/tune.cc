// heddle tune: measures on the current GPU what the candidates' estimates are made of.
#include <iostream>
#include <memory>
#include <type_traits>

#include "core/files.h"
#include "cuda/backend.h"
#include "cuda/common/tuning.h"
#include "cuda/kernels.h"
#include "heddle/error.h"
#include "output.h"
#include "problem.h"
#include "tune_calls.h"
#include "verbs.h"

namespace heddle::cli {
namespace {

template <class Problem>
constexpr Pass kPass =
    std::is_same_v<Problem, AttentionBackwardProblem> || std::is_same_v<Problem, LinearBackwardProblem> ? Pass::backward
                                                                                                        : Pass::forward;

// A line of costs as this GPU has it: a line through two points, the example and a small call.
struct Measured {
  std::string_view name;
  const char* rate_name;       // "flops" or "bytes"
  double fixed = 0, rate = 0;  // seconds; a second
  double seconds = 0, estimate = 0;
  std::string refusal;

  template <class Problem>
  Measured(const Kernel<Problem>& kernel, const CostLine<Problem>& line)
      : name(line.name), rate_name(line.cost.bytes > 0 ? "bytes" : "flops") {
    const auto of_rate = [&](const CallWork& work) { return line.cost.bytes > 0 ? work.bytes : work.flops; };
    const TunedCall large = timed(kernel.name, line.example, kPass<Problem>);
    refusal = large.refusal;
    if (!refusal.empty()) return;
    const typename Problem::Example few = small_of(line.example);
    const TunedCall small = timed(kernel.name, few, kPass<Problem>);
    refusal = small.refusal;
    if (!refusal.empty()) return;
    const double work = of_rate(work_of(line.example, kPass<Problem>));
    const double share = of_rate(work_of(few, kPass<Problem>)) / work;
    const double work_seconds = (large.seconds - small.seconds) / (1 - share);
    fixed = small.seconds - share * work_seconds;
    rate = work / work_seconds;
    seconds = large.seconds;
    estimate = large.estimate;
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
    cuda::for_each_kernel([&](const auto& kernel) {
      for (const auto& line : kernel.costs) tell(Measured(kernel, line));
    });
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
  verb->footer("Example: heddle tune --out h200.json && HEDDLE_TUNING=h200.json heddle info");
  const auto self = std::make_shared<Tune>();
  self->common.add_to(*verb, /*runs_kernels=*/false);
  verb->add_option("--out", self->out, "A file for HEDDLE_TUNING to name");
  verb->callback([self] { self->run(); });
}

}  // namespace heddle::cli
