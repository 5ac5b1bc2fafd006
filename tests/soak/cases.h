// The table of cases, and who fills it. Sizes are such that a block of threads that keeps at it for several tiles has 3
// to 20 of them on a GPU of 132 multiprocessors, that others have many blocks a multiprocessor, and that a call takes
// less than about a millisecond.
#pragma once

#include <string_view>

#include "soak/subject.h"

namespace heddle::soak {

class Table {
 public:
  explicit Table(std::vector<SoakCase>& out) : cases(out) {}

  void forward(std::string_view what, AttentionSubject s) { add(s, "forward", what); }
  void backward(std::string_view what, AttentionSubject s) {
    s.pass = Pass::backward;
    add(s, "backward", what);
  }
  void linear(std::string_view what, const LinearSubject& s);
  void int4(std::string_view what, const Int4Subject& s);
  void sparse(std::string_view what, const SparseSubject& s);
  void nsa(std::string_view what, const NsaSubject& s);

 private:
  void add(const AttentionSubject& s, std::string_view pass, std::string_view what);
  std::vector<SoakCase>& cases;
};

// Some 77,000 rows of heads: 600 tiles of 128.
AttentionSubject many_rows(std::string candidate, DType dtype, int d, int s, bool causal, int kv_heads = 4);

void hopper_attention(Table& table);
void hopper_decode(Table& table);
void ampere_attention(Table& table);
void ampere_decode(Table& table);
void plain_attention(Table& table);
void sparse_attention(Table& table, bool hopper);
void beside_sparse_attention(Table& table, bool hopper);
void linear_layers(Table& table, bool hopper);

}  // namespace heddle::soak
