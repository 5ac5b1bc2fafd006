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
    add_partial(rows);
    add_steps(rows);
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

std::vector<AttentionCase> in_int8_qk(const std::vector<AttentionCase>& rows) {
  // Blocks of 64 keys and sums of 256, several of them, and parts of one.
  const AttentionCase base{.B = 2, .H = 2, .Hkv = 1, .Sq = 200, .Sk = 700, .D = 64, .Dv = 64, .forward_only = true};
  Rows own;
  const auto with = [&](const char* name, auto change) {
    own.push_back(base);
    own.back().name = name;
    change(own.back());
  };
  with("far_keys", [](auto& c) { c.values = Values::far_keys; });
  with("far_keys_d128",
       [](auto& c) { c.values = Values::far_keys, c.D = c.Dv = 128, c.causal = Causal::bottom_right; });
  with("far_keys_sink", [](auto& c) { c.values = Values::far_keys, c.sink = true, c.window_left = 100; });
  with("far_keys_used", [](auto& c) { c.values = Values::far_keys, c.B = 3, c.seqused_k = c.seqused_q = true; });
  with("far_keys_packed", [](auto& c) { c.values = Values::far_keys, c.B = 3, c.packed_q = c.packed_k = true; });
  with("d96_dv72", [](auto& c) { c.D = 96, c.Dv = 72, c.H = 6, c.Hkv = 2; });
  with("d40_dv128", [](auto& c) { c.D = 40, c.Dv = 128, c.causal = Causal::top_left; });
  with("far_keys_large_logits", [](auto& c) { c.values = Values::far_keys, c.scale = 2.0f, c.D = c.Dv = 128; });
  Rows out;
  for (const AttentionCase& row : rows) {
    if (row.k_dtype() == DType::f16 || row.k_dtype() == DType::bf16) out.push_back(row);
  }
  for (AttentionCase& row : own) {
    for (DType dtype : {DType::bf16, DType::f16}) {
      row.dtype = dtype;
      out.push_back(row);
      out.back().name += dtype == DType::bf16 ? "_bf16" : "_f16";
    }
  }
  for (AttentionCase& row : out) {
    row.precision = Precision::int8_qk;
    row.name += "_int8_qk";
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
