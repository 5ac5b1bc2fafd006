// The verbs that need the tests' kit, in a build without it.
#include "heddle/error.h"
#include "verbs.h"

namespace heddle::cli {
namespace {

void add_absent(CLI::App& app, const char* name, const char* does) {
  app.add_subcommand(name, std::string(does) + " (not in this build)")->allow_extras()->callback([name] {
    throw RuntimeError(std::string("this heddle was built without the tests' kit, which ") + name +
                       " needs: build with HEDDLE_BUILD_TESTS=ON");
  });
}

}  // namespace

void add_check(CLI::App& app) { add_absent(app, "check", "Candidates against the reference"); }
void add_tune(CLI::App& app) { add_absent(app, "tune", "What the choice among GPU candidates rests on"); }

}  // namespace heddle::cli
