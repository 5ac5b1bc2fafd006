#include "core/runtime.h"

#include <cstdint>

namespace heddle {

void check_workspace(const Check& check, const Workspace& workspace, std::size_t needed, const char* advice) {
  const std::size_t bytes = workspace.data != nullptr ? workspace.bytes : 0;
  check.require(bytes >= needed, "the workspace has ", bytes, " bytes: this call needs ", needed, "; ", advice);
  check.require(reinterpret_cast<std::uintptr_t>(workspace.data) % 64 == 0,
                "the workspace must be aligned to 64 bytes");
}

}  // namespace heddle
