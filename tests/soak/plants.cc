#include "soak/plants.h"

namespace heddle::cuda {
namespace {

// Made when the first source file registers, whichever it is.
std::vector<void (*)(int)>& setters() {
  static std::vector<void (*)(int)> all;
  return all;
}

}  // namespace

bool register_plants(void (*set)(int plant)) {
  setters().push_back(set);
  return true;
}

}  // namespace heddle::cuda

namespace heddle::soak {

void plant(cuda::Plant what) {
  for (void (*set)(int) : cuda::setters()) set(static_cast<int>(what));
}

bool can_plant() { return !cuda::setters().empty(); }

const std::vector<Proof>& proofs() {
  using cuda::Plant;
  static const char* const kForward = "sm90 forward bfloat16 d128 causal s256";
  static const std::vector<Proof> all = {
      {"q is given back while loads of it are under way", Plant::none,
       "sm90 forward float16 d128 causal s256 one kv head"},
      {"q is read late", Plant::late_query_reads, kForward},
      {"keys are read late", Plant::late_key_reads, kForward},
      {"keys are not waited for, and come late", Plant::unawaited_keys, kForward},
      {"a bias is read late", Plant::late_plane_reads, "sm90 forward bfloat16 d128 s400 bias with rows"},
      {"values are turned over late", Plant::late_key_reads, "sm90_fp8 forward float8_e4m3fn d128 s1024"},
      {"query rows are read late", Plant::late_query_reads, "sm90 backward bfloat16 d128 causal s1024"},
      {"dS is not waited for", Plant::unawaited_gradients, "sm90 backward bfloat16 d128 causal s1024"},
      {"keys are read late", Plant::late_key_reads, "sm90_decode forward bfloat16 d128 s1 of 1024"},
      {"values are read late, by warpgroups", Plant::late_key_reads,
       "sm90_decode forward bfloat16 d128 causal s8 of 1024"},
      {"weights are read late", Plant::late_key_reads, "sm90_w4a16 bfloat16 nvfp4 1 rows of 8192 x 6144"},
      {"weights are read late", Plant::late_key_reads, "sm90_w4a8 bfloat16 mxfp4 40 rows of 8192 x 6144"},
  };
  return all;
}

}  // namespace heddle::soak
