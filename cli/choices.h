// Options whose values are names out of a list: checked, and told beside the nearest one where they are misspelt. Help
// has the names as the option's type, and from there shells' completion takes them.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string>
#include <vector>

namespace heddle::cli {

// The option takes these names, and what `parse` takes besides: other spellings, names with a number in them. `parse`
// throws Error for what it does not take. For other values Error "--flag is 'x': it must be one of ..." is thrown.
CLI::Option* one_of(CLI::Option* option, const std::vector<std::string>& names,
                    const std::function<void(const std::string&)>& parse = {});

// Types of options, in help and for completion, whose values are paths.
constexpr const char* kFile = "FILE";
constexpr const char* kFolder = "FOLDER";

// --device, cpu or cuda.
CLI::Option* add_device_flag(CLI::App& app, std::string& device);
// -t,--dtype, of the floating-point types; f16 and bf16 alone where `narrow`. `dtype` is one word or several.
CLI::Option* add_dtype_flag(CLI::App& app, std::string& dtype, const std::string& what, bool narrow = false);
CLI::Option* add_dtype_flag(CLI::App& app, std::vector<std::string>& dtypes, const std::string& what);
// --force, of any operation's kernels.
CLI::Option* add_force_flag(CLI::App& app, std::string& force);
// --pass, forward or backward; with_both: or both.
CLI::Option* add_pass_flag(CLI::App& app, std::string& pass, bool with_both = false);
// --format and --rule of low-bit weights.
CLI::Option* add_format_flag(CLI::App& app, std::string& format, const std::string& what);
CLI::Option* add_rule_flag(CLI::App& app, std::string& rule);
// --order of packed weights.
CLI::Option* add_order_flag(CLI::App& app, std::string& order, const std::string& what);

// The end of a verb's help. A line each, as it would be typed.
void examples(CLI::App& verb, const std::vector<std::string>& lines);

// Every target that some build may contain, best first within each architecture.
std::vector<std::string> target_names();

// Names of all kernels, of whatever operation.
std::vector<std::string> kernel_names();

}  // namespace heddle::cli
