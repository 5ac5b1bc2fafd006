// heddle check in a build without the case table.
#include "heddle/error.h"
#include "verbs.h"

namespace heddle::cli {

void add_check(CLI::App& app) {
  app.add_subcommand("check", "Candidates against the reference (not in this build)")->allow_extras()->callback([] {
    throw RuntimeError(
        "this heddle was built without the case table that check runs: build with HEDDLE_BUILD_TESTS=ON");
  });
}

}  // namespace heddle::cli
