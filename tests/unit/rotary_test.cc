// apply_rotary against a plain loop in double precision, with guard zones around everything written.
#include "unit/kv_cache_tensors.h"

namespace heddle::kv_cache_tests {
namespace {

TEST(ApplyRotary, AgreesWithDoublePrecision) {
  struct Case {
    std::int64_t B, S, H, D, half;
    std::vector<int> order;
    std::int64_t pad;
  };
  const Case cases[] = {
      {1, 1, 1, 2, 1, {}, 0},
      {2, 5, 3, 64, 32, {}, 0},
      {2, 7, 3, 80, 20, {}, 5},
      {3, 4, 2, 17, 8, {0, 2, 1, 3}, 2},
      {2, 3, 2, 256, 128, {}, 0},
      {1, 6, 4, 32, 16, {3, 1, 0, 2}, 1},
      {2, 9, 2, 33, 0, {0, 1, 2, 3}, 0},
      {2, 40, 4, 128, 64, {}, 0},
  };
  for (const Case& c : cases) {
    for (const DType dtype : kDTypes) {
      for (const bool interleaved : {false, true}) {
        for (const bool wide_tables : {false, true}) {
          SCOPED_TRACE(std::string(name_of(dtype)) + " D " + std::to_string(c.D) + (interleaved ? " interleaved" : ""));
          const Tables tables(wide_tables ? DType::f32 : dtype, 120, c.half, {1, 0});
          Tensor x(dtype, {c.B, c.S, c.H, c.D}, c.order, c.pad), out(dtype, {c.B, c.S, c.H, c.D}, {2, 0, 1, 3}, 1);
          x.randomize(7);
          std::vector<std::int32_t> offsets;
          for (std::int64_t b = 0; b < c.B; ++b) offsets.push_back(static_cast<std::int32_t>(11 * (c.B - b)) - 4);
          const Tensor before = x;
          apply_rotary(x.view(), out.view(), tables.rotary(interleaved), {.offsets = indices(offsets)});
          EXPECT_EQ(x.bytes(), before.bytes());
          EXPECT_TRUE(out.guards_intact());
          out.for_each([&](const auto& n) {
            const auto row = [&](std::int64_t d) { return before.get({n[0], n[1], n[2], d}); };
            expect_near(out, n, rotated(row, tables, c.half, interleaved, offsets[n[0]] + n[1], n[3]));
          });
          apply_rotary(x.view(), x.view(), tables.rotary(interleaved), {.offsets = indices(offsets)});
          EXPECT_TRUE(x.guards_intact());
          x.for_each([&](const auto& n) { ASSERT_EQ(x.get(n), out.get(n)); });
        }
      }
    }
  }
}

TEST(ApplyRotary, StartsAtZeroWithoutOffsetsAndKeepsTheBitsOfTheRest) {
  const Tables tables(DType::f32, 3, 2);
  Tensor x(DType::f16, {1, 3, 1, 8}), out(DType::f16, {1, 3, 1, 8});
  x.randomize(3);
  auto* bits = static_cast<std::uint16_t*>(x.view().data);
  bits[6] = 0x7d01;  // a signalling NaN behind the rotated dimensions
  apply_rotary(x.view(), out.view(), tables.rotary(false), {}, {});
  EXPECT_EQ(static_cast<std::uint16_t*>(out.view().data)[6], 0x7d01);
  for (std::int64_t i = 0; i < 3; ++i) {
    const auto row = [&](std::int64_t d) { return x.get({0, i, 0, d}); };
    for (std::int64_t d = 0; d < 4; ++d) expect_near(out, {0, i, 0, d}, rotated(row, tables, 2, false, i, d));
  }
}

TEST(ApplyRotary, DoesNotDependOnTheThreads) {
  const Tables tables(DType::f32, 4096, 32);
  Tensor x(DType::bf16, {2, 2048, 3, 64}), one(DType::bf16, {2, 2048, 3, 64}), four(DType::bf16, {2, 2048, 3, 64});
  x.randomize(5);
  const auto single = make_thread_pool(1), many = make_thread_pool(4);
  apply_rotary(x.view(), one.view(), tables.rotary(true), {}, {{}, single.get(), nullptr});
  apply_rotary(x.view(), four.view(), tables.rotary(true), {}, {{}, many.get(), nullptr});
  EXPECT_EQ(one.bytes(), four.bytes());
}

TEST(ApplyRotary, RepeatsAndASequenceAloneHasTheBitsThatItHasInABatch) {
  for (const DType dtype : kDTypes) {
    const Tables tables(DType::f32, 60, 17);
    Tensor x(dtype, {3, 7, 3, 41}), out(dtype, {3, 7, 3, 41}), again(dtype, {3, 7, 3, 41});
    x.randomize(6);
    const std::vector<std::int32_t> offsets = {11, 0, 29};
    apply_rotary(x.view(), out.view(), tables.rotary(false), {.offsets = indices(offsets)});
    apply_rotary(x.view(), again.view(), tables.rotary(false), {.offsets = indices(offsets)});
    EXPECT_EQ(out.bytes(), again.bytes()) << name_of(dtype);
    for (std::int64_t b = 0; b < 3; ++b) {
      Tensor one(dtype, {1, 7, 3, 41});
      one.for_each([&](const auto& n) { one.set(n, static_cast<float>(x.get({b, n[1], n[2], n[3]}))); });
      const std::vector<std::int32_t> offset = {offsets[static_cast<std::size_t>(b)]};
      apply_rotary(one.view(), one.view(), tables.rotary(false), {.offsets = indices(offset)});
      one.for_each([&](const auto& n) { ASSERT_EQ(one.get(n), out.get({b, n[1], n[2], n[3]})) << name_of(dtype); });
    }
  }
}

TEST(ApplyRotary, EveryTargetWritesTheSameBits) {
  for (const DType dtype : kDTypes) {
    const Tables tables(dtype, 40, 33);
    Tensor x(dtype, {2, 7, 3, 71}), first(dtype, {2, 7, 3, 71});
    x.randomize(9);
    for (std::int64_t i = 0; i < 71; ++i) x.set({1, 2, 0, i}, std::ldexp(1.0f, static_cast<int>(-i)));  // to subnormal
    x.set({0, 1, 0, 3}, std::numeric_limits<float>::infinity());
    apply_rotary(x.view(), first.view(), tables.rotary(false), {}, {});
    for (const std::string& target : cpu_targets()) {
      set_cpu_target(target);
      Tensor out(dtype, {2, 7, 3, 71});
      apply_rotary(x.view(), out.view(), tables.rotary(false), {}, {});
      EXPECT_EQ(out.bytes(), first.bytes()) << name_of(dtype) << " on " << target;
    }
    set_cpu_target("");
  }
}

TEST(ApplyRotary, AcceptsEmptyTensors) {
  const Tables tables(DType::f32, 4, 4);
  for (const auto& shape : {std::vector<std::int64_t>{0, 3, 2, 8}, {2, 0, 2, 8}, {2, 3, 0, 8}}) {
    Tensor x(DType::f32, shape), out(DType::f32, shape);
    apply_rotary(x.view(), out.view(), tables.rotary(false), {}, {});
    EXPECT_TRUE(out.guards_intact());
  }
}

TEST(ApplyRotary, RefusesBadArgumentsAndWritesNothing) {
  const Tables tables(DType::f32, 16, 4);
  Tensor x(DType::bf16, {2, 5, 2, 8}), out(DType::bf16, {2, 5, 2, 8});
  const Tensor before = out;
  const Rotary rotary = tables.rotary(false);
  const auto refused = [&](const TensorView& from, const TensorView& to, const Rotary& r,
                           const std::vector<std::int32_t>& offsets) {
    return message([&] { apply_rotary(from, to, r, {.offsets = indices(offsets)}); });
  };
  EXPECT_EQ(refused(x.view(), out.view(), rotary, {0, -3}), "[apply_rotary] offsets[1] is -3: it must be at least 0");
  EXPECT_EQ(refused(x.view(), out.view(), rotary, {12, 0}),
            "[apply_rotary] offsets[0] is 12: with 5 rows sequence 0 ends at position 17, and cos's rows number 16");
  EXPECT_EQ(refused(x.view(), out.view(), rotary, {0, 2147483647}),
            "[apply_rotary] offsets[1] is 2147483647: with 5 rows sequence 1 ends at position 2147483652, and cos's "
            "rows number 16");
  EXPECT_EQ(refused(x.view(), out.view(), rotary, {0, 0, 0}), "[apply_rotary] offsets has 3 entries: it must have 2");
  EXPECT_SAYS(refused(x.view(), out.view(), Tables(DType::f16, 16, 4).rotary(false), {0, 0}),
              "cos is float16: it must be float32 or x's dtype, bfloat16");
  EXPECT_SAYS(refused(x.view(), out.view(), Tables(DType::f32, 16, 5).rotary(false), {0, 0}),
              "R must be at most x's head size, 8");
  EXPECT_SAYS(refused(x.view(), out.view(), {rotary.cos, {}, false}, {0, 0}), "sin is missing");
  EXPECT_SAYS(refused(x.view(), out.view(), {rotary.cos, Tables(DType::f32, 15, 4).sin.view(), false}, {0, 0}),
              "sin is [15, 4]: it must have the shape of cos, [16, 4]");
  EXPECT_SAYS(refused(x.view(), Tensor(DType::f32, {2, 5, 2, 8}).view(), rotary, {0, 0}),
              "out is float32: it must have x's dtype, bfloat16");
  EXPECT_SAYS(refused(x.view(), Tensor(DType::bf16, {2, 5, 2, 9}).view(), rotary, {0, 0}),
              "out is [2, 5, 2, 9]: it must have the shape of x, [2, 5, 2, 8]");
  TensorView shifted = out.view(), broadcast = out.view();
  shifted.data = static_cast<std::uint16_t*>(shifted.data) + 8;
  EXPECT_SAYS(refused(out.view(), shifted, rotary, {0, 0}), "out shares memory with x");
  broadcast.stride[2] = 0;
  EXPECT_SAYS(refused(x.view(), broadcast, rotary, {0, 0}), "out is an output whose elements overlap");
  EXPECT_EQ(out.bytes(), before.bytes());
}

}  // namespace
}  // namespace heddle::kv_cache_tests
