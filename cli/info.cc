// heddle info: what this build contains and what this machine can run.
#include <iostream>
#include <memory>

#include "heddle/error.h"
#include "heddle/heddle.h"
#include "machine.h"
#include "output.h"
#include "problem.h"
#include "verbs.h"

namespace heddle::cli {
namespace {

// Every target that some build may contain, best first within each architecture.
constexpr const char* kTargets[] = {"avx512_bf16", "avx512", "avx2", "sse4", "neon", "emu128"};

struct TargetFact {
  std::string name, state;  // "chosen", "runs here" or why not
};

std::vector<TargetFact> targets() {
  const std::string chosen = cpu_target();
  std::vector<TargetFact> facts;
  for (const char* name : kTargets) {
    try {
      set_cpu_target(name);
      facts.push_back({name, name == chosen ? "chosen" : "runs here"});
    } catch (const std::exception& refusal) {
      facts.push_back({name, refusal.what()});
    }
  }
  set_cpu_target(chosen);
  return facts;
}

struct Operation {
  const char* name;
  std::vector<Candidate> candidates;
};

std::vector<Operation> operations() {
  const ProblemFlags sample;
  const ProblemTensors t(sample, ProblemTensors::Memory::none);
  return {{"attention_forward", explain_attention(t.q, t.k, t.v, t.options, Pass::forward)},
          {"attention_backward", explain_attention(t.q, t.k, t.v, t.options, Pass::backward)}};
}

void print_json(const Machine& here) {
  Json out = {{"version", version()},
              {"build", {{"compiler", HEDDLE_COMPILER}, {"type", HEDDLE_BUILD_TYPE}, {"system", HEDDLE_SYSTEM}}}};
  out["machine"] = {{"processor", here.model},
                    {"processors", here.processors},
                    {"memory_bytes", here.memory_total},
                    {"memory_available_bytes", here.memory_available},
                    {"caches", Json::array()}};
  for (const Cache& cache : here.caches) {
    out["machine"]["caches"].push_back({{"level", cache.level}, {"kind", cache.kind}, {"bytes", cache.bytes}});
  }
  out["threads"] = num_threads();
  out["target"] = cpu_target();
  out["runnable_targets"] = cpu_targets();
  out["targets"] = Json::object();
  for (const TargetFact& fact : targets()) out["targets"][fact.name] = fact.state;
  out["operations"] = Json::object();
  for (const Operation& operation : operations()) {
    Json list = Json::array();
    for (const Candidate& c : operation.candidates) list.push_back({{"name", c.name}, {"method", c.method}});
    out["operations"][operation.name] = list;
  }
  std::cout << out.dump(2) << '\n';
}

void print_text(const Machine& here) {
  std::cout << bold("heddle ") << version() << ", built by " << HEDDLE_COMPILER << " (" << HEDDLE_BUILD_TYPE << ") for "
            << HEDDLE_SYSTEM << "\n\n";
  Table facts({{"machine"}, {""}});
  facts.add({"processor", here.model});
  facts.add({"processors", std::to_string(here.processors)});
  for (const Cache& cache : here.caches) {
    facts.add({"L" + std::to_string(cache.level) + " " + cache.kind, bytes_text(static_cast<double>(cache.bytes))});
  }
  facts.add({"memory", bytes_text(static_cast<double>(here.memory_total)) + ", " +
                           bytes_text(static_cast<double>(here.memory_available)) + " available"});
  facts.add({"threads", std::to_string(num_threads())});
  facts.print();
  std::cout << '\n';
  Table list({{"target"}, {"state"}});
  for (const TargetFact& fact : targets())
    list.add({fact.name, fact.state == "chosen" ? green(fact.state) : fact.state});
  list.print();
  std::cout << '\n';
  Table candidates({{"operation"}, {"candidate"}, {"method"}});
  for (const Operation& operation : operations()) {
    for (const Candidate& c : operation.candidates) candidates.add({operation.name, c.name, c.method});
  }
  candidates.print();
}

}  // namespace

void add_info(CLI::App& app) {
  CLI::App* verb = app.add_subcommand("info", "What this build contains and what this machine can run");
  const auto common = std::make_shared<CommonFlags>();
  common->add_to(*verb);
  verb->callback([common] {
    common->apply();
    const Machine here = machine();
    common->json ? print_json(here) : print_text(here);
  });
}

}  // namespace heddle::cli
