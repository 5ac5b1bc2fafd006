// What patterns mean: pair by pair.
#include <algorithm>
#include <array>

#include "patterns/node.h"
#include "problem/philox.h"

namespace heddle {
namespace {

bool holds(const std::vector<std::int64_t>& numbers, std::int64_t number) {
  return std::ranges::binary_search(numbers, number);
}

bool node_keeps(const PatternNode& node, PatternLength length, bool causal, std::int64_t head, std::int64_t p,
                std::int64_t j) {
  const auto part_keeps = [&](const auto& part) { return node_keeps(*part, length, causal, head, p, j); };
  switch (node.kind) {
    case PatternKind::either:
      return std::ranges::any_of(node.parts, part_keeps);
    case PatternKind::both:
      return std::ranges::all_of(node.parts, part_keeps);
    case PatternKind::sink:
      return j < node.numbers[0];
    case PatternKind::columns:
      return holds(node.numbers, j);
    case PatternKind::rows:
      return holds(node.numbers, p);
    case PatternKind::random: {
      const std::int64_t size = node.numbers[1];
      return holds(drawn_blocks(node, length, causal, head, p / size), j / size);
    }
    default:
      return keeps_distance(node, p - j);
  }
}

bool has_random(const PatternNode& node) {
  return node.kind == PatternKind::random ||
         std::ranges::any_of(node.parts, [](const auto& part) { return has_random(*part); });
}

}  // namespace

bool keeps_distance(const PatternNode& node, std::int64_t apart) {
  switch (node.kind) {
    case PatternKind::local:
      return -node.numbers[1] <= apart && apart <= node.numbers[0];
    case PatternKind::strided:
      return apart % node.numbers[0] == 0;
    case PatternKind::dilated:
      return apart % node.numbers[1] == 0 && std::abs(apart) / node.numbers[1] <= node.numbers[0];
    case PatternKind::diagonals:
      return holds(node.numbers, apart);
    default:
      return false;
  }
}

std::vector<std::int64_t> drawn_blocks(const PatternNode& random, PatternLength length, bool causal, std::int64_t head,
                                       std::int64_t row_block) {
  const std::int64_t size = random.numbers[1], seed = random.numbers[2];
  const std::int64_t there = causal ? row_block + 1 : (length.keys + size - 1) / size;
  const std::int64_t count = std::min(random.numbers[0], there);
  std::vector<std::int64_t> drawn;
  // Floyd's sampling: of the blocks up to `last` one, or `last` itself if that one is taken. A draw depends on head,
  // row block and its number alone.
  for (std::int64_t last = there - count; last < there; ++last) {
    const auto number = static_cast<std::uint32_t>(last - (there - count));
    const std::array<std::uint32_t, 4> words =
        philox4x32({number, static_cast<std::uint32_t>(row_block), static_cast<std::uint32_t>(head), 0},
                   static_cast<std::uint32_t>(seed), 0x9A77E125u);
    const auto block =
        static_cast<std::int64_t>((std::uint64_t{words[0]} * static_cast<std::uint64_t>(last + 1)) >> 32);
    const auto at = std::ranges::lower_bound(drawn, block);
    if (at != drawn.end() && *at == block) {
      drawn.push_back(last);  // larger than all before
    } else {
      drawn.insert(at, block);
    }
  }
  return drawn;
}

bool Pattern::by_head() const { return has_random(*node_); }

bool Pattern::keeps(PatternLength length, bool causal, std::int64_t head, std::int64_t i, std::int64_t j) const {
  const std::int64_t p = i + length.keys - length.rows;
  return (!causal || j <= p) && node_keeps(*node_, length, causal, head, p, j);
}

}  // namespace heddle
