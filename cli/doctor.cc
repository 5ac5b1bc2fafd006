// heddle doctor: what is installed, what will run, what is slow and why. Exit code 1 if something is a problem.
#include "doctor.h"

#include <algorithm>
#include <iostream>
#include <memory>
#include <utility>

#include "choices.h"
#include "output.h"
#include "verbs.h"

namespace heddle::cli {
namespace {

const char* name_of(Verdict verdict) {
  return verdict == Verdict::ok ? "ok" : verdict == Verdict::note ? "note" : "problem";
}

std::string coloured(Verdict verdict) {
  const std::string name = name_of(verdict);
  return verdict == Verdict::ok ? green(name) : verdict == Verdict::note ? bold(name) : red(name);
}

Verdict worst(const Findings& findings) {
  Verdict found = Verdict::ok;
  for (const Finding& finding : findings) found = std::max(found, finding.verdict);
  return found;
}

Json json_of(const Finding& finding) {
  Json out = {{"subject", finding.subject}, {"verdict", name_of(finding.verdict)}, {"found", finding.found}};
  if (!finding.advice.empty()) out["advice"] = finding.advice;
  if (!finding.more.is_null()) out.update(finding.more);
  return out;
}

Json json_of(const Findings& findings) {
  Json out = Json::array();
  for (const Finding& finding : findings) out.push_back(json_of(finding));
  return out;
}

void print(const Findings& findings, const char* heading) {
  Table table({{heading}, {"verdict"}, {""}});
  for (const Finding& finding : findings) {
    table.add({finding.subject, coloured(finding.verdict), finding.found});
    if (!finding.advice.empty()) table.add({"", "", "-> " + finding.advice});
  }
  table.print();
  std::cout << '\n';
}

std::string counted(std::ptrdiff_t count, const std::string& word) {
  return (count == 0 ? "no" : std::to_string(count)) + " " + word + (count == 1 ? "" : "s");
}

void examine(bool as_json) {
  const cuda::Gpus seen = cuda::gpus();
  Findings facts = examine_machine(seen);
  for (Findings part : {examine_gpus(seen), examine_settings()}) std::ranges::move(part, std::back_inserter(facts));
  const Findings calls = examine_calls(seen);
  const Verdict verdict = std::max(worst(facts), worst(calls));
  if (as_json) {
    const Json out = {{"verdict", name_of(verdict)}, {"findings", json_of(facts)}, {"calls", json_of(calls)}};
    std::cout << out.dump(2) << '\n';
  } else {
    print(facts, "here");
    print(calls, "a typical call");
    const auto count = [&](Verdict which) {
      return std::ranges::count(facts, which, &Finding::verdict) + std::ranges::count(calls, which, &Finding::verdict);
    };
    std::cout << counted(count(Verdict::problem), "problem") << ", " << counted(count(Verdict::note), "note") << '\n';
  }
  if (verdict == Verdict::problem) {
    std::cout.flush();
    throw CLI::RuntimeError(std::cout ? 1 : 3);
  }
}

}  // namespace

void add_doctor(CLI::App& app) {
  CLI::App* verb = app.add_subcommand("doctor", "What is installed, what will run, what is slow and why");
  examples(*verb, {"heddle doctor", "HEDDLE_CPU_TARGET=sse4 heddle doctor --json"});
  const auto common = std::make_shared<CommonFlags>();
  common->add_to(*verb, /*runs_kernels=*/false);
  verb->callback([common] { examine(common->json); });
}

}  // namespace heddle::cli
