// Rows dealt out to ranks.
#pragma once

#include <vector>

#include "heddle/distributed.h"

namespace heddle::distributed {

// Pairs that rows [begin, end) have in all areas, which outlive this.
class PairCounter {
 public:
  explicit PairCounter(const std::vector<Area>& areas);
  double operator()(std::int64_t begin, std::int64_t end) const;

 private:
  const std::vector<Area>& areas_;
  bool ascending_;  // their rows do, without sharing any: as those of documents
};

// For each rank its runs as its tensors have them, wave after wave.
std::vector<std::vector<Run>> dealt_rows(const Problem& problem, const std::vector<Area>& areas);

// A rank's runs, ascending, as its tensors have them.
std::vector<Run> arranged(const std::vector<Run>& runs, const Problem& problem, const std::vector<Area>& areas);

// Order::balanced: for each rank its parts, ascending, neighbours joined; waves are not told.
std::vector<std::vector<Run>> balanced_rows(const Problem& problem, const std::vector<Area>& areas);

// Runs that go on where the one before ends, joined.
std::vector<Run> joined(const std::vector<Run>& runs);

}  // namespace heddle::distributed
