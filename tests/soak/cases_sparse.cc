// Attention over lists: items of several tiles, blocks with several items, every width of block. And what native
// sparse attention has beside it.
#include "core/check.h"
#include "soak/cases.h"

namespace heddle::soak {

void sparse_attention(Table& table, bool hopper) {
  const auto forward = [&](const char* what, SparseSubject s) {
    table.sparse(what, s);
    s.candidate = "sm90";
    if (hopper) table.sparse(what, s);
  };
  const auto both = [&](const char* what, SparseSubject s) {
    forward(what, s);
    s.pass = Pass::backward;
    table.sparse(what, s);
  };
  both("", {.B = 2, .H = 32, .Hkv = 2, .S = 1024, .D = 128, .units = 2, .entries = 8});
  both("", {.dtype = DType::f16, .B = 3, .H = 16, .Hkv = 4, .S = 1000, .D = 64, .units = 4, .entries = 10});
  both("two tiles a block", {.B = 2, .H = 16, .Hkv = 2, .S = 900, .D = 128, .block = 128, .units = 2, .entries = 5});
  both("small blocks", {.B = 2, .H = 8, .Hkv = 8, .S = 1024, .D = 96, .block = 16, .units = 8, .entries = 24});
  both("lists of 16 rows, of each head", {.dtype = DType::f16,
                                          .B = 2,
                                          .H = 16,
                                          .Hkv = 4,
                                          .S = 1024,
                                          .D = 128,
                                          .block = 32,
                                          .query_rows = 16,
                                          .units = 16,
                                          .entries = 12});
  // By the dense kernels: rings that go round many times, many tiles a CTA, blocks of half a tile, turns.
  const auto by_tiles = [&](const char* what, SparseSubject s) {
    if (!hopper) return;
    s.candidate = "sm90_tiles";
    table.sparse(what, s);
    s.pass = Pass::backward;
    table.sparse(what, s);
    s.deterministic = false;
    table.sparse(text(what, ", sums in any order"), s);
  };
  by_tiles("lists of 128 rows",
           {.B = 2, .H = 8, .Hkv = 4, .S = 4096, .D = 128, .block = 128, .query_rows = 128, .units = 4, .entries = 12});
  by_tiles("lists of 128 rows, of each head",
           {.B = 1, .H = 8, .Hkv = 2, .S = 3000, .D = 128, .block = 64, .query_rows = 128, .units = 8, .entries = 20});
  by_tiles("lists of 256 rows", {.dtype = DType::f16,
                                 .B = 2,
                                 .H = 8,
                                 .Hkv = 8,
                                 .S = 4000,
                                 .D = 64,
                                 .block = 128,
                                 .query_rows = 256,
                                 .units = 1,
                                 .entries = 16});
  // One behind the other: a grid that goes from round to round, and lists of more blocks than are gone through at a
  // time.
  both("by offsets", {.B = 2, .H = 32, .Hkv = 2, .S = 1024, .D = 128, .units = 2, .entries = 12, .by_offsets = true});
  both("by offsets, two tiles a block", {.dtype = DType::f16,
                                         .B = 3,
                                         .H = 16,
                                         .Hkv = 4,
                                         .S = 1000,
                                         .D = 64,
                                         .block = 128,
                                         .units = 16,
                                         .entries = 8,
                                         .by_offsets = true});
  forward("by offsets, lists of 64 rows", {.B = 1,
                                           .H = 16,
                                           .Hkv = 1,
                                           .S = 10000,
                                           .rows = 400,
                                           .D = 128,
                                           .block = 16,
                                           .query_rows = 4,
                                           .units = 1,
                                           .entries = 1500,
                                           .by_offsets = true});
  // Neighbours together: rings that go round many times.
  forward("many blocks", {.B = 1, .H = 32, .Hkv = 2, .S = 6000, .D = 128, .units = 2, .entries = 24});
  forward("many blocks of two tiles",
          {.dtype = DType::f16, .B = 2, .H = 24, .Hkv = 2, .S = 2500, .D = 64, .block = 128, .units = 2, .entries = 6});
  // By rows: many that share a list, and steps of decoding, whose keys warps and blocks of threads share.
  forward("lists of 64 rows",
          {.B = 2, .H = 32, .Hkv = 2, .S = 1024, .D = 128, .query_rows = 4, .units = 2, .entries = 8});
  forward("lists of 80 rows, small blocks", {.dtype = DType::f16,
                                             .B = 2,
                                             .H = 10,
                                             .Hkv = 1,
                                             .S = 1000,
                                             .D = 64,
                                             .block = 16,
                                             .query_rows = 8,
                                             .units = 1,
                                             .entries = 20});
  forward("a step", {.B = 8, .H = 64, .Hkv = 4, .S = 4096, .rows = 1, .D = 128, .units = 4, .entries = 16});
  forward("a step, groups of 40",
          {.dtype = DType::f16, .B = 3, .H = 80, .Hkv = 2, .S = 2000, .rows = 3, .D = 64, .units = 2, .entries = 20});
}

void beside_sparse_attention(Table& table, bool hopper) {
  using enum NsaSubject::What;
  const auto both = [&](NsaSubject s) {
    table.nsa("", s);
    s.pass = Pass::backward;
    table.nsa("", s);
  };
  table.nsa("", {.what = pool, .B = 2, .Hkv = 4, .S = 8192, .D = 128});
  table.nsa("blocks of 16", {.what = pool, .dtype = DType::f16, .B = 2, .Hkv = 2, .S = 4000, .D = 72, .block = 16});
  const auto many_rows = [&](const char* what, NsaSubject s) {
    s.candidate = "sm80";
    table.nsa(what, s);
    s.candidate = "sm90";
    if (hopper) table.nsa(what, s);
  };
  many_rows("", {.what = select, .B = 1, .H = 64, .Hkv = 4, .S = 4096, .D = 128});
  many_rows("blocks of 32, groups of 4",
            {.what = select, .dtype = DType::f16, .B = 2, .H = 16, .Hkv = 4, .S = 2048, .D = 64, .block = 32});
  // A ring of pooled keys that goes round often.
  many_rows("blocks of 16, groups of 8",
            {.what = select, .B = 1, .H = 32, .Hkv = 4, .S = 16384, .rows = 2000, .D = 72, .block = 16});
  many_rows("groups of 1", {.what = select, .B = 1, .H = 8, .Hkv = 8, .S = 16384, .rows = 3000, .D = 128, .block = 32});
  table.nsa("without lse", {.what = select, .B = 2, .H = 32, .Hkv = 2, .S = 2000, .D = 128, .finds_lse = true});
  table.nsa("a step", {.what = select, .B = 16, .H = 64, .Hkv = 4, .S = 8192, .rows = 1, .D = 128, .finds_lse = true});
  table.nsa("steps of 3",
            {.what = select, .dtype = DType::f16, .B = 5, .H = 8, .Hkv = 2, .S = 16384, .rows = 3, .D = 128});
  both({.what = gate, .B = 2, .H = 16, .S = 4096, .D = 128});
  both({.what = gate, .dtype = DType::f16, .B = 1, .H = 10, .S = 3001, .D = 72});
  if (!hopper) return;
  // Clusters of eight CTAs, of two, and single ones; the last ends a block.
  table.nsa("B 1", {.what = step, .B = 1, .H = 64, .Hkv = 4, .S = 9000, .D = 128, .window = 512});
  table.nsa("B 16", {.what = step, .B = 16, .H = 64, .Hkv = 4, .S = 4000, .D = 128, .window = 512});
  table.nsa(
      "B 40, blocks of 32",
      {.what = step, .dtype = DType::f16, .B = 40, .H = 12, .Hkv = 3, .S = 2015, .D = 64, .block = 32, .window = 100});
}

}  // namespace heddle::soak
