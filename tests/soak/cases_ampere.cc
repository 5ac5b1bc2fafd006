// The candidates for Ampere, and those for every GPU.
#include "soak/cases.h"

namespace heddle::soak {
namespace {

using Plane = AttentionSubject::Plane;

// One row a block of threads, and slow: 2,400 blocks and more.
AttentionSubject naive(DType dtype, int d, int kv_heads) {
  AttentionSubject s;
  s.candidate = "naive_cuda";
  s.dtype = dtype;
  s.B = 1024 / d, s.H = 4, s.Hkv = kv_heads, s.Sq = 150, s.D = d;
  s.causal = true;
  return s;
}

// 128 rows a block: 1,000 blocks and more in each of its three kernels.
AttentionSubject baseline(DType dtype, int d, int kv_heads) {
  AttentionSubject s = naive(dtype, d, kv_heads);
  s.candidate = "baseline_cuda";
  s.B *= 16;
  s.Sq = 250;
  return s;
}

void with_options(Table& table, AttentionSubject (*make)(DType dtype, int d, int kv_heads)) {
  for (const DType dtype : {DType::bf16, DType::f32}) {
    AttentionSubject s = make(dtype, 128, 2);
    s.packed = true;
    s.B *= 2;
    table.forward("packed", s);
    s = make(dtype, 128, 2);
    s.window = 60, s.sink = true;
    table.forward("window and sink", s);
    s = make(dtype, 128, 4);
    s.bias = Plane::rows, s.softcap = 20, s.alibi = true;
    table.forward("bias, softcap and alibi", s);
    s = make(dtype, 128, 4);
    s.causal = false, s.mask = Plane::rows;
    table.forward("mask", s);
    s = make(dtype, 128, 2);
    s.lengths = true, s.Sk = 256;
    table.forward("cache", s);
    s.page_size = 16;
    table.forward("pages", s);
    s.Sq = 2, s.B = 512;
    s.appends = true;
    table.forward("appends to pages", s);
    s.rotary = 128;
    table.forward("appends to pages, rotated", s);
  }
  AttentionSubject s = make(DType::bf16, 128, 2);
  s.lengths = true, s.Sk = 256;
  s.f8_cache = s.scales = true;
  table.forward("e4m3 cache, scales by head", s);
  s = make(DType::f8e4m3, 128, 4);
  s.scales = s.scales_by_token = true;
  table.forward("scales by token", s);
}

}  // namespace

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
      s.pieces = true;
      table.backward("in pieces", s);
      s.pieces = false;
      s.deterministic = false;
      table.backward("sums in any order", s);
    }
  }
}

void plain_attention(Table& table) {
  for (const auto make : {naive, baseline}) {
    for (const int d : {64, 128, 256}) {
      for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
        AttentionSubject s = make(dtype, d, 2);
        table.forward("", s);
        s.causal = false;
        if (d == 128) table.forward("", s);
      }
    }
    with_options(table, make);
  }
}

}  // namespace heddle::soak
