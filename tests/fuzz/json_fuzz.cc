// Any text, from pieces that repeat, so that few bytes make one that is deep or long: the reader of JSON refuses it
// with heddle::Error, or gives a value that can be copied, compared, written and read back. Then as a safetensors
// header.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "bytes.h"
#include "core/json.h"
#include "heddle/error.h"
#include "heddle/safetensors.h"

namespace {

using namespace heddle;
using nlohmann::json;

// A byte for how often (a power of two), one for the length, then the piece.
std::string unfolded(const std::uint8_t* data, std::size_t size) {
  constexpr std::size_t kLongest = std::size_t{1} << 19;
  std::string out;
  fuzz::Bytes bytes(data, size);
  while (!bytes.empty()) {
    const std::size_t times = std::size_t{1} << bytes.below(19);
    std::string piece;
    for (std::int64_t left = bytes.next(); left > 0 && !bytes.empty(); --left) piece += static_cast<char>(bytes.next());
    for (std::size_t i = 0; i < times && out.size() + piece.size() <= kLongest && !piece.empty(); ++i) out += piece;
  }
  return out;
}

int depth(const json& value) {
  int inner = 0;
  for (const json& item : value) {
    if (item.is_structured()) inner = std::max(inner, depth(item));
  }
  return 1 + inner;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string content = unfolded(data, size);
  try {
    const json value = parse_json("fuzz", "text", content), copy = value;
    if (value.is_structured() && depth(value) > kMaxJsonDepth) std::abort();
    if (!value.is_discarded() && (copy != value || parse_json("fuzz", "copy", value.dump(2)) != value)) std::abort();
  } catch (const Error&) {
  }
  std::string file;
  for (int i = 0; i < 8; ++i) file += static_cast<char>(content.size() >> (8 * i));
  file += content;
  try {
    SafeTensors::parse(file.data(), file.size());
  } catch (const Error&) {
  }
  return 0;
}
