// heddle explain --ranks: a plan of attention over several processes.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "heddle/distributed.h"
#include "problem.h"

namespace heddle::cli {

// --order, by the names that plans have.
void add_order_flag(CLI::App& verb, std::string& order);
// Lengths of documents as bounds, from 0 on; none of none.
std::vector<std::int64_t> bounds_of(const std::vector<std::int64_t>& lengths);

struct RankFlags {
  int ranks = 0;  // 0: one process's candidates are asked for
  std::string order = "zigzag";
  int ulysses = 0;                      // of 2d; 0: the plan's choice
  std::vector<std::int64_t> documents;  // lengths
  distributed::Costs costs;

  void add_to(CLI::App& verb);
  // Throws Error for flags that need --ranks, or that a plan does not know.
  void check(const ProblemFlags& problem) const;
  // Prints the plan: who has what, what is sent, and how long each scheme is predicted to take.
  void tell(const ProblemFlags& problem, bool json) const;

 private:
  distributed::Problem problem_of(const ProblemFlags& problem) const;
};

}  // namespace heddle::cli
