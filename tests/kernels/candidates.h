// Names of tests, and the loop over SIMD targets that all kernel tests share.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "heddle/runtime.h"
#include "kit/run_case.h"

namespace heddle::kit {

// Runs `body` once for each SIMD target of this build and processor, and goes back to the default target.
template <class Body>
void on_each_target(const Body& body) {
  for (const std::string& target : cpu_targets()) {
    SCOPED_TRACE("SIMD target " + target);
    set_cpu_target(target);
    body();
  }
  set_cpu_target("");
}

// The same without Highway's emulation, which takes some fifty times as long: for tests of what calls make of kernels,
// whose results the tables of cases hold on every target.
template <class Body>
void on_each_quick_target(const Body& body) {
  const bool alone = cpu_targets().size() == 1;
  on_each_target([&] {
    if (alone || cpu_target() != "emu128") body();
  });
}

inline std::string case_name(const ::testing::TestParamInfo<AttentionCase>& info) { return info.param.name; }

inline void PrintTo(const AttentionCase& spec, std::ostream* out) { *out << spec.name; }

}  // namespace heddle::kit
