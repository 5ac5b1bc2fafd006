// The subjects: every candidate, every kernel it chooses from, both directions. Sizes are such that a block of threads
// that keeps at it for several tiles has 3 to 20 of them on a GPU of 132 multiprocessors.
#include "core/check.h"
#include "soak/subject.h"

namespace heddle::soak {
namespace {

using Plane = AttentionSubject::Plane;

class Table {
 public:
  explicit Table(std::vector<SoakCase>& out) : cases(out) {}

  void forward(std::string_view what, AttentionSubject s) { add(s, "forward", what); }
  void backward(std::string_view what, AttentionSubject s) {
    s.pass = Pass::backward;
    add(s, "backward", what);
  }
  void linear(LinearSubject s) {
    cases.push_back({text(s.candidate, " ", name_of(s.dtype), " ", s.format, " ", s.rows, " rows of ", s.n, " x ", s.k),
                     [s](std::uint64_t seed) { return make_subject(s, seed); }});
  }
  void int4(std::string_view what, Int4Subject s) {
    cases.push_back({text("sm80_decode ", name_of(s.dtype), " d", s.D, " int4 ", what),
                     [s](std::uint64_t seed) { return make_subject(s, seed); }});
  }

 private:
  void add(const AttentionSubject& s, std::string_view pass, std::string_view what) {
    cases.push_back({text(s.candidate, " ", pass, " ", name_of(s.dtype), " d", s.D, s.causal ? " causal" : "", " s",
                          s.Sq, s.Sk > 0 ? text(" of ", s.Sk) : "", what.empty() ? "" : " ", what),
                     [s](std::uint64_t seed) { return make_subject(s, seed); }});
  }
  std::vector<SoakCase>& cases;
};

// Some 77,000 rows of heads: 600 tiles of 128.
AttentionSubject many_rows(std::string candidate, DType dtype, int d, int s, bool causal, int kv_heads = 4) {
  AttentionSubject out;
  out.candidate = std::move(candidate);
  out.dtype = dtype;
  out.B = (19200 + s - 1) / s;
  out.Hkv = kv_heads;
  out.Sq = s;
  out.D = d;
  out.causal = causal;
  return out;
}

void hopper_forward(Table& table) {
  const auto plain = [](DType dtype, int d, int s, bool causal, int kv = 4) {
    return many_rows("sm90", dtype, d, s, causal, kv);
  };
  for (const int s : {200, 256, 512, 1024, 4096}) {
    for (const bool causal : {true, false}) table.forward("", plain(DType::bf16, 128, s, causal));
  }
  table.forward("one kv head", plain(DType::bf16, 128, 256, true, 1));
  for (const int s : {256, 1024}) table.forward("one kv head", plain(DType::f16, 128, s, s == 256, 1));
  table.forward("", plain(DType::f16, 128, 512, true));
  for (const int d : {64, 96, 192, 256}) {
    table.forward("", plain(DType::bf16, d, 300, true, 2));
    table.forward("", plain(DType::f16, d, 512, false));
  }
  for (const DType dtype : {DType::bf16, DType::f16})
    table.forward("", plain(dtype, 64, 2100, false));  // three warpgroups

  for (const int d : {64, 128, 256}) {
    const DType dtype = d == 128 ? DType::bf16 : DType::f16;
    AttentionSubject s = plain(dtype, d, 500, true);
    s.sink = true;
    table.forward("sink", s);
    s = plain(dtype, d, 700, true);
    s.window = 100;
    table.forward("window", s);
    s = plain(dtype, d, 700, true);
    s.packed = true;
    s.B *= 2;
    table.forward("packed", s);
    for (const DType type : {DType::bf16, DType::f16}) {
      s = plain(type, d, 400, true);
      s.softcap = 20;
      table.forward("softcap", s);
      s = plain(type, d, 400, true);
      s.alibi = true;
      table.forward("alibi", s);
      s = plain(type, d, 400, false);
      s.bias = Plane::keys;
      table.forward("bias by keys", s);
      s = plain(type, d, 400, false);
      s.mask = Plane::keys;
      table.forward("mask by keys", s);
      s = plain(type, d, 400, false);
      s.bias = Plane::rows;
      table.forward("bias with rows", s);
      s = plain(type, d, 400, true);
      s.mask = Plane::rows;
      table.forward("mask with rows", s);
      s = plain(type, d, 400, false);
      s.bias = Plane::f32_rows, s.softcap = 20, s.alibi = true;
      table.forward("options together", s);
    }
  }
}

void hopper_e4m3(Table& table) {
  for (const int d : {64, 96, 128}) {
    for (const bool causal : {true, false}) {
      AttentionSubject s = many_rows("sm90_fp8", DType::f8e4m3, d, causal ? 300 : 1024, causal);
      table.forward("", s);
      if (d == 96) continue;
      s.scales = true;
      table.forward("scales by head", s);
      s.scales_by_token = true;
      table.forward("scales by token", s);
    }
  }
}

void hopper_backward(Table& table) {
  for (const int d : {64, 96, 128, 192, 256}) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      AttentionSubject s = many_rows("sm90", dtype, d, 1024, dtype == DType::bf16, 2);
      s.B = 4;
      table.backward("", s);
      s.Sq = 300;
      s.B = 16;
      s.deterministic = false;
      table.backward("sums in any order", s);
    }
    if (d == 96 || d == 192) continue;
    for (const DType dtype : {DType::bf16, DType::f16}) {
      AttentionSubject s = many_rows("sm90", dtype, d, 600, true);
      s.B = 8;
      s.softcap = 20;
      table.backward("softcap", s);
      s.softcap = 0;
      s.alibi = true;
      s.bias = Plane::rows;
      table.backward("bias and alibi", s);
    }
    AttentionSubject s = many_rows("sm90", DType::bf16, d, 700, true, 1);
    s.B = 12;
    s.packed = true;
    table.backward("packed", s);
  }
}

void hopper_decode(Table& table) {
  for (const int d : {64, 128, 256}) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      AttentionSubject s;
      s.candidate = "sm90_decode";
      s.dtype = dtype;
      s.B = 64, s.H = 16, s.Hkv = 4, s.Sq = 1, s.Sk = 1024, s.D = d;
      s.lengths = true;
      table.forward("", s);
      s.appends = true;
      table.forward("appends", s);
      s.page_size = 16;
      table.forward("appends to pages", s);
      s.appends = false;
      s.page_size = 64;
      s.Sq = 4, s.causal = true;  // 16 rows of a kv head
      table.forward("pages", s);
      s.page_size = 0;
      s.Sq = 8, s.H = 16, s.Hkv = 2;  // 64 rows: by warpgroups
      table.forward("", s);
      s.Sq = 6, s.Hkv = 4;  // 24 rows: two tiles of them
      table.forward("", s);
      s.Sq = 1, s.causal = false;
      s.f8_cache = s.scales = true;
      table.forward("e4m3 cache, scales by head", s);
      s.scales_by_token = true;
      table.forward("e4m3 cache, scales by key", s);
      s.Sq = 6, s.causal = true;
      table.forward("e4m3 cache, scales by key", s);
    }
  }
}

void ampere_attention(Table& table) {
  for (const int d : {64, 128, 256}) {
    for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
      AttentionSubject s = many_rows("sm80", dtype, d, 512, true, 2);
      table.forward("", s);
      if (dtype == DType::f32) {
        s.precision = Precision::tf32;
        table.forward("tf32", s);
      } else if (d <= 128) {
        s.candidate = "sm80_int8";
        s.precision = Precision::int8_qk;
        table.forward("", s);
      }
      s = many_rows("sm80", dtype, d, 300, false);
      s.B = 16;
      s.mask = Plane::rows, s.bias = Plane::f32_rows;
      table.forward("bias and mask", s);
      s = many_rows("sm80", dtype, d, 512, true, 2);
      s.B = 8;
      table.backward("", s);
      if (dtype == DType::f32) {
        s.precision = Precision::tf32;
        table.backward("tf32", s);
      }
      s.precision = Precision::f32;
      s.deterministic = false;
      table.backward("sums in any order", s);
    }
    for (const DType dtype : {DType::bf16, DType::f16}) {
      AttentionSubject s;
      s.candidate = "sm80_decode";
      s.dtype = dtype;
      s.B = 64, s.H = 16, s.Hkv = 4, s.Sq = 1, s.Sk = 1024, s.D = d;
      s.lengths = true;
      table.forward("", s);
      s.page_size = 16;
      s.appends = true;
      table.forward("appends to pages", s);
      if (d == 64) continue;  // has no kernel for e4m3
      s.page_size = 0, s.appends = false;
      s.f8_cache = s.scales = true;
      table.forward("e4m3 cache, scales by head", s);
    }
  }
  for (const int d : {64, 128}) {
    for (const DType dtype : {DType::bf16, DType::f16}) table.int4("", {dtype, 64, 16, 4, 1000, d});
  }
}

void linear_layers(Table& table, bool hopper) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    if (hopper) {
      for (const std::int64_t rows : {1, 16, 32, 64, 128, 250})
        table.linear({"sm90_w4a16", "nvfp4", WeightOrder::fragments16, dtype, rows, 8192, 6144});
      table.linear({"sm90_w4a16", "mxfp4", WeightOrder::fragments16, dtype, 2000, 8192, 512});
      for (const std::int64_t rows : {40, 128, 250}) {
        table.linear({"sm90_w4a8", "mxfp4", WeightOrder::fragments8, dtype, rows, 8192, 6144});
        table.linear({"sm90_w4a8", "nvfp4", WeightOrder::fragments8, dtype, rows, 8192, 6144});
      }
      table.linear({"sm90_w4a8", "mxfp4", WeightOrder::fragments8, dtype, 2000, 8192, 512});
      table.linear({"sm90_w4a8", "nvfp4", WeightOrder::fragments8, dtype, 2000, 8192, 512});
    }
    for (const char* format : {"nvfp4", "int4_g128_zp", "nf4", "int8_row", "fp8_row"}) {
      for (const std::int64_t rows : {1, 40, 300})
        table.linear({"sm80_linear", format, WeightOrder::fragments16, dtype, rows, 8192, 1024});
    }
    table.linear({"sm80_gemv", "nvfp4", WeightOrder::fragments16, dtype, 1, 8192, 6144});
  }
}

}  // namespace

std::vector<SoakCase> soak_cases(int compute_major) {
  std::vector<SoakCase> out;
  Table table(out);
  const bool hopper = compute_major == 9;
  if (hopper) {
    hopper_forward(table);
    hopper_e4m3(table);
    hopper_backward(table);
    hopper_decode(table);
  }
  ampere_attention(table);
  linear_layers(table, hopper);
  return out;
}

}  // namespace heddle::soak
