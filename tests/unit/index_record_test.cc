// The record of a bad index that a GPU leaves for the host.
#include "problem/index_record.h"

#include <cstdint>

#include <gtest/gtest.h>

#include "problem/index_checks.h"

namespace heddle {
namespace {

// As a kernel writes it, and the host takes it.
TEST(IndexRecord, IsTakenOnce) {
  IndexRecord record;
  EXPECT_EQ(take(record), "");
  const BadIndex bad{.rule = IndexRule::among_pages,
                     .tensor = IndexName::page_table,
                     .whose = IndexName::k,
                     .i = 3,
                     .j = 7,
                     .value = -2147483648,
                     .limit = 6};
  for (int round = 0; round < 3; ++round) {
    ASSERT_EQ(record.written, record.taken);
    record.operation = "attention_forward";
    record.bad = bad;
    record.written = record.taken + 1;
    EXPECT_EQ(take(record),
              "[attention_forward] page_table[3, 7] is -2147483648: it must be from 0 to 5 (k has 6 pages)");
    EXPECT_EQ(take(record), "");
  }
}

// Sequence 0's rows are found by every thread, and the first place wins, whichever thread has it.
TEST(IndexRecord, TheFirstPlaceWins) {
  FirstBadIndex first;
  const auto at = [](std::int64_t b) {
    return BadIndex{.rule = IndexRule::not_negative, .tensor = IndexName::seqlens, .i = b};
  };
  first.note(place_of(CheckStep::written, 5), at(5));
  first.note(place_of(CheckStep::written, 2, 1), at(2));
  first.note(place_of(CheckStep::written, 2), at(1));
  first.note(place_of(CheckStep::written, 9), at(9));
  first.note(place_of(CheckStep::rows, 100), BadIndex{});
  EXPECT_EQ(sentence(first.bad), "seqlens[1] is 0: it must be at least 0");
}

}  // namespace
}  // namespace heddle
