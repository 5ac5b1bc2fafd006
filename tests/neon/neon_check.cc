// Every candidate on the NEON target over the case table, forward and backward, without a test framework: one line for
// each failure and a total. Exit status 1 if anything failed or nothing ran.
#include <cstdio>
#include <exception>
#include <string>

#include "heddle/runtime.h"
#include "kit/cases.h"
#include "kit/run_case.h"

int main() {
  using namespace heddle;
  if (cpu_target() != "neon") {
    std::printf("the target is %s, not neon\n", cpu_target().c_str());
    return 1;
  }
  int checks = 0, failures = 0;
  const auto check = [&](kit::CaseRunner& runner, Pass pass) {
    for (const std::string& candidate : runner.candidates(pass)) {
      ++checks;
      const kit::CaseResult result = runner.check(pass, candidate);
      if (result.passed) continue;
      ++failures;
      std::printf("%s", result.message().c_str());
    }
  };
  for (const kit::AttentionCase& spec : kit::attention_cases()) {
    try {
      kit::CaseRunner runner(spec);
      check(runner, Pass::forward);
      if (spec.has_backward()) check(runner, Pass::backward);
    } catch (const std::exception& error) {
      ++failures;
      std::printf("%s: %s\n", spec.name.c_str(), error.what());
    }
  }
  std::printf("neon: %d checks, %d failed\n", checks, failures);
  return failures == 0 && checks > 0 ? 0 : 1;
}
