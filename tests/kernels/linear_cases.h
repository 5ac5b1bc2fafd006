// Cases of linear layers, held to double precision on every SIMD target.
#pragma once

#include <cstdint>
#include <string>

#include <gtest/gtest.h>

#include "kernels/candidates.h"
#include "kit/linear_table.h"

namespace heddle::kit {

inline std::string words(const LinearCase& c) {
  std::string rows;
  for (const std::int64_t extent : c.rows) rows += std::to_string(extent) + " ";
  return c.format + " rows " + rows + "N " + std::to_string(c.N) + " K " + std::to_string(c.K) + " " +
         name_of(c.dtype) + " " + name_of(c.activation) + (c.bias ? " bias" : "") + (c.residual ? " residual" : "") +
         (c.int8_x ? " int8 x" : "") + " " + name_of(c.norm) + " mean " + std::to_string(c.x_mean) + " layout " +
         std::to_string(static_cast<int>(c.layout));
}

inline void expect_right(const LinearCase& c) {
  SCOPED_TRACE(words(c));
  const LinearLayer layer(c);
  ASSERT_TRUE(layer.packed.guards_intact());
  EXPECT_EQ(layer.blind_spots(), "");
  on_each_target([&] {
    for (const bool invariant : {false, true}) {
      if (invariant && c.dtype != DType::bf16) continue;
      LinearOptions options = layer.options();
      options.batch_invariant = invariant;
      const Comparison verdict = layer.run(options);
      EXPECT_TRUE(verdict.passed) << verdict.worst << "; error " << verdict.error << ", allowed " << verdict.bound;
    }
  });
}

}  // namespace heddle::kit
