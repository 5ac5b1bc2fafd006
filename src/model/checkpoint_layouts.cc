// What each producer's tensors must be. docs/formats.md says how their bits lie.
#include "model/checkpoint_layouts.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <string_view>

#include <nlohmann/json.hpp>

#include "core/check.h"
#include "lowbit/formats.h"
#include "model/in_quotes.h"

namespace heddle::lowbit {
namespace {

using nlohmann::json;
using Shape = std::vector<std::int64_t>;

constexpr std::string_view kQuantState = ".weight.quant_state.bitsandbytes__";
constexpr std::int64_t kWordCodes = 8;  // codes of 4 bits in an int32
constexpr std::size_t kMaxQuantState = 64 * 1024;

std::string shape_text(const Shape& shape) {
  std::string out = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) out += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return out + "]";
}

template <class Value>
Value value_at(const std::byte* data, std::int64_t index) {
  Value value;
  std::memcpy(&value, data + index * static_cast<std::int64_t>(sizeof value), sizeof value);
  return value;
}

class Describer {
 public:
  Describer(const std::string& name, const FindTensor& find, int gptq_version, LayerSource* out)
      : name_(name), find_(find), gptq_version_(gptq_version), out_(*out) {}

  void run() {
    out_.layer.name = name_;
    std::vector<std::string> markers;
    void (Describer::*describe)() = nullptr;
    const auto mark = [&](const std::string& tensor, void (Describer::*with)()) {
      if (find_(tensor).entry == nullptr) return;
      markers.push_back(tensor);
      describe = with;
    };
    mark(name_ + ".blocks", &Describer::gpt_oss);
    mark(name_ + "_blocks", &Describer::gpt_oss);
    mark(name_ + ".weight_scale_2", &Describer::modelopt);
    mark(name_ + ".weight_packed", &Describer::compressed_tensors);
    mark(name_ + std::string(kQuantState) + "nf4", &Describer::bitsandbytes);
    mark(name_ + std::string(kQuantState) + "fp4", &Describer::bitsandbytes);
    mark(name_ + ".qweight", &Describer::gptq_or_awq);
    if (markers.empty()) {
      const FoundTensor weight = find_(name_ + ".weight");
      check_.require(weight.entry == nullptr, weight.where, " is ", weight.entry ? weight.entry->dtype : "",
                     " without scales: this layer is not in low bits");
      throw Error(text("[checkpoint] no layer ", in_quotes(name_),
                       ": none of its .qweight, .weight_packed, .weight_scale_2, .weight.quant_state.bitsandbytes__nf4 "
                       "or __fp4, .blocks and _blocks is there"));
    }
    check_.require(markers.size() == 1, "layer ", in_quotes(name_), " has both ", in_quotes(markers[0]), " and ",
                   in_quotes(markers[markers.size() - 1]), ": its layout is not clear");
    marker_ = markers[0];
    (this->*describe)();
  }

 private:
  FoundTensor need(const std::string& suffix, std::initializer_list<const char*> dtypes) const {
    const FoundTensor found = find_(name_ + suffix);
    check_.require(found.entry != nullptr, "tensor ", in_quotes(name_ + suffix), " is missing: layer ",
                   in_quotes(name_), " needs it beside ", in_quotes(marker_));
    std::string known;
    for (const char* dtype : dtypes) {
      if (found.entry->dtype == dtype) return found;
      known += (known.empty() ? "" : " or ") + std::string(dtype);
    }
    throw Error(text("[checkpoint] ", found.where, " is ", found.entry->dtype, ": it must be ", known));
  }
  void refuse(const char* suffix, const char* rule) const {
    const FoundTensor found = find_(name_ + suffix);
    check_.require(found.entry == nullptr, found.where, " is there: ", rule);
  }
  void need_rank(const FoundTensor& tensor, std::size_t rank, const char* shape) const {
    const Shape& found = tensor.entry->shape;
    check_.require(found.size() == rank, tensor.where, " is ", shape_text(found), ": it must be ", shape);
    for (const std::int64_t extent : found) {
      check_.require(extent > 0 && extent <= kLargestExtent, tensor.where, " is ", shape_text(found), ": ", shape,
                     " has extents from 1 to 2^31 - 1");
    }
  }
  void need_shape(const FoundTensor& tensor, const Shape& wanted, const char* letters) const {
    check_.require(tensor.entry->shape == wanted, tensor.where, " is ", shape_text(tensor.entry->shape),
                   ": it must be ", letters, " = ", shape_text(wanted));
  }
  float need_scalar(const FoundTensor& tensor) const {
    check_.require(tensor.entry->bytes == sizeof(float), tensor.where, " is ", shape_text(tensor.entry->shape),
                   ": it must hold one number");
    return value_at<float>(tensor.bytes(), 0);
  }

  void set(Layout layout, std::string reason, const char* format, std::int64_t rows, std::int64_t columns) {
    check_.require(columns <= kLargestExtent, "layer ", in_quotes(name_), " has K = ", columns,
                   ": it must be at most 2^31 - 1");
    out_.layer.layout = layout;
    out_.layer.reason = std::move(reason);
    out_.layer.format = format_named(format);
    out_.layer.rows = rows;
    out_.layer.columns = columns;
  }

  void gpt_oss() {
    const bool dotted = marker_.ends_with(".blocks");
    const FoundTensor blocks = need(dotted ? ".blocks" : "_blocks", {"U8"});
    const FoundTensor scales = need(dotted ? ".scales" : "_scales", {"U8", "F8_E8M0"});
    need_rank(blocks, 4, "[E, N, K/32, 16]");
    const Shape& shape = blocks.entry->shape;
    check_.require(shape[3] == 16, blocks.where, " is ", shape_text(shape),
                   ": its last extent must be 16, the bytes of a block");
    need_shape(scales, {shape[0], shape[1], shape[2]}, "[E, N, K/32]");
    set(Layout::gpt_oss_mxfp4, "it has blocks of 16 bytes and scales", "mxfp4", shape[1], shape[2] * 32);
    out_.layer.experts = shape[0];
    out_.layer.gate_up_interleaved = name_.ends_with("mlp1_weight") || name_.ends_with("gate_up_proj");
    take(blocks, CodeOrder::plain, scales, ScaleSource::e8m0, shape[2]);
  }

  void modelopt() {
    const FoundTensor weight = need(".weight", {"U8"}), scales = need(".weight_scale", {"F8_E4M3"});
    const FoundTensor global = need(".weight_scale_2", {"F32"});
    const std::int64_t columns = nvfp4_columns(weight, scales);
    set(Layout::modelopt_nvfp4, "it has .weight_scale_2, by which the scales are multiplied", "nvfp4",
        weight.entry->shape[0], columns);
    const float value = need_scalar(global);
    check_.require(value >= 0 && std::isfinite(value), global.where, " is ", value,
                   ": it must be finite and at least 0");
    out_.global_scale = value;
    take(weight, CodeOrder::plain, scales, ScaleSource::e4m3, columns / 16);
  }

  // Codes [N, K/2] and scales [N, K/16]: K.
  std::int64_t nvfp4_columns(const FoundTensor& codes, const FoundTensor& scales) const {
    need_rank(codes, 2, "[N, K/2]");
    const std::int64_t bytes = codes.entry->shape[1];
    check_.require(bytes % 8 == 0, codes.where, " is ", shape_text(codes.entry->shape), ", K = ", 2 * bytes,
                   ": K must be a multiple of 16");
    need_shape(scales, {codes.entry->shape[0], bytes / 8}, "[N, K/16]");
    return 2 * bytes;
  }

  void compressed_tensors() {
    const FoundTensor packed = need(".weight_packed", {"U8", "I32"});
    if (packed.entry->dtype == "I32") return compressed_tensors_int4(packed);
    const FoundTensor scales = need(".weight_scale", {"F8_E4M3", "U8", "F8_E8M0"});
    refuse(".weight_zero_point", "nvfp4 and mxfp4 have no zero points");
    if (scales.entry->dtype == "F8_E4M3") {
      const FoundTensor global = need(".weight_global_scale", {"F32"});
      const std::int64_t columns = nvfp4_columns(packed, scales);
      set(Layout::compressed_tensors_nvfp4,
          "it has .weight_packed of bytes, .weight_scale of E4M3 and .weight_global_scale, by which the scales are "
          "divided",
          "nvfp4", packed.entry->shape[0], columns);
      const float divisor = need_scalar(global);
      const float inverse = 1.0f / divisor;
      check_.require(divisor > 0 && std::isfinite(divisor) && std::isnormal(inverse), global.where, " is ", divisor,
                     ": scales are divided by it, so that it must be positive and finite, and its inverse too");
      out_.global_scale = inverse;
      take(packed, CodeOrder::plain, scales, ScaleSource::e4m3, columns / 16);
      return;
    }
    need_rank(packed, 2, "[N, K/2]");
    const Shape& shape = packed.entry->shape;
    check_.require(shape[1] % 16 == 0, packed.where, " is ", shape_text(shape), ", K = ", 2 * shape[1],
                   ": K must be a multiple of 32");
    need_shape(scales, {shape[0], shape[1] / 16}, "[N, K/32]");
    refuse(".weight_global_scale", "mxfp4 has no global scale");
    set(Layout::compressed_tensors_mxfp4, "it has .weight_packed of bytes and .weight_scale of exponents", "mxfp4",
        shape[0], 2 * shape[1]);
    take(packed, CodeOrder::plain, scales, ScaleSource::e8m0, shape[1] / 16);
  }

  void compressed_tensors_int4(const FoundTensor& packed) {
    const FoundTensor scales = need(".weight_scale", {"F16", "BF16", "F32"});
    const FoundTensor shape = need(".weight_shape", {"I64", "I32"});
    need_rank(packed, 2, "[N, K/8]");
    need_rank(scales, 2, "[N, K/group]");
    need_shape(shape, {2}, "the two extents of the weights,");
    std::int64_t extents[2];
    for (int i = 0; i < 2; ++i) {
      extents[i] = shape.entry->dtype == "I64" ? value_at<std::int64_t>(shape.bytes(), i)
                                               : value_at<std::int32_t>(shape.bytes(), i);
    }
    const std::int64_t rows = packed.entry->shape[0], columns = packed.entry->shape[1] * kWordCodes;
    check_.require(extents[1] != columns / 2, packed.where, " is ", shape_text(packed.entry->shape),
                   " for weights of K = ", extents[1], ": these are codes of 8 bits, only those of 4 are read");
    check_.require(extents[0] == rows && extents[1] == columns, shape.where, " is [", extents[0], ", ", extents[1],
                   "]: it must be [N, K] = [", rows, ", ", columns, "], 8 columns to a word of .weight_packed");
    check_.require(scales.entry->shape[0] == rows, scales.where, " is ", shape_text(scales.entry->shape),
                   ": it must be [N, K/group], N = ", rows);
    const std::int64_t groups = scales.entry->shape[1];
    const FoundTensor zeros = find_(name_ + ".weight_zero_point");
    set_int4(Layout::compressed_tensors_int4, "it has .weight_packed of int32 and .weight_shape", rows, columns, groups,
             scales, zeros.entry != nullptr);
    if (zeros.entry != nullptr) {
      need(".weight_zero_point", {"I32"});
      need_shape(zeros, {(rows + kWordCodes - 1) / kWordCodes, groups}, "[ceil(N/8), K/group]");
      out_.zeros = zeros;
      out_.zero_order = ZeroOrder::compressed_tensors;
    }
    take(packed, CodeOrder::plain, scales, float_source(scales), groups);
    order_columns(".weight_g_idx", groups);
  }

  void bitsandbytes() {
    const bool nf4 = marker_.ends_with("nf4");
    const char* type = nf4 ? "nf4" : "fp4";
    // Codes may travel as another dtype, whose bytes they are ("quant_storage").
    const FoundTensor weight = need(".weight", {"U8", "I8", "F16", "BF16", "F32"});
    const FoundTensor absmax = need(".weight.absmax", {"F32", "U8"}), map = need(".weight.quant_map", {"F32"});
    const FoundTensor state = need(marker_.substr(name_.size()), {"U8"});
    check_.require(state.entry->bytes <= kMaxQuantState, state.where, " has ", state.entry->bytes,
                   " bytes: at most 65536 are read");
    const auto* characters = reinterpret_cast<const char*>(state.bytes());
    const json fields = json::parse(characters, characters + state.entry->bytes, nullptr, false);
    check_.require(fields.is_object(), state.where, " is not a JSON object");
    const json quant_type = fields.value("quant_type", json());
    check_.require(quant_type == type, state.where, ": quant_type is ", in_quotes(dumped(quant_type)), ": it must be ",
                   type, ", as the tensor's name says");
    const json shape = fields.value("shape", json());
    check_.require(shape.is_array() && shape.size() == 2, state.where, ": shape is ", in_quotes(dumped(shape)),
                   ": it must be [N, K]");
    const std::int64_t rows = integer(state, "shape", shape[0]), columns = integer(state, "shape", shape[1]);
    const std::int64_t block = integer(state, "blocksize", fields.value("blocksize", json()));
    check_.require(block >= 32 && block <= 4096 && (block & (block - 1)) == 0, state.where, ": blocksize is ", block,
                   ": it must be a power of two from 32 to 4096");
    check_.require(columns % block == 0, state.where, ": K is ", columns, " and blocksize ", block,
                   ": blocks that go on from one row into the next have no place in plain storage, so that K must be "
                   "a multiple of the block");
    check_.require(weight.entry->bytes == static_cast<std::uint64_t>(rows) * static_cast<std::uint64_t>(columns / 2),
                   weight.where, " has ", weight.entry->bytes, " bytes: [N, K] = [", rows, ", ", columns, "] needs ",
                   rows * (columns / 2));
    const std::int64_t groups = columns / block, blocks = rows * groups;
    need_shape(absmax, {blocks}, "[N K / blocksize]");
    need_map(map, nf4);
    const Format format = format_named(text(nf4 ? "nf4_b" : "fp4_bnb_b", block));
    set(Layout::bitsandbytes, text("it has ", marker_.substr(name_.size())), nf4 ? "nf4" : "fp4_bnb", rows, columns);
    out_.layer.format = format;
    if (absmax.entry->dtype == "U8") need_nested(fields, state, blocks);
    take(weight, CodeOrder::high_first, absmax, absmax.entry->dtype == "U8" ? ScaleSource::nested : ScaleSource::f32,
         groups);
  }

  static std::string dumped(const json& value) { return value.dump(-1, ' ', true, json::error_handler_t::replace); }
  std::int64_t integer(const FoundTensor& state, const char* field, const json& value) const {
    const bool fits = value.is_number_unsigned() && value.get<std::uint64_t>() >= 1 &&
                      value.get<std::uint64_t>() <= static_cast<std::uint64_t>(kLargestExtent);
    check_.require(fits, state.where, ": ", field, " has ", in_quotes(dumped(value)),
                   ": it must be an integer from 1 to 2^31 - 1");
    return value.get<std::int64_t>();
  }

  // The table that the codes were made with, to the last bits, which divisions on other devices may round otherwise.
  void need_map(const FoundTensor& map, bool nf4) const {
    need_shape(map, {16}, "[16]");
    for (unsigned code = 0; code < 16; ++code) {
      const auto bits = static_cast<std::uint8_t>(code);
      const float wanted = nf4 ? NF4{bits}.value() : FP4Bnb{bits}.value();
      const float found = value_at<float>(map.bytes(), code);
      check_.require(std::abs(found - wanted) <= std::abs(wanted) * 0x1p-22f, map.where, "[", code, "] is ", found,
                     ": code ", code, " of ", nf4 ? "nf4" : "fp4", " stands for ", wanted);
    }
  }

  void need_nested(const json& fields, const FoundTensor& state, std::int64_t blocks) {
    const FoundTensor map = need(".weight.nested_quant_map", {"F32"});
    const FoundTensor absmax = need(".weight.nested_absmax", {"F32"});
    need_shape(map, {256}, "[256]");
    const std::int64_t block = integer(state, "nested_blocksize", fields.value("nested_blocksize", json()));
    need_shape(absmax, {(blocks + block - 1) / block}, "[ceil(N K / blocksize / nested_blocksize)]");
    const json offset = fields.value("nested_offset", json());
    check_.require(offset.is_number() && std::isfinite(static_cast<float>(offset.get<double>())), state.where,
                   ": nested_offset is ", in_quotes(dumped(offset)), ": it must be a finite number");
    out_.nested = {map.bytes(), absmax.bytes(), block, static_cast<float>(offset.get<double>())};
  }

  void gptq_or_awq() {
    const FoundTensor codes = need(".qweight", {"I32"}), zeros = need(".qzeros", {"I32"});
    const FoundTensor scales = need(".scales", {"F16", "BF16", "F32"});
    need_rank(codes, 2, "int32 words [K/8, N] (gptq) or [K, N/8] (awq)");
    need_rank(scales, 2, "[K/group, N]");
    const std::int64_t words = codes.entry->shape[1], rows = scales.entry->shape[1], groups = scales.entry->shape[0];
    check_.require(words == rows || words * kWordCodes == rows, codes.where, " is ", shape_text(codes.entry->shape),
                   " and scales ", shape_text(scales.entry->shape),
                   ": the second extents must be equal (gptq) or 1 to 8 (awq)");
    const bool gptq = words == rows;
    const std::int64_t columns = codes.entry->shape[0] * (gptq ? kWordCodes : 1);
    check_.require(rows % kWordCodes == 0, scales.where, " is ", shape_text(scales.entry->shape),
                   ": N must be a multiple of 8, as zero points are packed");
    check_.require(!gptq || zeros.entry->shape != Shape{groups, rows / 4}, zeros.where, " is ",
                   shape_text(zeros.entry->shape),
                   ", 4 zero points to a word: these are codes of 8 bits, only those "
                   "of 4 are read");
    need_shape(zeros, {groups, rows / kWordCodes}, "[K/group, N/8]");
    set_int4(gptq ? Layout::gptq : Layout::awq,
             gptq ? "it has .qweight, whose second extent is that of .scales"
                  : "it has .qweight, whose second extent is an eighth of that of .scales",
             rows, columns, groups, scales, true);
    out_.zeros = zeros;
    out_.zero_order = gptq ? ZeroOrder::gptq : ZeroOrder::awq;
    out_.scales_transposed = true;
    take(codes, gptq ? CodeOrder::gptq : CodeOrder::awq, scales, float_source(scales), groups);
    if (!gptq) return;
    order_columns(".g_idx", groups);
    check_.require(
        gptq_version_ == 1 || gptq_version_ == 2, zeros.where,
        " holds zero points less 1 in version 1 of gptq and as they are in version 2, and nothing says which "
        "this is: give the version, or a config.json with its quantization_config beside the file");
    out_.zero_added = gptq_version_ == 1 ? 1 : 0;
  }

  // Storage has groups of 32, 64 and 128; scales of larger groups are repeated.
  void set_int4(Layout layout, std::string reason, std::int64_t rows, std::int64_t columns, std::int64_t groups,
                const FoundTensor& scales, bool zero_points) {
    out_.layer.layout = layout;
    check_.require(columns % groups == 0, scales.where, " has ", groups, " groups for K = ", columns,
                   " columns: groups must be equally large");
    const std::int64_t group = columns / groups;
    const std::int64_t stored = group % 128 == 0 ? 128 : group % 64 == 0 ? 64 : 32;
    check_.require(group % 32 == 0, scales.where, " is ", shape_text(scales.entry->shape), ", so that ", group,
                   " columns share a scale: only multiples of 32 are read");
    set(layout, std::move(reason), text("int4_g", stored, zero_points ? "_zp" : "").c_str(), rows, columns);
    out_.repeat = group / stored;
  }

  static ScaleSource float_source(const FoundTensor& scales) {
    const std::string& dtype = scales.entry->dtype;
    return dtype == "F16" ? ScaleSource::f16 : dtype == "BF16" ? ScaleSource::bf16 : ScaleSource::f32;
  }

  void take(const FoundTensor& codes, CodeOrder order, const FoundTensor& scales, ScaleSource source,
            std::int64_t groups) {
    out_.codes = codes;
    out_.code_order = order;
    out_.scales = scales;
    out_.scale_source = source;
    out_.file_groups = groups;
  }

  // From the group of each column, if the file has it: nothing where groups lie together, in order; else columns
  // sorted by group, those of a group as they come.
  void order_columns(const char* suffix, std::int64_t groups) {
    const FoundTensor found = find_(name_ + suffix);
    if (found.entry == nullptr) return;
    need(suffix, {"I32", "I64"});
    const std::int64_t columns = out_.layer.columns, group = columns / groups;
    need_shape(found, {columns}, "[K]");
    const auto group_of = [&](std::int64_t k) {
      return found.entry->dtype == "I64" ? value_at<std::int64_t>(found.bytes(), k)
                                         : value_at<std::int32_t>(found.bytes(), k);
    };
    bool sorted = true, unset = true;
    for (std::int64_t k = 0; k < columns; ++k) {
      sorted = sorted && group_of(k) == k / group;
      unset = unset && group_of(k) == -1;
    }
    if (sorted || unset) return;
    std::vector<std::int32_t> order(static_cast<std::size_t>(columns));
    std::vector<std::int64_t> members(static_cast<std::size_t>(groups));
    for (std::int64_t k = 0; k < columns; ++k) {
      const std::int64_t g = group_of(k);
      check_.require(g >= 0 && g < groups, found.where, "[", k, "] is ", g, ": groups are from 0 to ", groups - 1);
      std::int64_t& count = members[static_cast<std::size_t>(g)];
      check_.require(count < group, found.where, "[", k, "] is ", g, ", the group of ", group,
                     " columns before: groups must be equally large");
      order[static_cast<std::size_t>(g * group + count++)] = static_cast<std::int32_t>(k);
    }
    out_.layer.column_order = std::move(order);
  }

  const Check check_{"checkpoint"};
  const std::string& name_;
  const FindTensor& find_;
  const int gptq_version_;
  LayerSource& out_;
  std::string marker_;  // the tensor that told the layout
};

}  // namespace

std::string layer_of_tensor(const std::string& tensor, const FindTensor& find) {
  const auto without = [&](std::string_view suffix) { return tensor.substr(0, tensor.size() - suffix.size()); };
  for (const std::string_view suffix : {".qweight", ".weight_packed", ".weight_scale_2"}) {
    if (tensor.ends_with(suffix)) return without(suffix);
  }
  for (const char* type : {"nf4", "fp4"}) {
    const std::string suffix = std::string(kQuantState) + type;
    if (tensor.ends_with(suffix)) return without(suffix);
  }
  // Others may call a tensor "blocks"; gpt-oss has its scales beside it.
  for (const auto& [blocks, scales] : {std::pair{".blocks", ".scales"}, std::pair{"_blocks", "_scales"}}) {
    if (tensor.ends_with(blocks) && find(without(blocks) + scales).entry != nullptr) return without(blocks);
  }
  return {};
}

void describe_layer(const std::string& name, const FindTensor& find, int gptq_version, LayerSource* out) {
  Describer(name, find, gptq_version, out).run();
}

}  // namespace heddle::lowbit
