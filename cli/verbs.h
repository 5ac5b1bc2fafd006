// The verbs of the `heddle` command, one file each. Each adds its subcommand; its callback does the work and throws
// Error, RuntimeError or CLI::RuntimeError (an exit code alone).
#pragma once

#include <CLI/CLI.hpp>

namespace heddle::cli {

void add_doctor(CLI::App& app);
void add_info(CLI::App& app);
void add_run(CLI::App& app);
void add_bench(CLI::App& app);
void add_check(CLI::App& app);
void add_tune(CLI::App& app);
void add_explain(CLI::App& app);
void add_memory(CLI::App& app);
void add_quantize(CLI::App& app);
void add_draw(CLI::App& app);
void add_completion(CLI::App& app);

}  // namespace heddle::cli
