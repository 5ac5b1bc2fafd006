// Layers of nf4 and fp4 by bitsandbytes, whose state is a JSON object in a tensor of bytes.
#include <cmath>
#include <limits>

#include "checkpoint/reader.h"
#include "core/json.h"

namespace heddle::lowbit {
namespace {

using nlohmann::json;

constexpr std::size_t kMaxState = 64 * 1024;

std::string dumped(const json& value) { return value.dump(-1, ' ', true, json::error_handler_t::replace); }

std::int64_t integer(const LayerReader& r, const FoundTensor& state, const char* field, const json& value) {
  const bool fits = value.is_number_unsigned() && value.get<std::uint64_t>() >= 1 &&
                    value.get<std::uint64_t>() <= static_cast<std::uint64_t>(kLargestExtent);
  r.check.require(fits, state.where, ": ", field, " has ", in_quotes(dumped(value)),
                  ": it must be an integer from 1 to 2^31 - 1");
  return value.get<std::int64_t>();
}

// The table that the codes were made with, to the last bits, which divisions on other devices may round otherwise.
void need_map(const LayerReader& r, const FoundTensor& map, bool nf4) {
  r.need_shape(map, {16}, "[16]");
  for (unsigned code = 0; code < 16; ++code) {
    const auto bits = static_cast<std::uint8_t>(code);
    const float wanted = nf4 ? NF4{bits}.value() : FP4Bnb{bits}.value();
    const float found = value_at<float>(map.bytes(), code);
    r.check.require(std::abs(found - wanted) <= std::abs(wanted) * 0x1p-22f, map.where, "[", code, "] is ", found,
                    ": code ", code, " of ", nf4 ? "nf4" : "fp4", " stands for ", wanted);
  }
}

void need_nested(LayerReader& r, const json& fields, const FoundTensor& state, std::int64_t blocks) {
  const FoundTensor map = r.need(".weight.nested_quant_map", {"F32"});
  const FoundTensor absmax = r.need(".weight.nested_absmax", {"F32"});
  r.need_shape(map, {256}, "[256]");
  const std::int64_t block = integer(r, state, "nested_blocksize", fields.value("nested_blocksize", json()));
  r.need_shape(absmax, {(blocks + block - 1) / block}, "[ceil(N K / blocksize / nested_blocksize)]");
  const json offset = fields.value("nested_offset", json());
  r.check.require(offset.is_number() && std::abs(offset.get<double>()) <= std::numeric_limits<float>::max(),
                  state.where, ": nested_offset is ", in_quotes(dumped(offset)), ": it must be a finite number");
  r.out.nested = {map.bytes(), absmax.bytes(), block, static_cast<float>(offset.get<double>())};
}

}  // namespace

void read_bitsandbytes(LayerReader& r) {
  const bool nf4 = r.marker.ends_with("nf4");
  const char* type = nf4 ? "nf4" : "fp4";
  // Codes may travel as another dtype, whose bytes they are ("quant_storage").
  const FoundTensor weight = r.need(".weight", {"U8", "I8", "F16", "BF16", "F32"});
  const FoundTensor absmax = r.need(".weight.absmax", {"F32", "U8"}), map = r.need(".weight.quant_map", {"F32"});
  const FoundTensor state = r.need(r.marker.substr(r.name.size()), {"U8"});
  r.check.require(state.entry->bytes <= kMaxState, state.where, " has ", state.entry->bytes,
                  " bytes: at most 65536 are read");
  const auto* characters = reinterpret_cast<const char*>(state.bytes());
  const json fields = parse_json("checkpoint", state.where, {characters, state.entry->bytes});
  r.check.require(fields.is_object(), state.where, " is not a JSON object");
  const json quant_type = fields.value("quant_type", json());
  r.check.require(quant_type == type, state.where, ": quant_type is ", in_quotes(dumped(quant_type)), ": it must be ",
                  type, ", as the tensor's name says");
  const json shape = fields.value("shape", json());
  r.check.require(shape.is_array() && shape.size() == 2, state.where, ": shape is ", in_quotes(dumped(shape)),
                  ": it must be [N, K]");
  const std::int64_t rows = integer(r, state, "shape", shape[0]), columns = integer(r, state, "shape", shape[1]);
  const std::int64_t block = integer(r, state, "blocksize", fields.value("blocksize", json()));
  r.check.require(block >= 32 && block <= 4096 && (block & (block - 1)) == 0, state.where, ": blocksize is ", block,
                  ": it must be a power of two from 32 to 4096");
  r.check.require(columns % block == 0, state.where, ": K is ", columns, " and blocksize ", block,
                  ": blocks that go on from one row into the next have no place in plain storage, so that K must be "
                  "a multiple of the block");
  r.check.require(weight.entry->bytes == static_cast<std::uint64_t>(rows) * static_cast<std::uint64_t>(columns / 2),
                  weight.where, " has ", weight.entry->bytes, " bytes: [N, K] = [", rows, ", ", columns, "] needs ",
                  rows * (columns / 2));
  const std::int64_t groups = columns / block, blocks = rows * groups;
  r.need_shape(absmax, {blocks}, "[N K / blocksize]");
  need_map(r, map, nf4);
  r.set(Layout::bitsandbytes, text("it has ", r.marker.substr(r.name.size())), text(nf4 ? "nf4_b" : "fp4_bnb_b", block),
        rows, columns);
  if (absmax.entry->dtype == "U8") need_nested(r, fields, state, blocks);
  r.take(weight, CodeOrder::high_first, absmax, absmax.entry->dtype == "U8" ? ScaleSource::nested : ScaleSource::f32,
         groups);
}

}  // namespace heddle::lowbit
