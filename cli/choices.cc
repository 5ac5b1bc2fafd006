#include "choices.h"

#include <algorithm>

#include "cuda/kernels.h"
#include "heddle/error.h"
#include "heddle/linear.h"
#include "heddle/lowbit.h"
#include "lowbit/rules.h"
#include "ops/attention/choice.h"
#include "ops/choice.h"
#include "ops/linear/names.h"
#include "tensors.h"
#include "words.h"

namespace heddle::cli {

CLI::Option* one_of(CLI::Option* option, const std::vector<std::string>& names,
                    const std::function<void(const std::string&)>& parse) {
  std::string known;
  for (const std::string& name : names) known += (known.empty() ? "" : ",") + name;
  const auto check = [option, names, parse](std::string& value) -> std::string {
    if (std::ranges::find(names, value) != names.end()) return "";
    if (parse) {
      try {
        parse(value);
        return "";
      } catch (const Error&) {  // told below, with the names that this option has
      }
    }
    std::string listed;
    for (const std::string& name : names) listed += (listed.empty() ? "" : ", ") + name;
    throw Error(option->get_name() + " is '" + value + "': it must be one of " + listed + did_you_mean(value, names));
  };
  return option->check(CLI::Validator(check, "{" + known + "}"));
}

CLI::Option* add_device_flag(CLI::App& app, std::string& device) {
  return one_of(app.add_option("--device", device, "Candidates of the CPU or of the current GPU"), {"cpu", "cuda"})
      ->capture_default_str();
}

CLI::Option* add_dtype_flag(CLI::App& app, std::string& dtype, const std::string& what, bool narrow) {
  CLI::Option* const option = app.add_option("-t,--dtype", dtype, what);
  return narrow ? one_of(option, {"f16", "bf16"}, dtype_named) : one_of(option, {"f32", "f16", "bf16"}, dtype_named);
}

CLI::Option* add_dtype_flag(CLI::App& app, std::vector<std::string>& dtypes, const std::string& what) {
  return one_of(app.add_option("-t,--dtype", dtypes, what), {"f32", "f16", "bf16"}, dtype_named);
}

CLI::Option* add_force_flag(CLI::App& app, std::string& force) {
  return one_of(app.add_option("--force", force, "One candidate's name"), kernel_names(), [](const std::string& name) {
    if (!names_a_kernel(name)) throw Error("");
  });
}

CLI::Option* add_pass_flag(CLI::App& app, std::string& pass, bool with_both) {
  std::vector<std::string> names = {"forward", "backward"};
  if (with_both) names.emplace_back("both");
  return one_of(app.add_option("--pass", pass, "Direction"), names)->capture_default_str();
}

CLI::Option* add_format_flag(CLI::App& app, std::string& format, const std::string& what) {
  return one_of(app.add_option("--format", format, what), lowbit::format_names(), lowbit::format_named)
      ->capture_default_str();
}

CLI::Option* add_rule_flag(CLI::App& app, std::string& rule) {
  return one_of(app.add_option("--rule", rule, "How scales are chosen"), lowbit::rule_names())->capture_default_str();
}

CLI::Option* add_order_flag(CLI::App& app, std::string& order, const std::string& what) {
  return one_of(app.add_option("--order", order, what), weight_order_names());
}

void examples(CLI::App& verb, const std::vector<std::string>& lines) {
  std::string text = "Examples:";
  for (const std::string& line : lines) text += "\n  " + line;
  verb.footer(text);
}

std::vector<std::string> target_names() { return {"avx512_bf16", "avx512", "avx2", "sse4", "neon", "emu128"}; }

std::vector<std::string> kernel_names() {
  std::vector<std::string> names;
  const auto add = [&](std::string_view name) {
    if (std::ranges::find(names, name) == names.end()) names.emplace_back(name);
  };
  for (const AttentionForwardKernel* kernel : Operation<AttentionProblem>::candidates()) add(kernel->name);
  cuda::for_each_kernel([&](const auto& kernel) { add(kernel.name); });
  return names;
}

}  // namespace heddle::cli
