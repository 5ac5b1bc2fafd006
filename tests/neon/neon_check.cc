// Every candidate on the NEON target over the smaller cases of the table, forward and backward, and every format and
// rule of low-bit weights and linear layers over them, without a test framework: one line for each failure and a total.
// Exit status 1 if anything failed or nothing ran. Arguments: a file for the results, in the form of `heddle check
// --json`, then i and n: every n-th case from the i-th on, and the weights and layers with i = 0.
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "heddle/runtime.h"
#include "kit/cases.h"
#include "kit/linear_gradients.h"
#include "kit/lowbit_weights.h"
#include "kit/run_case.h"
#include "lowbit/packed.h"

namespace {

nlohmann::json entry(const heddle::kit::CaseResult& result) {
  nlohmann::json tensors = nlohmann::json::object();
  for (const auto& tensor : result.tensors) tensors[tensor.tensor] = {{"error", tensor.error}, {"bound", tensor.bound}};
  return {{"case", result.case_name},
          {"pass", result.pass == heddle::Pass::forward ? "forward" : "backward"},
          {"candidate", result.candidate},
          {"target", "neon"},
          {"passed", result.passed},
          {"message", result.message()},
          {"tensors", tensors}};
}

// Formats, rules and draws whose bytes are not the reference's.
int failed_quantisations(int* checks) {
  using namespace heddle;
  int failures = 0;
  std::vector<std::string> names = lowbit::format_names();
  names.emplace_back("nf4_b4096");
  for (const std::string& name : names) {
    const lowbit::Format format = lowbit::format_named(name);
    for (const lowbit::ScaleRule rule : kit::rules_of(format)) {
      for (const kit::Draw draw :
           {kit::Draw::gaussian, kit::Draw::ties, kit::Draw::signs, kit::Draw::outliers, kit::Draw::tiny}) {
        const std::int64_t K = format.group == 0 ? 4099 : 4096 + format.group % 4096;
        const kit::HostTensor weights = kit::draw_weights(draw, DType::f32, 2, K, format.element, ++*checks);
        const lowbit::QuantizeOptions options{.rule = rule, .importance = {}};
        const std::string difference = kit::QuantizedByReference(weights, options, format).difference(weights, options);
        if (difference.empty()) continue;
        ++failures;
        std::printf("%s, %s, draw %d: %s\n", name.c_str(), lowbit::name_of(rule), static_cast<int>(draw),
                    difference.c_str());
      }
    }
  }
  return failures;
}

// Linear layers whose results or gradients are off by more than the rule allows.
int failed_layers(int* checks) {
  using namespace heddle;
  int failures = 0;
  for (const std::string& name : lowbit::format_names()) {
    const std::int64_t group = lowbit::format_named(name).group;
    for (const std::int64_t M : {1, 2, 4, 8, 9, 33}) {
      for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
        const auto turn = static_cast<std::uint32_t>(++*checks);
        kit::LinearCase c{.format = name, .rows = {M}, .N = 114, .K = group == 0 ? 301 : 3 * group, .dtype = dtype};
        c.activation = static_cast<Activation>(turn % 6);
        c.bias = c.residual = true;
        c.norm = static_cast<Norm>(turn % 5 % 3);
        c.int8_x = turn % 2 == 0 && lowbit::has_integers(lowbit::format_named(name));
        c.seed = turn;
        const kit::LinearGradientLayer layer(c);
        std::vector<kit::Comparison> verdicts = layer.run(layer.layer.options());
        verdicts.push_back(layer.layer.run());
        for (const kit::Comparison& verdict : verdicts) {
          if (verdict.passed) continue;
          ++failures;
          std::printf("linear, %s, M %d, %s: %s\n", name.c_str(), static_cast<int>(M), name_of(dtype),
                      verdict.worst.c_str());
        }
      }
    }
  }
  return failures;
}

// Products of a case's forward. Larger ones repeat what smaller ones do, more often: they are left to the targets that
// need no emulator, and take five sixths of the time.
bool is_small(const heddle::kit::AttentionCase& c) {
  constexpr std::int64_t kMostProducts = std::int64_t{1} << 23;
  return c.B * c.H * c.Sq * c.Sk * (c.D + c.Dv) <= kMostProducts;
}

}  // namespace

int main(int argc, char** argv) {
  using namespace heddle;
  if (cpu_target() != "neon") {
    std::printf("the target is %s, not neon\n", cpu_target().c_str());
    return 1;
  }
  nlohmann::json results = nlohmann::json::array();
  int failures = 0;
  const auto check = [&](kit::CaseRunner& runner, Pass pass) {
    for (const std::string& candidate : runner.candidates(pass)) {
      const kit::CaseResult result = runner.check(pass, candidate);
      results.push_back(entry(result));
      if (result.passed) continue;
      ++failures;
      std::printf("%s", result.message().c_str());
    }
  };
  const int shard = argc > 3 ? std::atoi(argv[2]) : 0, shards = argc > 3 ? std::atoi(argv[3]) : 1;
  int left_out = 0, number = 0;
  for (const kit::AttentionCase& spec : kit::attention_cases()) {
    if (number++ % shards != shard) continue;
    if (!is_small(spec)) {
      ++left_out;
      continue;
    }
    try {
      kit::CaseRunner runner(spec);
      check(runner, Pass::forward);
      if (spec.has_backward()) check(runner, Pass::backward);
    } catch (const std::exception& error) {
      ++failures;
      std::printf("%s: %s\n", spec.name.c_str(), error.what());
    }
  }
  int quantisations = 0, layers = 0;
  if (shard == 0) {
    failures += failed_quantisations(&quantisations);
    failures += failed_layers(&layers);
  }
  std::printf("neon: %zu checks, %d quantisations and %d linear layers, %d failed; %d large cases left out\n",
              results.size(), quantisations, layers, failures, left_out);
  if (argc > 1) std::ofstream(argv[1]) << nlohmann::json({{"results", results}}).dump(1) << '\n';
  return failures == 0 && !results.empty() ? 0 : 1;
}
