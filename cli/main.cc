// heddle: exact attention and low-bit weights from the command line. Exit codes: 0 done, 1 a check failed, 2 bad
// arguments or data, 3 the machine said no (a file, memory, a target).
#include <iostream>
#include <new>

#include "heddle/error.h"
#include "heddle/runtime.h"
#include "verbs.h"

int main(int argc, char** argv) {
  CLI::App app("Heddle: exact attention, forward and backward, and low-bit weights", "heddle");
  app.set_version_flag("--version", std::string("heddle ") + heddle::version());
  app.require_subcommand(1);
  heddle::cli::add_info(app);
  heddle::cli::add_run(app);
  heddle::cli::add_bench(app);
  heddle::cli::add_check(app);
  heddle::cli::add_tune(app);
  heddle::cli::add_explain(app);
  heddle::cli::add_memory(app);
  heddle::cli::add_quantize(app);
  try {
    app.parse(argc, argv);
    std::cout.flush();
    return std::cout ? 0 : 3;
  } catch (const CLI::RuntimeError& error) {
    return error.get_exit_code();
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  } catch (const heddle::Error& error) {
    std::cerr << "heddle: " << error.what() << '\n';
    return 2;
  } catch (const std::bad_alloc&) {
    std::cerr << "heddle: the memory for this problem cannot be had; `heddle memory` says what it needs\n";
    return 3;
  } catch (const std::exception& error) {
    std::cerr << "heddle: " << error.what() << '\n';
    return 3;
  }
}
