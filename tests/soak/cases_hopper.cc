// Prefill and gradients by the candidates for Hopper.
#include "soak/cases.h"

namespace heddle::soak {
namespace {

using Plane = AttentionSubject::Plane;

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
      if (d <= 128) {
        s = plain(type, d, 4096, true, 2);
        s.Sk = 4096 / 16, s.key_step = 16;
        table.forward("keys 16 apart", s);
        s = plain(type, d, 700, true);
        s.packed = true, s.key_step = 2;
        s.B *= 2;
        table.forward("packed, keys 2 apart", s);
      }
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
      s.poison = true;
      table.forward("mask by keys, tiles twice", s);
      s.bias = Plane::rows;
      table.forward("bias with rows and mask by keys, tiles twice", s);
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

}  // namespace

void hopper_attention(Table& table) {
  hopper_forward(table);
  hopper_e4m3(table);
  hopper_backward(table);
}

}  // namespace heddle::soak
