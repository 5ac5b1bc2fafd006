// Any bytes: SafeTensors::parse refuses them with Error, or every byte of every tensor it lists can be read.
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "heddle/error.h"
#include "heddle/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    const heddle::SafeTensors file = heddle::SafeTensors::parse(data, size);
    std::size_t covered = 0;
    volatile unsigned sum = 0;
    for (const auto& [name, entry] : file.entries()) {
      const auto* bytes = static_cast<const std::uint8_t*>(entry.data);
      for (std::size_t i = 0; i < entry.bytes; ++i) sum = sum + bytes[i];
      covered += entry.bytes;
      try {
        const heddle::TensorView view = file.tensor(name);
        if (view.elements() * heddle::size_of(view.dtype) != entry.bytes) std::abort();
      } catch (const heddle::Error&) {
      }
    }
    if (covered > size) std::abort();
  } catch (const heddle::Error&) {
  }
  return 0;
}
