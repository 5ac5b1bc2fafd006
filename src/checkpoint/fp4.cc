// Layers of mxfp4 and nvfp4: the bytes of codes and scales are those of plain storage.
#include <cmath>

#include "checkpoint/reader.h"

namespace heddle::lowbit {
namespace {

// Codes [N, K/2] and scales [N, K/16]: K.
std::int64_t nvfp4_columns(const LayerReader& r, const FoundTensor& codes, const FoundTensor& scales) {
  r.need_rank(codes, 2, "[N, K/2]");
  const std::int64_t bytes = codes.entry->shape[1];
  r.check.require(bytes % 8 == 0, codes.where, " is ", shape_text(codes.entry->shape), ", K = ", 2 * bytes,
                  ": K must be a multiple of 16");
  r.need_shape(scales, {codes.entry->shape[0], bytes / 8}, "[N, K/16]");
  return 2 * bytes;
}

}  // namespace

void read_gpt_oss(LayerReader& r) {
  const bool dotted = r.marker.ends_with(".blocks");
  const FoundTensor blocks = r.need(dotted ? ".blocks" : "_blocks", {"U8"});
  const FoundTensor scales = r.need(dotted ? ".scales" : "_scales", {"U8", "F8_E8M0"});
  r.need_rank(blocks, 4, "[E, N, K/32, 16]");
  const Shape& shape = blocks.entry->shape;
  r.check.require(shape[3] == 16, blocks.where, " is ", shape_text(shape),
                  ": its last extent must be 16, the bytes of a block");
  r.need_shape(scales, {shape[0], shape[1], shape[2]}, "[E, N, K/32]");
  r.set(Layout::gpt_oss_mxfp4, "it has blocks of 16 bytes and scales", "mxfp4", shape[1], shape[2] * 32);
  r.out.layer.experts = shape[0];
  r.out.layer.gate_up_interleaved = r.name.ends_with("mlp1_weight") || r.name.ends_with("gate_up_proj");
  r.take(blocks, CodeOrder::plain, scales, ScaleSource::e8m0, shape[2]);
}

void read_modelopt(LayerReader& r) {
  const FoundTensor weight = r.need(".weight", {"U8"}), scales = r.need(".weight_scale", {"F8_E4M3"});
  const FoundTensor global = r.need(".weight_scale_2", {"F32"});
  const std::int64_t columns = nvfp4_columns(r, weight, scales);
  r.set(Layout::modelopt_nvfp4, "it has .weight_scale_2, by which the scales are multiplied", "nvfp4",
        weight.entry->shape[0], columns);
  const float value = r.need_scalar(global);
  r.check.require(value >= 0 && std::isfinite(value), global.where, " is ", value,
                  ": it must be finite and at least 0");
  r.out.global_scale = value;
  r.take(weight, CodeOrder::plain, scales, ScaleSource::e4m3, columns / 16);
}

void read_compressed_tensors(LayerReader& r) {
  const FoundTensor packed = r.need(".weight_packed", {"U8", "I32"});
  if (packed.entry->dtype == "I32") return read_compressed_tensors_words(r, packed);
  const FoundTensor scales = r.need(".weight_scale", {"F8_E4M3", "U8", "F8_E8M0"});
  r.refuse(".weight_zero_point", "nvfp4 and mxfp4 have no zero points");
  if (scales.entry->dtype == "F8_E4M3") {
    const FoundTensor global = r.need(".weight_global_scale", {"F32"});
    const std::int64_t columns = nvfp4_columns(r, packed, scales);
    r.set(Layout::compressed_tensors_nvfp4,
          "it has .weight_packed of bytes, .weight_scale of E4M3 and .weight_global_scale, by which the scales are "
          "divided",
          "nvfp4", packed.entry->shape[0], columns);
    const float divisor = r.need_scalar(global);
    const float inverse = 1.0f / divisor;
    r.check.require(divisor > 0 && std::isfinite(divisor) && std::isnormal(inverse), global.where, " is ", divisor,
                    ": scales are divided by it, so that it must be positive and finite, and its inverse too");
    r.out.global_scale = inverse;
    r.take(packed, CodeOrder::plain, scales, ScaleSource::e4m3, columns / 16);
    return;
  }
  r.need_rank(packed, 2, "[N, K/2]");
  const Shape& shape = packed.entry->shape;
  r.check.require(shape[1] % 16 == 0, packed.where, " is ", shape_text(shape), ", K = ", 2 * shape[1],
                  ": K must be a multiple of 32");
  r.need_shape(scales, {shape[0], shape[1] / 16}, "[N, K/32]");
  r.refuse(".weight_global_scale", "mxfp4 has no global scale");
  r.set(Layout::compressed_tensors_mxfp4, "it has .weight_packed of bytes and .weight_scale of exponents", "mxfp4",
        shape[0], 2 * shape[1]);
  r.take(packed, CodeOrder::plain, scales, ScaleSource::e8m0, shape[1] / 16);
}

}  // namespace heddle::lowbit
