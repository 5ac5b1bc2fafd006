// heddle draw --ranks: a picture of who computes what in a plan of attention over several processes.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "heddle/distributed.h"

namespace heddle::cli {

struct DrawRanks {
  int ranks = 0;  // 0: a pattern is to be drawn
  std::string order = "zigzag";
  std::vector<std::int64_t> documents;  // lengths
  std::vector<std::int64_t> window;     // left and right

  void add_to(CLI::App& verb);
  // Writes the picture, and says what it is of.
  void run(std::int64_t length, bool causal, const std::string& out, bool json) const;

 private:
  distributed::Problem problem_of(std::int64_t length, bool causal) const;
};

// Throws RuntimeError where it cannot be written.
void write_picture(const std::string& out, const std::string& picture);

}  // namespace heddle::cli
