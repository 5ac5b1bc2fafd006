// Makes the tensors of a case. The order of its steps is the order in which random numbers are drawn.
#pragma once

#include <random>
#include <vector>

#include "kit/case_data.h"

namespace heddle::kit {

class CaseData::Maker {
 public:
  Maker(CaseData& data, std::uint64_t seed) : data_(data), c_(data.spec), random_(seed * 7919 + 17) {}

  void make();

 private:
  using int64_t = std::int64_t;

  double normal() { return normal_(random_); }
  int64_t uniform(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random_); }

  // case_maker.cc: lengths, and tensors of them
  std::vector<int64_t> lengths(bool packed, int64_t longest);
  std::vector<int64_t> used(const std::vector<int64_t>& lengths);
  std::vector<int64_t> left_padding(const std::vector<int64_t>& lengths);
  std::vector<int64_t> offsets();
  static std::vector<int64_t> cumulative(const std::vector<int64_t>& lengths);
  HostTensor rows(DType dtype, bool packed, int64_t total, int64_t longest, int64_t heads, int64_t width,
                  Layout layout);
  HostTensor scales(const HostTensor& data, bool packed);
  void make_keys(int64_t total, const std::vector<int64_t>& used);
  void make_pages(const std::vector<int64_t>& used);

  // case_values.cc: what is in them
  void fill_rows(const AttentionProblem& p, HostTensor& x, int64_t width, double size, double outlier);
  // `offset` (or minus it, channel by channel) is added to all.
  void fill_keys(const AttentionProblem& p, HostTensor& x, int64_t width, double size, double outlier,
                 double offset = 0);
  void make_d_lse(const AttentionProblem& p);
  void make_heads();
  void make_draft_mask();
  void make_mask(const AttentionProblem& p);
  void make_bias(const AttentionProblem& p);
  void poison_unattended(const AttentionProblem& p);

  CaseData& data_;
  const AttentionCase& c_;
  std::mt19937_64 random_;
  std::normal_distribution<double> normal_;
};

}  // namespace heddle::kit
