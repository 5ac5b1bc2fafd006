// The subjects by name: every candidate, every kernel it chooses from, both directions.
#include "soak/cases.h"

#include "core/check.h"

namespace heddle::soak {
namespace {

std::string after(std::string_view what) { return what.empty() ? "" : text(" ", what); }

}  // namespace

void Table::add(const AttentionSubject& s, std::string_view pass, std::string_view what) {
  cases.push_back({text(s.candidate, " ", pass, " ", name_of(s.dtype), " d", s.D, s.causal ? " causal" : "", " s", s.Sq,
                        s.Sk > 0 ? text(" of ", s.Sk) : "", after(what)),
                   [s](std::uint64_t seed) { return make_subject(s, seed); }});
}

void Table::linear(std::string_view what, const LinearSubject& s) {
  cases.push_back({text(s.candidate, s.gradients ? " gradients " : " ", name_of(s.dtype), " ", s.format, " ", s.rows,
                        " rows of ", s.n, " x ", s.k, after(what)),
                   [s](std::uint64_t seed) { return make_subject(s, seed); }, s.candidate.starts_with("cublaslt")});
}

void Table::int4(std::string_view what, const Int4Subject& s) {
  cases.push_back({text("sm80_decode ", name_of(s.dtype), " d", s.D, " int4", after(what)),
                   [s](std::uint64_t seed) { return make_subject(s, seed); }});
}

void Table::sparse(std::string_view what, const SparseSubject& s) {
  cases.push_back({text(s.candidate, " lists ", s.pass == Pass::forward ? "forward " : "backward ", name_of(s.dtype),
                        " d", s.D, " s", s.S, " blocks of ", s.block, after(what)),
                   [s](std::uint64_t seed) { return make_subject(s, seed); }});
}

void Table::nsa(std::string_view what, const NsaSubject& s) {
  constexpr const char* kNames[] = {"pooled keys", "choice of blocks", "gated branches", "sm90 nsa_step"};
  cases.push_back(
      {text(s.candidate, s.candidate.empty() ? "" : " ", kNames[static_cast<int>(s.what)],
            s.pass == Pass::backward ? " backward " : " ", name_of(s.dtype), " d", s.D, " s", s.S, after(what)),
       [s](std::uint64_t seed) { return make_subject(s, seed); }});
}

AttentionSubject many_rows(std::string candidate, DType dtype, int d, int s, bool causal, int kv_heads) {
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

std::vector<SoakCase> soak_cases(int compute_major) {
  std::vector<SoakCase> out;
  Table table(out);
  const bool hopper = compute_major == 9;
  if (hopper) {
    hopper_attention(table);
    hopper_decode(table);
  }
  ampere_attention(table);
  ampere_decode(table);
  plain_attention(table);
  sparse_attention(table, hopper);
  beside_sparse_attention(table, hopper);
  linear_layers(table, hopper);
  return out;
}

}  // namespace heddle::soak
