// The parts of the case table, a file each; cases.cc joins them and gives every row its dtypes.
#pragma once

#include "kit/cases.h"

namespace heddle::kit {

inline constexpr Extents kFull = {true, true, true, true, true};
inline constexpr Extents kRowsColumns = {true, false, false, true, true};
inline constexpr Extents kHeads = {true, false, true, true, true};
inline constexpr Extents kColumns = {true, false, false, false, true};
inline constexpr Extents kBatchColumns = {true, true, false, false, true};
inline constexpr Extents kRows = {true, true, true, true, false};
inline constexpr Extents kScalar = {true, false, false, false, false};

using Rows = std::vector<AttentionCase>;

void add_round(Rows& rows);
void add_odd(Rows& rows);
void add_corner(Rows& rows);
void add_feature(Rows& rows);
void add_decode(Rows& rows);
void add_e4m3(Rows& rows);
void add_partial(Rows& rows);
void add_steps(Rows& rows);

}  // namespace heddle::kit
