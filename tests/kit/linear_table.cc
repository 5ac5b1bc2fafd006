#include "kit/linear_table.h"

#include <algorithm>
#include <iterator>

#include "core/check.h"

namespace heddle::kit {
namespace {

// Of most cases so many that N and K alone, as large as gradients of a bias and of a norm are, are not few.
constexpr std::int64_t kRowsOfW[] = {1, 16, 143, 144, 146, 147, 130};

// Tails of vectors and of bytes for row formats; one, an odd number of and many groups, beyond a block, else.
std::vector<std::int64_t> columns_of(const std::string& format, std::vector<std::int64_t> of_rows, std::int64_t most) {
  const std::int64_t group = lowbit::format_named(format).group;
  if (group == 0) return of_rows;
  const std::int64_t odd = std::max<std::int64_t>(kFewRows / group, 2) | 1;
  return {group, odd * group, std::max<std::int64_t>(most / group, 1) * group};
}

// Row `turn` of a table, each dtype's third: what both passes take in the same turn.
LinearCase case_of(const std::string& format, std::int64_t M, DType dtype, const std::vector<std::int64_t>& columns,
                   std::uint32_t turn) {
  LinearCase c;
  c.format = format;
  c.rows = turn % 3 == 0 ? std::vector<std::int64_t>{M} : std::vector<std::int64_t>{M, 1, 1};
  if (M == 16) c.rows = {2, 4, 2};
  c.dtype = dtype;
  c.activation = kActivations[turn % std::size(kActivations)];
  c.N = kRowsOfW[turn % std::size(kRowsOfW)];
  if (c.activation == Activation::swiglu) c.N += c.N % 2;
  c.K = columns[(turn + turn / 3) % columns.size()];  // each with every dtype
  c.bias = turn % 2 == 0;
  c.layout = turn % 4 < 2 ? Layout::padded_rows : turn % 4 == 2 ? Layout::heads_first : Layout::contiguous;
  c.seed = turn + 1;
  return c;
}

std::string name_of_case(const LinearCase& c, std::int64_t M) {
  return text("linear_", c.format, "_m", M, "_",
              c.dtype == DType::f32   ? "f32"
              : c.dtype == DType::f16 ? "f16"
                                      : "bf16");
}

}  // namespace

std::vector<NamedLinearCase> linear_forward_cases(const std::string& format) {
  const std::vector<std::int64_t> columns = columns_of(format, {1, 7, 33, 128, 301}, 320);
  std::vector<NamedLinearCase> out;
  std::uint32_t turn = 0;
  for (const std::int64_t M : {1, 2, 3, 4, 7, 8, 9, 16, 33, 130}) {
    for (const DType dtype : kDtypes) {
      LinearCase c = case_of(format, M, dtype, columns, turn);
      if (M == 1 && turn % 2 == 1) c.rows.clear();
      c.residual = turn % 3 != 0;
      c.in_place = turn % 3 == 2;
      out.push_back({name_of_case(c, M), c});
      ++turn;
    }
  }
  return out;
}

std::vector<NamedLinearCase> linear_backward_cases(const std::string& format) {
  // Of a few dozen 16-bit elements the plain computation's largest error is small by chance once in a hundred cases,
  // and with it what the rule allows: so 33 columns or more, or one, where little is rounded.
  const std::vector<std::int64_t> columns = columns_of(format, {1, 39, 133, 128, 301}, 256);
  std::vector<NamedLinearCase> out;
  std::uint32_t turn = 0;
  for (const std::int64_t M : {1, 2, 8, 9, 16, 17, 33, 130}) {
    for (const DType dtype : kDtypes) {
      LinearCase c = case_of(format, M, dtype, columns, turn);
      c.norm = kNorms[turn / 2 % 5 % 3];
      out.push_back({name_of_case(c, M), c});
      ++turn;
    }
  }
  return out;
}

}  // namespace heddle::kit
