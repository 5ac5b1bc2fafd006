// What needs the tests' kit, in a build without it.
#include "gpu.h"
#include "heddle/error.h"
#include "verbs.h"

namespace heddle::cli {
namespace {

[[noreturn]] void refuse(const std::string& what) {
  throw RuntimeError("this heddle was built without the tests' kit, which " + what +
                     " needs: build with HEDDLE_BUILD_TESTS=ON");
}

void add_absent(CLI::App& app, const char* name, const char* does) {
  app.add_subcommand(name, std::string(does) + " (not in this build)")->allow_extras()->callback([name] {
    refuse(name);
  });
}

}  // namespace

void add_check(CLI::App& app) { add_absent(app, "check", "Candidates against the reference"); }
void add_tune(CLI::App& app) { add_absent(app, "tune", "What the choice among GPU candidates rests on"); }

struct Gpu::Parts {};
Gpu::Gpu(const char* verb) { refuse(std::string(verb) + " --device cuda"); }
Gpu::~Gpu() = default;
TensorView Gpu::copy(const TensorView&) { return {}; }
TensorView Gpu::allocate(const TensorView&) { return {}; }
void Gpu::read(const TensorView&, void*) const {}
Runtime Gpu::runtime(std::size_t) { return {}; }
double Gpu::seconds(const std::function<void()>&) const { return 0; }

struct GpuTimer::Parts {};
GpuTimer::GpuTimer(const Gpu&, const std::function<void()>&) {}
GpuTimer::~GpuTimer() = default;
double GpuTimer::round() const { return 0; }

}  // namespace heddle::cli
