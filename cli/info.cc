// heddle info: what this build contains and what this machine can run.
#include <iostream>
#include <memory>

#include "choices.h"
#include "cuda/backend.h"
#include "facts.h"
#include "heddle/heddle.h"
#include "machine.h"
#include "operations.h"
#include "output.h"
#include "problem.h"
#include "verbs.h"

namespace heddle::cli {
namespace {

struct TargetFact {
  std::string name, state;  // "chosen", "runs here" or why not
};

std::vector<TargetFact> targets() {
  const std::string chosen = cpu_target();
  std::vector<TargetFact> facts;
  for (const std::string& name : target_names()) {
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

Json gpu_json() {
  const cuda::Gpus seen = cuda::gpus();
  Json out = {{"kernels", cuda::built()}, {"gpus", Json::array()}};
  for (const cuda::Gpu& gpu : seen.list) {
    out["gpus"].push_back({{"name", gpu.name},
                           {"compute_capability", capability(gpu)},
                           {"multiprocessors", gpu.multiprocessors},
                           {"memory_bytes", gpu.memory}});
  }
  if (!seen.absence.empty()) out["absence"] = seen.absence;
  if (seen.driver > 0) out["driver_cuda"] = cuda_version(seen.driver);
  if (seen.runtime > 0) out["built_with_cuda"] = cuda_version(seen.runtime);
  if (const std::string state = tuning().state; !state.empty()) out["tuning"] = state;
  return out;
}

void add_gpu_facts(Table& facts) {
  const cuda::Gpus seen = cuda::gpus();
  if (!cuda::built()) {
    facts.add({"GPU kernels", "none in this build: " + seen.absence});
  } else {
    facts.add({"GPU kernels", "of CUDA " + cuda_version(seen.runtime) +
                                  (seen.driver > 0 ? "; the driver serves " + cuda_version(seen.driver) : "") +
                                  (seen.absence.empty() ? "" : "; " + seen.absence)});
  }
  for (std::size_t i = 0; i < seen.list.size(); ++i) {
    facts.add({"GPU " + std::to_string(i), gpu_text(seen.list[i])});
  }
  if (const std::string state = tuning().state; !state.empty()) facts.add({"tuning file", state});
}

void print_json(const Machine& here) {
  Json out = {{"version", version()},
              {"build", {{"compiler", HEDDLE_COMPILER}, {"type", HEDDLE_BUILD_TYPE}, {"system", HEDDLE_SYSTEM}}}};
  out["machine"] = {{"processor", here.model},
                    {"processors", here.processors},
                    {"memory_bytes", here.memory.total},
                    {"memory_available_bytes", here.memory.available},
                    {"caches", Json::array()}};
  for (const os::Cache& cache : here.caches) {
    out["machine"]["caches"].push_back({{"level", cache.level}, {"kind", cache.kind}, {"bytes", cache.bytes}});
  }
  out["gpu"] = gpu_json();
  const MatrixLibraryFact layers = matrix_library_fact();
  out["float_layers"] = {{"runs", layers.loaded}, {layers.loaded ? "library" : "reason", layers.state}};
  out["threads"] = num_threads();
  out["target"] = cpu_target();
  out["runnable_targets"] = cpu_targets();
  out["targets"] = Json::object();
  for (const TargetFact& fact : targets()) out["targets"][fact.name] = fact.state;
  out["operations"] = Json::object();
  for (const Operation& operation : operations()) {
    Json list = Json::array();
    for (const CandidateFact& c : operation.candidates) {
      list.push_back({{"name", c.name}, {"method", c.method}, {"device", c.device}, {"runs", c.refusal.empty()}});
      if (!c.refusal.empty()) list.back()["reason"] = c.refusal;
    }
    out["operations"][operation.name] = list;
  }
  std::cout << out.dump(2) << '\n';
}

void print_text(const Machine& here) {
  std::cout << bold("heddle ") << version() << ", " << build_text() << "\n\n";
  Table facts({{"machine"}, {""}});
  facts.add({"processor", here.model});
  facts.add({"processors", std::to_string(here.processors)});
  for (const os::Cache& cache : here.caches) {
    facts.add({"L" + std::to_string(cache.level) + " " + cache.kind, bytes_text(static_cast<double>(cache.bytes))});
  }
  facts.add({"memory", bytes_text(static_cast<double>(here.memory.total)) + ", " +
                           bytes_text(static_cast<double>(here.memory.available)) + " available"});
  facts.add({"threads", std::to_string(num_threads())});
  facts.add({"float layers, CPU", matrix_library_fact().state});
  add_gpu_facts(facts);
  facts.print();
  std::cout << '\n';
  Table list({{"target"}, {"state"}});
  for (const TargetFact& fact : targets())
    list.add({fact.name, fact.state == "chosen" ? green(fact.state) : fact.state});
  list.print();
  std::cout << '\n';
  Table candidates({{"operation"}, {"candidate"}, {"method"}, {"device"}, {"state"}});
  for (const Operation& operation : operations()) {
    for (const CandidateFact& c : operation.candidates) {
      candidates.add({operation.name, c.name, c.method, c.device, c.refusal.empty() ? "runs here" : c.refusal});
    }
  }
  candidates.print();
}

}  // namespace

void add_info(CLI::App& app) {
  CLI::App* verb = app.add_subcommand("info", "What this build contains and what this machine can run");
  examples(*verb, {"heddle info", "heddle info --threads 4 --json"});
  const auto common = std::make_shared<CommonFlags>();
  common->add_to(*verb);
  verb->callback([common] {
    common->apply();
    const Machine here = machine();
    common->json ? print_json(here) : print_text(here);
  });
}

}  // namespace heddle::cli
