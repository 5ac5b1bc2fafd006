#include "kit/cases.h"

#include <map>

#include "core/check.h"
#include "kit/case_rows.h"

namespace heddle::kit {
namespace {

// Every row in f32; round and corner rows in both 16-bit formats also, the others in one of them in turn.
Rows expand(const Rows& rows) {
  Rows out;
  std::map<Purpose, int> turns;  // of each purpose, so that a new row renames none of another purpose
  for (const AttentionCase& row : rows) {
    std::vector<DType> dtypes = {DType::f32, turns[row.purpose]++ % 2 ? DType::f16 : DType::bf16};
    if (row.purpose == Purpose::round || row.purpose == Purpose::corner) dtypes = {DType::f32, DType::bf16, DType::f16};
    if (row.f8_cache) dtypes.erase(dtypes.begin());  // beside 16-bit q only
    if (row.dtype == DType::f8e4m3) dtypes = {row.dtype};
    for (DType dtype : dtypes) {
      AttentionCase typed = row;
      typed.dtype = dtype;
      typed.name = text(name_of(row.purpose), "_", row.name, "_",
                        dtype == DType::f32    ? "f32"
                        : dtype == DType::bf16 ? "bf16"
                        : dtype == DType::f16  ? "f16"
                                               : "e4m3");
      out.push_back(typed);
    }
  }
  return out;
}

}  // namespace

const char* name_of(Purpose purpose) {
  switch (purpose) {
    case Purpose::round:
      return "round";
    case Purpose::odd:
      return "odd";
    case Purpose::corner:
      return "corner";
    case Purpose::feature:
      return "feature";
    case Purpose::decode:
      return "decode";
  }
  return "unknown";
}

const std::vector<AttentionCase>& attention_cases() {
  static const Rows cases = [] {
    Rows rows;
    add_round(rows);
    add_odd(rows);
    add_corner(rows);
    add_feature(rows);
    add_decode(rows);
    add_e4m3(rows);
    return expand(rows);
  }();
  return cases;
}

std::vector<AttentionCase> in_tf32(const std::vector<AttentionCase>& rows) {
  Rows out;
  for (const AttentionCase& row : rows) {
    if (row.dtype != DType::f32) continue;
    out.push_back(row);
    out.back().precision = Precision::tf32;
    out.back().name += "_tf32";
  }
  return out;
}

const AttentionCase& attention_case(const std::string& name) {
  for (const AttentionCase& row : attention_cases()) {
    if (row.name == name) return row;
  }
  throw Error(text("[attention_case] '", name, "' is not a row of the case table"));
}

}  // namespace heddle::kit
