#include "ops/validate.h"

#include <cstdlib>
#include <string_view>

namespace heddle {

bool validates_by_default() {
  static const bool wanted = [] {
    const char* value = std::getenv("HEDDLE_VALIDATE");
    const std::string_view given = value != nullptr ? value : "";
    if (given != "" && given != "0" && given != "1") {
      throw RuntimeError(text("HEDDLE_VALIDATE is '", given, "': it must be 0 or 1"));
    }
    return given == "1";
  }();
  return wanted;
}

std::string last_error(void* stream) {
  cuda::wait_for(stream);
  return cuda::take_bad_index(stream);
}

std::string poll_error(void* stream) { return cuda::take_bad_index(stream); }

}  // namespace heddle
