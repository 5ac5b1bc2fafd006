// heddle_bench: every candidate over the dense, decode and equal-length encoder rows of shapes.json and over the case
// table's round and decode cases. Names are pass/shape/dtype/candidate, so that --benchmark_filter picks by any of
// them:
//   heddle_bench --benchmark_filter='forward/.*S2048.*bf16/cpu$'
// HEDDLE_BENCH_SHAPES names another shapes.json; HEDDLE_CPU_TARGET and HEDDLE_NUM_THREADS are obeyed.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <memory>

#include "core/json.h"
#include "heddle/heddle.h"
#include "kit/case_data.h"
#include "problem.h"
#include "problem/attended_pairs.h"
#include "run.h"

namespace {

using heddle::Pass;
using Json = nlohmann::json;
using heddle::cli::ProblemFlags;
using heddle::cli::ProblemTensors;

// One call, ready to be repeated, and what owns its tensors.
struct Call {
  heddle::TensorView q, k, v, o, lse, d_o;
  heddle::AttentionGradients gradients;
  heddle::AttentionOptions options;
  std::shared_ptr<void> owner;
};

void run(benchmark::State& state, const std::function<Call()>& prepare, Pass pass, const std::string& candidate,
         double flops) {
  Call call = prepare();
  heddle::WorkspaceBuffer forward_buffer, backward_buffer;
  heddle::Runtime forward, backward;
  if (pass == Pass::forward) call.options.force = candidate;
  forward.workspace = forward_buffer.get(heddle::attention_forward_workspace(call.q, call.k, call.v, call.options));
  const auto run_forward = [&] {
    heddle::attention_forward(call.q, call.k, call.v, call.o, call.lse, call.options, forward);
  };
  run_forward();
  if (pass == Pass::forward) {
    for (auto _ : state) run_forward();
  } else {
    call.options.force = candidate;
    backward.workspace =
        backward_buffer.get(heddle::attention_backward_workspace(call.q, call.k, call.v, call.gradients, call.options));
    for (auto _ : state) {
      heddle::attention_backward(call.q, call.k, call.v, call.o, call.lse, call.d_o, {}, call.gradients, call.options,
                                 backward);
    }
  }
  state.counters["FLOP/s"] =
      benchmark::Counter(flops, benchmark::Counter::kIsIterationInvariantRate, benchmark::Counter::kIs1000);
  state.counters["workspace"] = benchmark::Counter(
      static_cast<double>(pass == Pass::forward ? forward.workspace.bytes : backward.workspace.bytes),
      benchmark::Counter::kDefaults, benchmark::Counter::kIs1024);
}

void add(const std::string& name, std::function<Call()> prepare, Pass pass, const std::string& candidate,
         double flops) {
  benchmark::RegisterBenchmark(name.c_str(),
                               [=](benchmark::State& state) { run(state, prepare, pass, candidate, flops); })
      ->UseRealTime()
      ->Unit(benchmark::kMillisecond);
}

// Candidates that serve a problem, the reference aside: its loops are not there to be fast.
std::vector<std::string> candidates(const heddle::TensorView& q, const heddle::TensorView& k,
                                    const heddle::TensorView& v, const heddle::AttentionOptions& options, Pass pass) {
  std::vector<std::string> names;
  for (const heddle::Candidate& c : pass == heddle::Pass::forward
                                        ? heddle::explain_attention(q, k, v, options)
                                        : heddle::explain_attention_backward(q, k, v, {}, options)) {
    if (c.supported && c.method != "reference") names.push_back(c.name);
  }
  return names;
}

void add_problem(const std::string& name, const ProblemFlags& problem, Pass pass) {
  const ProblemTensors shapes(problem, ProblemTensors::Memory::none);
  const auto prepare = [problem, pass] {
    const auto t = std::make_shared<ProblemTensors>(
        problem, pass == Pass::forward ? ProblemTensors::Memory::forward : ProblemTensors::Memory::backward);
    return Call{t->q, t->k, t->v, t->o, t->lse, t->d_o, t->gradients, t->options, t};
  };
  for (const std::string& candidate : candidates(shapes.q, shapes.k, shapes.v, shapes.options, pass)) {
    add(name + "/" + problem.dtype + "/" + candidate, prepare, pass, candidate, flops(problem, pass));
  }
}

// The rows of one group that have one length; documents of different lengths are attention_bench.py's.
void add_group(const Json& group) {
  const std::string kind = group.at("kind");
  const Pass pass = group.at("pass") == "backward" ? Pass::backward : Pass::forward;
  if (kind == "sgemm") return;
  for (const Json& shape : group.at("shapes")) {
    ProblemFlags problem;
    if (kind == "packed") {
      const std::vector<std::int64_t> lengths = shape.at(2);
      if (std::ranges::adjacent_find(lengths, std::ranges::not_equal_to()) != lengths.end()) continue;
      problem.packed = true;
      problem.batch = static_cast<std::int64_t>(lengths.size());
      problem.heads = shape.at(0);
      problem.head_size = shape.at(1);
      problem.length_q = lengths.at(0);
    } else if (kind == "decode") {
      problem.batch = shape.at(0);
      problem.heads = shape.at(1);
      problem.kv_heads = shape.at(2);
      problem.length_q = 1;
      problem.length_k = shape.at(3);
      problem.head_size = shape.at(4);
    } else {
      problem.batch = shape.at(0);
      problem.heads = shape.at(1);
      problem.length_q = shape.at(2);
      problem.head_size = shape.at(3);
      if (group.value("causal", false)) problem.options.causal = "top_left";
    }
    std::string name = problem.name();
    std::ranges::replace(name, ' ', '_');
    std::ranges::replace(name, '/', ':');  // a slash parts the name's fields
    for (const std::string dtype : group.at("dtypes")) {
      problem.dtype = dtype;
      add_problem(group.at("name").get<std::string>() + "/" + name, problem, pass);
    }
  }
}

// Multiply-adds times 2 of the pairs that causality, window and lengths leave.
double case_flops(const heddle::AttentionProblem& p, Pass pass) {
  double pairs = 0;
  for (std::int64_t b = 0; b < p.B; ++b) {
    const heddle::Sequence s = p.sequence(b);
    pairs += heddle::attended_pairs(p.band(s), s.sq);
  }
  const auto D = static_cast<double>(p.D), Dv = static_cast<double>(p.Dv);
  return pairs * static_cast<double>(p.H) * (pass == Pass::forward ? 2 * (D + Dv) : 2 * (3 * D + 2 * Dv));
}

void add_case(const heddle::kit::AttentionCase& spec, Pass pass) {
  struct Owner {
    heddle::kit::CaseData data;
    heddle::kit::HostTensor o, lse;
    heddle::kit::Gradients gradients;
    explicit Owner(const heddle::kit::AttentionCase& spec)
        : data(spec), o(data.new_o()), lse(data.new_lse()), gradients(data.new_gradients()) {}
  };
  const heddle::kit::CaseData shapes(spec);
  const auto prepare = [spec] {
    const auto owner = std::make_shared<Owner>(spec);
    const heddle::kit::CaseData& d = owner->data;
    return Call{
        d.q.view(),  d.k.view(), d.v.view(), owner->o.view(), owner->lse.view(), d.d_o.view(), owner->gradients.views(),
        d.options(), owner};
  };
  const char* pass_name = pass == Pass::forward ? "case/forward/" : "case/backward/";
  for (const std::string& candidate :
       candidates(shapes.q.view(), shapes.k.view(), shapes.v.view(), shapes.options(), pass)) {
    add(pass_name + spec.name + "/" + candidate, prepare, pass, candidate, case_flops(shapes.problem(), pass));
  }
}

void add_all() {
  const char* other = std::getenv("HEDDLE_BENCH_SHAPES");
  const std::string path = other != nullptr ? other : HEDDLE_BENCH_SHAPES;
  const Json shapes = heddle::read_json("heddle_bench", path, heddle::kMaxConfigBytes);
  if (!shapes.is_object()) throw heddle::Error(path + " is not a JSON object");
  for (const Json& group : shapes.at("groups")) add_group(group);
  for (const heddle::kit::AttentionCase& spec : heddle::kit::attention_cases()) {
    if (spec.purpose != heddle::kit::Purpose::round && spec.purpose != heddle::kit::Purpose::decode) continue;
    add_case(spec, Pass::forward);
    if (spec.has_backward() && spec.purpose == heddle::kit::Purpose::round) add_case(spec, Pass::backward);
  }
}

}  // namespace

int main(int argc, char** argv) { return heddle::bench::run(argc, argv, "heddle_bench", add_all); }
