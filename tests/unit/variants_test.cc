// The tables of instantiations (cuda/common/variants.h): what the device's side says of each row is of that row.
#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "cuda/any/attention_baseline/variants.h"
#include "cuda/any/attention_int8_qk/variants.h"
#include "cuda/any/naive_attention/variants.h"
#include "cuda/sm80/attention_bwd/variants.h"
#include "cuda/sm80/attention_decode/variants.h"
#include "cuda/sm80/attention_fwd/variants.h"
#include "cuda/sm80/linear/variants.h"
#include "cuda/sm80/linear_gemv/variants.h"
#include "cuda/sm80/select_blocks/variants.h"
#include "cuda/sm80/sparse_bwd/variants.h"
#include "cuda/sm80/sparse_fwd/variants.h"
#include "cuda/sm90/attention_bwd/variants.h"
#include "cuda/sm90/attention_decode/variants.h"
#include "cuda/sm90/attention_fwd/variants.h"
#include "cuda/sm90/attention_fwd_fp8/variants.h"
#include "cuda/sm90/linear_w4a16/variants.h"
#include "cuda/sm90/linear_w4a8/variants.h"
#include "cuda/sm90/nsa_step/variants.h"
#include "cuda/sm90/select_blocks/variants.h"
#include "cuda/sm90/sparse_fwd/variants.h"

namespace heddle::cuda {
namespace {

// kernels(variant): what it has to start, in a list.
template <class Get, std::size_t kTypes, class Row, std::size_t kRows, class Kernels>
void expect_rows(const char* folder, Get get, const DType (&types)[kTypes], const Row (&rows)[kRows], Kernels kernels) {
  for (const DType type : types) {
    SCOPED_TRACE(testing::Message() << folder << " for " << name_of(type));
    const auto variants = get(type);
    ASSERT_EQ(variants.size(), kRows);
    for (std::size_t i = 0; i < kRows; ++i) {
      EXPECT_EQ(variants[i].name, rows[i].name);
      EXPECT_EQ(variants[i].type, type) << rows[i].name;
      for (const auto& kernel : kernels(variants[i])) EXPECT_NE(kernel.launch, nullptr) << rows[i].name;
    }
  }
  EXPECT_TRUE(get(DType::i32).empty()) << folder;
}

constexpr auto kOne = [](const auto& v) { return std::array{v}; };

TEST(Variants, OfHopper) {
  {
    using namespace sm90::attention_fwd;
    expect_rows("sm90/attention_fwd", variants, kTypes, kVariants, kOne);
  }
  {
    using namespace sm90::attention_fwd_fp8;
    expect_rows("sm90/attention_fwd_fp8", variants, kTypes, kVariants, kOne);
  }
  {
    using namespace sm90::attention_bwd;
    expect_rows("sm90/attention_bwd", variants, kTypes, kVariants, kOne);
  }
  {
    using namespace sm90::attention_decode;
    expect_rows("sm90/attention_decode", variants, k16BitTypes, k16BitVariants, kOne);
    expect_rows("sm90/attention_decode", variants, kE4m3Types, kE4m3Variants, kOne);
  }
  {
    using namespace sm90::linear_w4a16;
    expect_rows("sm90/linear_w4a16", variants, kTypes, kVariants, kOne);
  }
  {
    using namespace sm90::linear_w4a8;
    expect_rows("sm90/linear_w4a8", variants, kTypes, kVariants, [](const auto& v) { return std::array{v.fragment}; });
    expect_rows("sm90/linear_w4a8", variants, kTypes, kVariants, [](const auto& v) { return std::array{v.scaled}; });
  }
  {
    using namespace sm90::select_blocks;
    expect_rows("sm90/select_blocks", variants, kTypes, kVariants, kOne);
  }
  {
    using namespace sm90::sparse_fwd;
    expect_rows("sm90/sparse_fwd", variants, kTypes, kVariants, kOne);
  }
  {
    using namespace sm90::nsa_step;
    expect_rows("sm90/nsa_step", variants, kTypes, kVariants, kOne);
  }
}

TEST(Variants, OfAmpere) {
  {
    using namespace sm80::attention_fwd;
    const auto kernels = [](const Variants& v) {
      return v.int8_qk ? std::vector{v.plain} : std::vector{v.plain, v.options, v.strided};
    };
    expect_rows("sm80/attention_fwd", variants, k16BitTypes, k16BitVariants, kernels);
    expect_rows("sm80/attention_fwd", variants, kF32Types, kF32Variants, kernels);
  }
  {
    using namespace sm80::attention_bwd;
    const auto kernels = [](const Variants& v) { return std::array{v.large, v.plain, v.options, v.everywhere}; };
    expect_rows("sm80/attention_bwd", variants, k16BitTypes, k16BitVariants, kernels);
    expect_rows("sm80/attention_bwd", variants, kF32Types, kF32Variants, kernels);
  }
  {
    using namespace sm80::attention_decode;
    expect_rows("sm80/attention_decode", variants, kTypes, kVariants, kOne);
  }
  const auto few_and_many = [](const auto& v) { return std::array{v.few, v.many}; };
  {
    using namespace sm80::linear;
    expect_rows("sm80/linear", variants, kTypes, kVariants, few_and_many);
  }
  {
    using namespace sm80::linear_gemv;
    expect_rows("sm80/linear_gemv", variants, kTypes, kVariants, few_and_many);
  }
  {
    using namespace sm80::select_blocks;
    expect_rows("sm80/select_blocks", variants, kTypes, kVariants, kOne);
  }
  {
    using namespace sm80::sparse_bwd;
    expect_rows("sm80/sparse_bwd", variants, kTypes, kVariants, kOne);
  }
  {
    using namespace sm80::sparse_fwd;
    expect_rows("sm80/sparse_fwd", variants, kTypes, kVariants, kOne);
  }
}

TEST(Variants, OfAnyGpu) {
  {
    using namespace any::naive_attention;
    expect_rows("any/naive_attention", variants, kTypes, kVariants, kOne);
  }
  {
    using namespace any::attention_baseline;
    expect_rows("any/attention_baseline", variants, kTypes, kVariants, kOne);
  }
  {
    using namespace any::attention_int8_qk;
    expect_rows("any/attention_int8_qk", variants, kTypes, kVariants, kOne);
  }
}

}  // namespace
}  // namespace heddle::cuda
