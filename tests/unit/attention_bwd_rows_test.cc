// Where a GPU's backward keeps the statistics of its query rows.
#include "cuda/any/attention_bwd_rows/layout.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace heddle::cuda::any::attention_bwd_rows {
namespace {

struct Packed {
  std::vector<std::int32_t> cu_seqlens;
  AttentionProblem problem;

  explicit Packed(std::vector<std::int32_t> cu) : cu_seqlens(std::move(cu)) {
    problem.B = static_cast<std::int64_t>(cu_seqlens.size()) - 1;
    problem.q_rows = cu_seqlens.back();
    problem.Sq = 1000;
    problem.cu_seqlens_q = {cu_seqlens.data(), true};
  }
};

// What is written of a sequence: [begin, end).
struct Section {
  std::int64_t begin, end;
};
Section section(const AttentionProblem& p, std::int64_t b) {
  const Sequence s = p.sequence(b);
  const std::int64_t begin = first_row(p, b, s);
  return {begin, begin + round_up_to_tile(s.q_rows)};
}

TEST(AttentionBwdRows, PackedSequencesAreApart) {
  std::mt19937 random(1);
  for (int round = 0; round < 2000; ++round) {
    std::vector<std::int32_t> cu = {0};
    for (std::size_t b = 0; b < 1 + random() % 9; ++b) {
      constexpr std::int32_t kLengths[] = {0, 1, 63, 127, 128, 129, 255, 256, 300};
      cu.push_back(cu.back() + kLengths[random() % 9]);
    }
    const Packed packed(cu);
    std::int64_t end = 0;
    for (std::int64_t b = 0; b < packed.problem.B; ++b) {
      const Section at = section(packed.problem, b);
      ASSERT_EQ(at.begin % kRowTile, 0);
      ASSERT_GE(at.begin, end);
      end = at.end;
    }
    ASSERT_LE(end, rows_per_head(packed.problem));
  }
}

// On a GPU nobody has looked at cu_seqlens before: whatever it holds, no row outside is named.
TEST(AttentionBwdRows, UncheckedLengthsStayInside) {
  std::mt19937 random(2);
  for (int round = 0; round < 2000; ++round) {
    std::vector<std::int32_t> cu(2 + random() % 9);
    for (std::int32_t& x : cu) x = static_cast<std::int32_t>(random() % 3000) - 1000;
    cu.back() = 500;
    const Packed packed(cu);
    for (std::int64_t b = 0; b < packed.problem.B; ++b) {
      const Section at = section(packed.problem, b);
      ASSERT_GE(at.begin, 0);
      ASSERT_LE(at.end, rows_per_head(packed.problem));
    }
  }
}

// Each row of each head has 16-byte pieces of its own, inside of what is set aside.
TEST(AttentionBwdRows, RoundedGradientsOfOLieApart) {
  Packed packed({0, 3, 3, 10});
  AttentionProblem batched;
  batched.B = 3;
  batched.Sq = batched.q_rows = 5;
  for (AttentionProblem p : {packed.problem, batched}) {
    p.H = 2;
    p.Dv = 37;
    p.dtype = DType::bf16;
    EXPECT_EQ(rounded_d_o_bytes(p), 0);
    p.float32_out = true;
    const std::int64_t bytes = rounded_d_o_bytes(p);
    std::vector<std::byte> memory(static_cast<std::size_t>(bytes));
    const Operand x = rounded_d_o(p, memory.data());
    std::vector<bool> taken(static_cast<std::size_t>(bytes));
    for (std::int64_t b = 0; b < p.B; ++b) {
      const Sequence s = p.sequence(b);
      for (std::int64_t i = 0; i < s.q_rows; ++i) {
        for (std::int64_t h = 0; h < p.H; ++h) {
          const std::int64_t from = x.at(b, s.q_begin + i, h) - memory.data();
          ASSERT_EQ(from % 16, 0);
          for (std::int64_t n = from; n < from + 2 * p.Dv; ++n) {
            ASSERT_FALSE(taken.at(static_cast<std::size_t>(n)));
            taken[static_cast<std::size_t>(n)] = true;
          }
        }
      }
    }
  }
}

TEST(AttentionBwdRows, BatchedSequencesBeginAtTiles) {
  AttentionProblem p;
  p.B = 3;
  p.Sq = p.q_rows = 130;
  EXPECT_EQ(rows_per_head(p), 3 * 256);
  EXPECT_EQ(first_row(p, 2, p.sequence(2)), 512);
  p.Sq = p.q_rows = 128;
  EXPECT_EQ(rows_per_head(p), 3 * 128);
}

}  // namespace
}  // namespace heddle::cuda::any::attention_bwd_rows
