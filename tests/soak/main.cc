// heddle_soak: the same calls again and again, several tiles to a block of threads, without a pause between them. Bits
// must be those of the first call, and rows those of a reference in double precision. CONTRIBUTING.md says when to run
// it, docs/kernels/handing_over.md what it was made for.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <thread>

#include "soak/neighbour.h"
#include "soak/plants.h"
#include "soak/runner.h"

namespace heddle::soak {
namespace {

void report(const std::string& name, const char* mode, const Findings& found) {
  if (!found.any()) return;
  std::cout << "WRONG  " << name << ", " << mode << ": " << found.where << "; " << found.bad_calls << " of "
            << found.calls << " calls" << std::endl;
}

struct Choice {
  std::string filter;
  int shard = 0, shards = 1;
  double seconds = 60;
  std::uint64_t seed = 1;
  bool neighbour = true;
};

// Each case alone, beside the next one on another stream, and beside another process.
int soak(const std::vector<SoakCase>& cases, const Choice& choice) {
  const int modes = choice.neighbour ? 3 : 2;
  const double each = choice.seconds / static_cast<double>(cases.size()) / modes;
  std::unique_ptr<Neighbour> neighbour;
  if (choice.neighbour) neighbour = std::make_unique<Neighbour>();
  long calls = 0, wrong = 0;
  for (std::size_t n = 0; n < cases.size(); ++n) {
    const std::string& name = cases[n].name;
    const std::unique_ptr<Subject> subject = cases[n].make(choice.seed);
    Runner runner(*subject);
    bool bad = false;
    long case_calls = 0;
    const auto note = [&](const char* mode, const Findings& found) {
      report(name, mode, found);
      bad |= found.any();
      case_calls += found.calls;
    };
    note("alone", runner.run(each));
    const double microseconds = runner.time();
    {
      const SoakCase& next = cases[(n + 1) % cases.size()];
      const std::unique_ptr<Subject> other = next.make(choice.seed + 1);
      Findings beside;
      std::exception_ptr failure;
      Runner others(*other);
      std::thread thread([&] {
        try {
          beside = others.run(each);
        } catch (...) {
          failure = std::current_exception();
        }
      });
      Findings found;
      try {
        found = runner.run(each);
      } catch (...) {
        failure = std::current_exception();
      }
      thread.join();
      if (failure) std::rethrow_exception(failure);
      note("beside another stream", found);
      report(next.name, ("beside the stream of " + name).c_str(), beside);
      bad |= beside.any();
      calls += beside.calls;
    }
    if (neighbour) {
      neighbour->order('g');
      note("beside another process", runner.run(each));
      neighbour->order('p');
    }
    calls += case_calls;
    wrong += bad;
    std::printf("%-6s %s: %ld calls, %.1f us each\n", bad ? "WRONG" : "ok", name.c_str(), case_calls, microseconds);
    std::fflush(stdout);
  }
  std::cout << cases.size() << " cases, " << calls << " calls, " << wrong << " cases with wrong rows" << std::endl;
  return wrong == 0 ? 0 : 1;
}

std::unique_ptr<Subject> subject_named(const std::vector<SoakCase>& cases, const std::string& name) {
  for (const SoakCase& c : cases) {
    if (c.name.rfind(name, 0) == 0) return c.make(1);
  }
  throw std::runtime_error("there is no case " + name);
}

// Those that faults can be switched on for, each once.
std::vector<std::string> planted_cases() {
  std::vector<std::string> names;
  for (const Proof& proof : proofs()) {
    const bool there = std::ranges::find(names, proof.name) != names.end();
    if (!there && proof.plant != cuda::Plant::none) names.emplace_back(proof.name);
  }
  return names;
}

// Plants each fault until it is found, and each delay, of which nothing may come.
int prove(const std::vector<SoakCase>& cases, double seconds) {
  int missed = 0;
  for (const Proof& proof : proofs()) {
    const std::unique_ptr<Subject> subject = subject_named(cases, proof.name);
    Runner runner(*subject);
    const bool for_good = proof.plant == cuda::Plant::none;
    if (const Findings before = for_good ? Findings{} : runner.run(0.2); before.any()) {
      report(proof.name, "with nothing planted", before);
      ++missed;
      continue;
    }
    plant(proof.plant);
    const Clock::time_point begin = Clock::now();
    const Findings found = runner.run(seconds);
    plant(cuda::Plant::none);
    std::printf("%-6s %s: %s, %ld calls, %.2f s\n", found.any() ? "found" : "MISSED", proof.name, proof.what,
                found.calls, seconds_since(begin));
    std::fflush(stdout);
    missed += !found.any();
  }
  for (const std::string& name : planted_cases()) {
    for (const auto& [delay, what] : {std::pair(cuda::Plant::slow_producer, "a slow producer"),
                                      std::pair(cuda::Plant::slow_consumer, "slow consumers")}) {
      const std::unique_ptr<Subject> subject = subject_named(cases, name);
      Runner runner(*subject);
      plant(delay);
      const Findings found = runner.run(seconds / 4);
      plant(cuda::Plant::none);
      report(name, what, found);
      std::printf("%-6s %s: %s, %ld calls\n", found.any() ? "WRONG" : "ok", name.c_str(), what, found.calls);
      std::fflush(stdout);
      missed += found.any();
    }
  }
  std::cout << proofs().size() << " faults planted, " << missed << " not found, or delays with wrong rows" << std::endl;
  return missed == 0 ? 0 : 1;
}

// What the fences of release_after_reads() cost: the same calls with them and without, in turn. Medians, microseconds.
int measure_fences(const std::vector<SoakCase>& cases, const std::string& path, const kit::Gpu& gpu) {
  constexpr int kRounds = 15;
  const char* const commit = std::getenv("COMMIT");
  if (commit == nullptr)
    throw std::runtime_error("COMMIT must say which commit was built: it is kept with the figures");
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const std::string& name : planted_cases()) {
    const std::unique_ptr<Subject> subject = subject_named(cases, name);
    Runner runner(*subject);
    std::array<std::vector<double>, 2> times;
    for (int round = 0; round < kRounds + 2; ++round) {
      for (const bool fenced : {true, false}) {
        plant(fenced ? cuda::Plant::none : cuda::Plant::unfenced_reads);
        const double time = runner.time();
        if (round >= 2) times[fenced].push_back(time);  // the first ones warm up
      }
    }
    plant(cuda::Plant::none);
    nlohmann::ordered_json row = {{"case", name}};
    for (const bool fenced : {true, false}) {
      std::ranges::sort(times[fenced]);
      row[fenced ? "fenced_us" : "unfenced_us"] = {
          {"median", times[fenced][kRounds / 2]}, {"min", times[fenced].front()}, {"max", times[fenced].back()}};
    }
    std::printf("%s: %.2f us with fences, %.2f without\n", name.c_str(), times[1][kRounds / 2], times[0][kRounds / 2]);
    std::fflush(stdout);
    rows.push_back(row);
  }
  std::string driver;
  std::ifstream version("/proc/driver/nvidia/version");
  std::getline(version, driver);
  const nlohmann::ordered_json all = {
      {"what",
       "fences of release_after_reads(): kernels of heddle_soak_planted, 40 calls in a row, in turn with and without"},
      {"gpu", gpu.name},
      {"driver", driver},
      {"commit", commit},
      {"rounds", kRounds},
      {"rows", rows}};
  std::ofstream out(path);
  out << all.dump(1) << '\n';
  return out.good() ? 0 : 1;
}

// Whether cuBLASLt is there, if cases need it; where it may be missing, those are left out.
bool can_run(std::vector<SoakCase>& cases, bool without_cublaslt) {
  const auto need = std::ranges::count_if(cases, [](const SoakCase& c) { return c.needs_cublaslt; });
  const std::string refusal = need > 0 ? cublaslt_refusal() : "";
  if (refusal.empty()) return true;
  if (!without_cublaslt || need == std::ssize(cases)) {
    std::cerr << "heddle_soak: nothing was run: " << need << " of " << cases.size()
              << " cases need cuBLASLt: " << refusal << (without_cublaslt ? "" : "; --without-cublaslt leaves them out")
              << '\n';
    return false;
  }
  std::cout << "heddle_soak: " << need << " of " << cases.size()
            << " cases are left out, as --without-cublaslt allows: " << refusal << std::endl;
  std::erase_if(cases, [](const SoakCase& c) { return c.needs_cublaslt; });
  return true;
}

int run(int argc, char** argv) {
  CLI::App app("Repeats calls of every GPU kernel, and looks for rows that change or are not what a reference says.");
  Choice choice;
  std::string shard, fences;
  bool list = false, proves = false, lives = false, without_cublaslt = false;
  app.add_option("--seconds", choice.seconds, "of repeating, over all cases; with --prove, at most for each fault");
  app.add_option("--filter", choice.filter, "only cases whose names contain this");
  app.add_option("--shard", shard, "i/n: the i-th of n parts of the cases, i from 0");
  app.add_option("--seed", choice.seed, "of the tensors");
  app.add_flag("!--no-neighbour", choice.neighbour, "without another process on the GPU");
  app.add_flag("--without-cublaslt", without_cublaslt, "leave out the cases that need cuBLASLt if it is not there");
  app.add_flag("--list", list, "print the names of the cases");
  app.add_flag("--prove", proves, "plant faults and see them found (in heddle_soak_planted)");
  app.add_option("--fences", fences, "measure what fences cost, and write it to this file (in heddle_soak_planted)");
  app.add_flag("--neighbour", lives, "be the other process");
  CLI11_PARSE(app, argc, argv);
  if (!shard.empty() && (std::sscanf(shard.c_str(), "%d/%d", &choice.shard, &choice.shards) != 2 || choice.shard < 0 ||
                         choice.shard >= choice.shards)) {
    std::cerr << "heddle_soak: --shard is " << shard << ": it must be i/n with i from 0 to n - 1\n";
    return 2;
  }
  const kit::Gpu gpu = kit::current_gpu();
  if (gpu.name.empty() && !list) {
    std::cerr << "heddle_soak: nothing was run: " << gpu.absence << '\n';
    return 1;
  }
  if (lives) return Neighbour::live();
  std::vector<SoakCase> cases, all = soak_cases(list ? 9 : gpu.major);
  if (proves || !fences.empty()) {
    if (!can_plant()) {
      std::cerr << "heddle_soak: nothing can be planted in this build: heddle_soak_planted is the one that can\n";
      return 2;
    }
    if (gpu.major != 9) {
      std::cout << "heddle_soak: faults are planted in Hopper's kernels, which " << gpu.name << " does not run\n";
      return 0;
    }
    return proves ? prove(all, choice.seconds) : measure_fences(all, fences, gpu);
  }
  for (std::size_t n = 0; n < all.size(); ++n) {
    const bool mine = static_cast<int>(n % static_cast<std::size_t>(choice.shards)) == choice.shard;
    if (mine && all[n].name.find(choice.filter) != std::string::npos) cases.push_back(std::move(all[n]));
  }
  if (list) {
    for (const SoakCase& c : cases) std::cout << c.name << '\n';
    return 0;
  }
  if (cases.empty()) {
    std::cerr << "heddle_soak: no case's name contains " << choice.filter << '\n';
    return 2;
  }
  if (!can_run(cases, without_cublaslt)) return 1;
  return soak(cases, choice);
}

}  // namespace
}  // namespace heddle::soak

int main(int argc, char** argv) {
  try {
    return heddle::soak::run(argc, argv);
  } catch (const std::exception& error) {
    std::cerr << "heddle_soak: " << error.what() << '\n';
    return 1;
  }
}
