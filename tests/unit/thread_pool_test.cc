// Pools of threads: how many may be asked for.
#include <gtest/gtest.h>

#include <climits>
#include <functional>
#include <string>

#include "heddle/error.h"
#include "heddle/runtime.h"

namespace heddle {
namespace {

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was refused";
}

TEST(ThreadPool, RefusesNumbersThatNoMachineWants) {
  const int before = num_threads();
  for (const int threads : {INT_MIN, -1, 0, kMaxThreads + 1, 100'000, INT_MAX}) {
    const std::string rule = " threads is " + std::to_string(threads) + ": it must be from 1 to 4096";
    EXPECT_EQ(refusal([&] { set_num_threads(threads); }), "[set_num_threads]" + rule);
    EXPECT_EQ(refusal([&] { make_thread_pool(threads); }), "[make_thread_pool]" + rule);
  }
  EXPECT_EQ(num_threads(), before);
}

}  // namespace
}  // namespace heddle
