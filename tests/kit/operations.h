// The case tables of all operations as one list, for whoever goes through all of them.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kit/cases.h"
#include "kit/run_case.h"

namespace heddle::kit {

// A case of any operation with its answers.
class OperationCase {
 public:
  virtual ~OperationCase() = default;
  // Those that support it, without the reference.
  virtual std::vector<std::string> candidates(Pass pass) const = 0;
  virtual CaseResult check(Pass pass, const std::string& candidate) = 0;
};

struct OperationRow {
  std::string operation, name;
  Purpose purpose = Purpose::feature;
  DType dtype = DType::f32;
  std::vector<Pass> passes;
  std::function<std::unique_ptr<OperationCase>(Device)> open;
  std::function<std::string()> describe;  // sizes, dtype and options, in one line
};

// "attention", "merge_attention", "sparse_attention", "adaptive_attention", "linear". Of attention also the rows of
// another precision; only its candidates run on a GPU here.
const std::vector<std::string>& operation_names();
std::vector<OperationRow> operation_rows(const std::string& operation, Precision precision = Precision::f32);

}  // namespace heddle::kit
