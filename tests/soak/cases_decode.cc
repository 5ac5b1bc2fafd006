// Decoding over caches.
#include "soak/cases.h"

namespace heddle::soak {
namespace {

AttentionSubject many_sequences(std::string candidate, DType dtype, int d) {
  AttentionSubject s;
  s.candidate = std::move(candidate);
  s.dtype = dtype;
  s.B = 64, s.H = 16, s.Hkv = 4, s.Sq = 1, s.Sk = 1024, s.D = d;
  s.lengths = true;
  return s;
}

// Lengths that the host knows, and units of work that several blocks of threads share: on Hopper those of a cluster,
// of 8 to 16, with 16 blocks of 128 keys and more for each.
AttentionSubject few_sequences(std::string candidate, DType dtype, int d) {
  AttentionSubject s = many_sequences(std::move(candidate), dtype, d);
  s.B = 2, s.Sk = 32768;
  s.lengths = false;
  return s;
}

// Keys are cut in the same pieces whatever else is in the batch: 5 to 8 of 512 keys a block of threads.
AttentionSubject invariant(std::string candidate, DType dtype, int d) {
  AttentionSubject s = many_sequences(std::move(candidate), dtype, d);
  s.Sk = 4096;
  s.batch_invariant = true;
  return s;
}

void hopper_many_sequences(Table& table) {
  for (const int d : {64, 128, 256}) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      AttentionSubject s = many_sequences("sm90_decode", dtype, d);
      table.forward("", s);
      s.appends = true;
      table.forward("appends", s);
      s.page_size = 16;
      table.forward("appends to pages", s);
      s.rotary = d / 2, s.pairs = true;
      table.forward("appends to pages, half of the dims rotated in pairs", s);
      s.page_size = 0;
      s.rotary = d, s.pairs = false;
      table.forward("appends, rotated", s);
      s.Sq = 4, s.causal = true;
      table.forward("appends, rotated", s);
      s.Sq = 8, s.Hkv = 2;
      table.forward("appends, rotated", s);
      s.Sq = 1, s.Hkv = 4, s.causal = false;
      s.appends = false, s.rotary = 0;
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
      s.appends = true;
      s.rotary = d;
      table.forward("appends to an e4m3 cache, rotated", s);
      s.Sq = 1, s.causal = false;
      s.page_size = 16;
      table.forward("appends to pages of an e4m3 cache, rotated", s);
    }
  }
}

void hopper_few_sequences(Table& table) {
  for (const int d : {64, 128, 256}) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      AttentionSubject s = few_sequences("sm90_decode", dtype, d);
      table.forward("in clusters", s);
      s.page_size = 64;
      table.forward("pages, in clusters", s);
      s.page_size = 0;
      s.Sq = 6, s.causal = true;  // 24 rows of a kv head: two tiles of them
      table.forward("in clusters", s);
      s.Sq = 8, s.Hkv = 2;  // 64 rows: by warpgroups
      table.forward("in clusters", s);
      s.Sq = 1, s.Hkv = 4, s.causal = false;
      s.f8_cache = s.scales = true;
      table.forward("e4m3 cache, scales by head, in clusters", s);
      s.scales_by_token = true;
      table.forward("e4m3 cache, scales by key, in clusters", s);
      s = few_sequences("sm90_decode", dtype, d);
      s.B = 1;  // a cluster reads its sequence's length itself
      s.lengths = s.appends = true;
      table.forward("appends, in clusters", s);
      s.page_size = 16;
      s.rotary = d;
      table.forward("appends to pages, rotated, in clusters", s);
    }
  }
}

void hopper_invariant(Table& table) {
  for (const int d : {64, 128, 256}) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      AttentionSubject s = invariant("sm90_decode", dtype, d);
      table.forward("batch-invariant", s);
      s.page_size = 16;
      s.appends = true;
      s.rotary = d;
      table.forward("batch-invariant, appends to pages, rotated", s);
      s.page_size = 0;
      s.appends = false;
      s.rotary = 0;
      s.Sq = 8, s.Hkv = 2, s.causal = true;
      table.forward("batch-invariant", s);
      s.Sq = 1, s.Hkv = 4, s.causal = false;
      s.f8_cache = s.scales = s.scales_by_token = true;
      table.forward("batch-invariant, e4m3 cache, scales by key", s);
    }
  }
}

}  // namespace

void hopper_decode(Table& table) {
  hopper_many_sequences(table);
  hopper_few_sequences(table);
  hopper_invariant(table);
}

void ampere_decode(Table& table) {
  for (const int d : {64, 128, 256}) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      AttentionSubject s = many_sequences("sm80_decode", dtype, d);
      table.forward("", s);
      s.page_size = 16;
      s.appends = true;
      table.forward("appends to pages", s);
      s.rotary = d;
      table.forward("appends to pages, rotated", s);
      s = few_sequences("sm80_decode", dtype, d);
      table.forward("few sequences", s);
      s.B = 1;
      s.lengths = s.appends = s.pairs = true;
      s.rotary = d / 2;
      table.forward("appends, half of the dims rotated in pairs", s);
      s = invariant("sm80_decode", dtype, d);
      table.forward("batch-invariant", s);
      s.page_size = 16;
      s.appends = true;
      table.forward("batch-invariant, appends to pages", s);
      if (d == 64) continue;  // has no kernel for e4m3
      s = many_sequences("sm80_decode", dtype, d);
      s.f8_cache = s.scales = true;
      table.forward("e4m3 cache, scales by head", s);
      s.scales_by_token = s.appends = true;
      table.forward("appends to an e4m3 cache", s);
      s = invariant("sm80_decode", dtype, d);
      s.f8_cache = s.scales = true;
      table.forward("batch-invariant, e4m3 cache, scales by head", s);
    }
  }
  for (const int d : {64, 128}) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      table.int4("", {dtype, 64, 16, 4, 1000, d});
      table.int4("batch-invariant", {dtype, 64, 16, 4, 1000, d, true});
    }
  }
}

}  // namespace heddle::soak
