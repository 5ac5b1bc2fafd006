#pragma once

namespace heddle::kit {

// `out`: 256 ints on the GPU. False if the launch failed.
bool run_planted_race(int* out, void* stream);
bool run_met_unevenly(int* out, void* stream);

}  // namespace heddle::kit
