// What the functions of the layouts share: tensors of one layer, required to be what they must be.
#pragma once

#include <initializer_list>
#include <utility>

#include "checkpoint/layouts.h"
#include "core/check.h"
#include "core/in_quotes.h"
#include "lowbit/formats.h"

namespace heddle::lowbit {

using Shape = std::vector<std::int64_t>;

constexpr std::int64_t kWordCodes = 8;  // codes of 4 bits in an int32

inline std::string shape_text(const Shape& shape) {
  std::string out = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) out += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return out + "]";
}

class LayerReader {
 public:
  const std::string& name;  // of the layer
  const FindTensor& find;
  const int gptq_version;
  LayerSource& out;
  const Check check{"checkpoint"};
  std::string marker;  // the tensor that told the layout

  LayerReader(const std::string& layer, const FindTensor& find_tensor, int version, LayerSource* source)
      : name(layer), find(find_tensor), gptq_version(version), out(*source) {}

  FoundTensor need(const std::string& suffix, std::initializer_list<const char*> dtypes) const {
    const FoundTensor found = find(name + suffix);
    check.require(found.entry != nullptr, "tensor ", in_quotes(name + suffix), " is missing: layer ", in_quotes(name),
                  " needs it beside ", in_quotes(marker));
    std::string known;
    for (const char* dtype : dtypes) {
      if (found.entry->dtype == dtype) return found;
      known += (known.empty() ? "" : " or ") + std::string(dtype);
    }
    throw Error(text("[checkpoint] ", found.where, " is ", found.entry->dtype, ": it must be ", known));
  }
  void refuse(const char* suffix, const char* rule) const {
    const FoundTensor found = find(name + suffix);
    check.require(found.entry == nullptr, found.where, " is there: ", rule);
  }
  void need_rank(const FoundTensor& tensor, std::size_t rank, const char* shape) const {
    const Shape& found = tensor.entry->shape;
    check.require(found.size() == rank, tensor.where, " is ", shape_text(found), ": it must be ", shape);
    for (const std::int64_t extent : found) {
      check.require(extent > 0 && extent <= kLargestExtent, tensor.where, " is ", shape_text(found), ": ", shape,
                    " has extents from 1 to 2^31 - 1");
    }
  }
  void need_shape(const FoundTensor& tensor, const Shape& wanted, const char* letters) const {
    check.require(tensor.entry->shape == wanted, tensor.where, " is ", shape_text(tensor.entry->shape), ": it must be ",
                  letters, " = ", shape_text(wanted));
  }
  float need_scalar(const FoundTensor& tensor) const {
    check.require(tensor.entry->bytes == sizeof(float), tensor.where, " is ", shape_text(tensor.entry->shape),
                  ": it must hold one number");
    return value_at<float>(tensor.bytes(), 0);
  }

  void set(Layout layout, std::string reason, const std::string& format, std::int64_t rows, std::int64_t columns) {
    check.require(columns <= kLargestExtent, "layer ", in_quotes(name), " has K = ", columns,
                  ": it must be at most 2^31 - 1");
    out.layer.layout = layout;
    out.layer.reason = std::move(reason);
    out.layer.format = format_named(format);
    out.layer.rows = rows;
    out.layer.columns = columns;
  }
  void take(const FoundTensor& codes, CodeOrder order, const FoundTensor& scales, ScaleSource source,
            std::int64_t groups) {
    out.codes = codes;
    out.code_order = order;
    out.scales = scales;
    out.scale_source = source;
    out.file_groups = groups;
  }
};

// Each fills reader.out from the tensors beside reader.marker.
void read_gpt_oss(LayerReader& reader);
void read_modelopt(LayerReader& reader);
void read_compressed_tensors(LayerReader& reader);
void read_compressed_tensors_words(LayerReader& reader, const FoundTensor& packed);  // of int32
void read_compressed_tensors_bytes(LayerReader& reader);                             // int8 and fp8 codes as they are
void read_bitsandbytes(LayerReader& reader);
void read_gptq_or_awq(LayerReader& reader);

}  // namespace heddle::lowbit
