// heddle bench: how fast attention runs here; linear layers are a verb below it.
#include "bench.h"

#include <algorithm>
#include <chrono>
#include <iostream>
#include <memory>
#include <optional>

#include "choices.h"
#include "gpu.h"
#include "heddle/error.h"
#include "machine.h"
#include "output.h"
#include "problem.h"
#include "verbs.h"

namespace heddle::cli {
namespace {

using Clock = std::chrono::steady_clock;

// Calls `round`, which returns the seconds of a call, for at least `seconds`, but at least 5 times.
template <class Round>
Timing measure(const Round& round, double seconds) {
  std::vector<double> times;
  const auto begin = Clock::now();
  while (times.size() < 5 || std::chrono::duration<double>(Clock::now() - begin).count() < seconds) {
    times.push_back(round());
  }
  std::sort(times.begin(), times.end());
  const std::size_t n = times.size();
  return {times[n / 2], times[n / 10], times[n - 1 - n / 10], static_cast<int>(n)};
}

struct Row {
  ProblemFlags problem;
  Pass pass;
  std::string candidate;
  std::size_t workspace;
  Timing timing;
};

Row run_one(const ProblemFlags& problem, Pass pass, double seconds) {
  const bool backward = pass == Pass::backward;
  std::optional<Gpu> gpu;
  if (problem.device == "cuda") gpu.emplace("bench");
  Gpu* const on = gpu ? &*gpu : nullptr;
  ProblemTensors t(problem, backward ? ProblemTensors::Memory::backward : ProblemTensors::Memory::forward, on);
  Row row{problem, pass, "", 0, {}};
  for (const Candidate& c : pass == Pass::forward ? explain_attention(t.q, t.k, t.v, t.options)
                                                  : explain_attention_backward(t.q, t.k, t.v, {}, t.options)) {
    if (c.chosen) row.candidate = c.name;
  }
  WorkspaceBuffer buffer;
  const auto runtime_with = [&](std::size_t bytes) {
    if (on != nullptr) return on->runtime(bytes);
    Runtime runtime;
    runtime.workspace = buffer.get(bytes);
    return runtime;
  };
  // A candidate forced by name may exist for one pass only; o and lse then come from the free choice.
  AttentionOptions forward_options = t.options;
  if (backward) forward_options.force = forward_options.method = "";
  const std::size_t forward_bytes = attention_forward_workspace(t.q, t.k, t.v, forward_options);
  const Runtime forward_runtime = runtime_with(forward_bytes);
  const auto forward = [&] { attention_forward(t.q, t.k, t.v, t.o, t.lse, forward_options, forward_runtime); };
  if (!backward) {
    row.workspace = forward_bytes;
    row.timing = measure_call(forward, seconds, on);
    return row;
  }
  on != nullptr ? static_cast<void>(on->seconds(forward)) : forward();
  row.workspace = attention_backward_workspace(t.q, t.k, t.v, t.gradients, t.options);
  const Runtime runtime = runtime_with(row.workspace);
  const auto call = [&] { attention_backward(t.q, t.k, t.v, t.o, t.lse, t.d_o, {}, t.gradients, t.options, runtime); };
  row.timing = measure_call(call, seconds, on);
  return row;
}

// The shapes that are run when none is given: prefill, causal, grouped heads, decode and an encoder's short sequences.
std::vector<ProblemFlags> built_in_table(const ProblemFlags& given) {
  struct Shape {
    std::int64_t B, H, Hkv, Sq, Sk, D;
    const char* causal;
  };
  constexpr Shape kShapes[] = {
      {1, 8, 8, 512, 512, 64, "none"},         {1, 8, 8, 2048, 2048, 64, "none"},
      {1, 8, 8, 2048, 2048, 64, "top_left"},   {1, 8, 8, 1024, 1024, 128, "none"},
      {1, 8, 8, 4096, 4096, 128, "none"},      {1, 8, 8, 4096, 4096, 128, "top_left"},
      {1, 32, 8, 1024, 1024, 128, "top_left"}, {8, 12, 12, 128, 128, 32, "none"},
      {4, 12, 12, 512, 512, 32, "none"},       {1, 32, 8, 1, 4096, 128, "none"},
      {1, 32, 8, 1, 32768, 128, "none"},
  };
  std::vector<ProblemFlags> table;
  for (const Shape& s : kShapes) {
    ProblemFlags problem = given;
    problem.batch = s.B;
    problem.heads = s.H;
    problem.kv_heads = s.Hkv;
    problem.length_q = s.Sq;
    problem.length_k = s.Sk;
    problem.head_size = s.D;
    problem.head_size_v = 0;
    problem.options.causal = s.causal;
    table.push_back(problem);
  }
  return table;
}

struct Bench {
  CommonFlags common;
  ProblemFlags problem;
  std::string pass = "forward";
  std::vector<std::string> dtypes;
  double seconds = 0.5;
  const CLI::App* verb = nullptr;

  bool shape_given() const {
    for (const char* flag : {"--batch", "--heads", "--kv-heads", "--length", "--keys", "--head-size", "--head-size-v",
                             "--page-size", "--packed", "--causal"}) {
      if (verb->count(flag) > 0) return true;
    }
    return false;
  }

  void run() const {
    common.apply();
    require_device("bench", problem.device);
    const double peak = problem.device == "cpu" ? measured_peak_flops(num_threads()) : 0;
    std::vector<ProblemFlags> problems = shape_given() ? std::vector{problem} : built_in_table(problem);
    std::vector<Pass> passes;
    if (pass != "backward") passes.push_back(Pass::forward);
    if (pass != "forward") passes.push_back(Pass::backward);
    std::vector<std::string> kinds = dtypes;
    if (kinds.empty())
      kinds = shape_given() ? std::vector<std::string>{"f32"} : std::vector<std::string>{"f32", "bf16"};
    std::vector<Row> rows;
    for (ProblemFlags& p : problems) {
      for (const std::string& dtype : kinds) {
        p.dtype = dtype;
        // Backward of one query row over a long cache is nobody's training step.
        for (const Pass which : passes) {
          if (which == Pass::backward && !shape_given() && p.length_q == 1) continue;
          rows.push_back(run_one(p, which, seconds));
        }
      }
    }
    common.json ? print_json(rows, peak) : print_text(rows, peak);
  }

  static double rate(const Row& row) { return flops(row.problem, row.pass) / row.timing.median; }

  void print_json(const std::vector<Row>& rows, double peak) const {
    Json out = {{"processor", machine().model}};
    add_place(out, problem.device);
    out["version"] = version();
    if (peak > 0) out["peak_flops"] = peak;
    out["rows"] = Json::array();
    for (const Row& row : rows) {
      out["rows"].push_back({{"problem", row.problem.json()},
                             {"pass", row.pass == Pass::forward ? "forward" : "backward"},
                             {"candidate", row.candidate},
                             {"workspace_bytes", row.workspace},
                             {"seconds", row.timing.median},
                             {"seconds_p10", row.timing.low},
                             {"seconds_p90", row.timing.high},
                             {"runs", row.timing.runs},
                             {"flops", rate(row)}});
      if (peak > 0) out["rows"].back()["fraction_of_peak"] = rate(row) / peak;
    }
    std::cout << out.dump(2) << '\n';
  }

  void print_text(const std::vector<Row>& rows, double peak) const {
    if (peak > 0) std::cout << machine().model << ", ";
    std::cout << place_text(problem.device);
    if (peak > 0) std::cout << ", measured f32 peak " << fixed(peak / 1e9, 0) << " GFLOP/s";
    std::cout << "\n\n";
    Table table({{"problem"},
                 {"dtype"},
                 {"pass"},
                 {"candidate"},
                 {"median", Align::right},
                 {"p10", Align::right},
                 {"p90", Align::right},
                 {"runs", Align::right},
                 {"GFLOP/s", Align::right},
                 {"of f32 peak", Align::right}});
    for (const Row& row : rows) {
      table.add({row.problem.name(), name_of(dtype_named(row.problem.dtype)),
                 row.pass == Pass::forward ? "forward" : "backward", row.candidate, seconds_text(row.timing.median),
                 seconds_text(row.timing.low), seconds_text(row.timing.high), std::to_string(row.timing.runs),
                 fixed(rate(row) / 1e9, 1), peak > 0 ? fixed(100 * rate(row) / peak, 0) + " %" : "-"});
    }
    table.print();
  }
};

}  // namespace

Timing measure_call(const std::function<void()>& call, double seconds, const Gpu* gpu) {
  if (gpu != nullptr) {
    const GpuTimer timer(*gpu, call);
    return measure([&] { return timer.round(); }, seconds);
  }
  call();
  return measure(
      [&] {
        const auto begin = Clock::now();
        call();
        return std::chrono::duration<double>(Clock::now() - begin).count();
      },
      seconds);
}

void add_seconds_flag(CLI::App& verb, double& seconds) {
  verb.add_option("--seconds", seconds, "Time to spend on each row")
      ->capture_default_str()
      ->check(CLI::Range(0.0, 600.0));
}

void add_bench(CLI::App& app) {
  CLI::App* verb =
      app.add_subcommand("bench", "Time attention for one shape, or for the built-in table; or linear layers");
  examples(*verb,
           {"heddle bench --heads 8 --kv-heads 2 --length 512 --head-size 128 --causal top_left --dtype f32 bf16",
            "heddle bench linear --rows 1 64 --format int4_g64",
            "heddle bench --heads 32 --length 4096 --head-size 128 --pass both --device cuda --dtype bf16"});
  const auto self = std::make_shared<Bench>();
  self->verb = verb;
  self->common.add_to(*verb);
  self->problem.add_to(*verb);
  add_device_flag(*verb, self->problem.device);
  verb->remove_option(verb->get_option("--dtype"));
  add_dtype_flag(*verb, self->dtypes, "Of q, k and v, one or more (default: f32; of the table: f32 bf16)");
  add_pass_flag(*verb, self->pass, /*with_both=*/true);
  add_seconds_flag(*verb, self->seconds);
  add_bench_linear(*verb);
  verb->require_subcommand(0, 1);
  verb->callback([self] {
    if (self->verb->get_subcommands().empty()) self->run();
  });
}

}  // namespace heddle::cli
