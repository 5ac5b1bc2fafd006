// Layers of int4 in words of 32 bits: compressed-tensors, GPTQ, AWQ; and those of 8 bits.
#include "checkpoint/reader.h"

namespace heddle::lowbit {
namespace {

// Storage has groups of 32, 64 and 128; scales of larger groups are repeated.
void set_int4(LayerReader& r, Layout layout, std::string reason, std::int64_t rows, std::int64_t columns,
              std::int64_t groups, const FoundTensor& scales, bool zero_points) {
  r.out.layer.layout = layout;
  r.check.require(columns % groups == 0, scales.where, " has ", groups, " groups for K = ", columns,
                  " columns: groups must be equally large");
  const std::int64_t group = columns / groups;
  const std::int64_t stored = group % 128 == 0 ? 128 : group % 64 == 0 ? 64 : 32;
  r.check.require(group % 32 == 0, scales.where, " is ", shape_text(scales.entry->shape), ", so that ", group,
                  " columns share a scale: only multiples of 32 are read");
  r.set(layout, std::move(reason), text("int4_g", stored, zero_points ? "_zp" : ""), rows, columns);
  r.out.repeat = group / stored;
}

ScaleSource float_source(const FoundTensor& scales) {
  const std::string& dtype = scales.entry->dtype;
  return dtype == "F16" ? ScaleSource::f16 : dtype == "BF16" ? ScaleSource::bf16 : ScaleSource::f32;
}

// From the group of each column, if the file has it: nothing where groups lie together, in order; else columns
// sorted by group, those of a group as they come.
void order_columns(LayerReader& r, const char* suffix, std::int64_t groups) {
  const FoundTensor found = r.find(r.name + suffix);
  if (found.entry == nullptr) return;
  r.need(suffix, {"I32", "I64"});
  const std::int64_t columns = r.out.layer.columns, group = columns / groups;
  r.need_shape(found, {columns}, "[K]");
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
    r.check.require(g >= 0 && g < groups, found.where, "[", k, "] is ", g, ": groups are from 0 to ", groups - 1);
    std::int64_t& count = members[static_cast<std::size_t>(g)];
    r.check.require(count < group, found.where, "[", k, "] is ", g, ", the group of ", group,
                    " columns before: groups must be equally large");
    order[static_cast<std::size_t>(g * group + count++)] = static_cast<std::int32_t>(k);
  }
  r.out.layer.column_order = std::move(order);
}

// Codes of 8 bits: storage has one scale a row, and no zero points.
void take_eight_bits(LayerReader& r, Layout layout, std::string reason, const FoundTensor& codes, CodeOrder order,
                     const FoundTensor& scales, std::int64_t rows, std::int64_t columns) {
  r.need_shape(scales, {rows, 1}, "[N, 1], one scale a row,");
  r.refuse(".weight_zero_point", "storage of 8 bits has no zero points");
  r.set(layout, std::move(reason), layout == Layout::compressed_tensors_fp8 ? "fp8_row" : "int8_row", rows, columns);
  r.take(codes, order, scales, float_source(scales), 1);
}

}  // namespace

void read_compressed_tensors_bytes(LayerReader& r) {
  const FoundTensor codes = r.need(".weight", {"I8", "F8_E4M3"});
  const FoundTensor scales = r.need(".weight_scale", {"F32", "F16", "BF16"});
  r.need_rank(codes, 2, "[N, K]");
  const bool fp8 = codes.entry->dtype == "F8_E4M3";
  take_eight_bits(r, fp8 ? Layout::compressed_tensors_fp8 : Layout::compressed_tensors_int8,
                  text("it has .weight of ", codes.entry->dtype, " and .weight_scale"), codes, CodeOrder::plain, scales,
                  codes.entry->shape[0], codes.entry->shape[1]);
}

void read_compressed_tensors_words(LayerReader& r, const FoundTensor& packed) {
  const FoundTensor scales = r.need(".weight_scale", {"F16", "BF16", "F32"});
  const FoundTensor shape = r.need(".weight_shape", {"I64", "I32"});
  r.need_rank(packed, 2, "[N, K/8]");
  r.need_rank(scales, 2, "[N, K/group]");
  r.need_shape(shape, {2}, "the two extents of the weights,");
  std::int64_t extents[2];
  for (int i = 0; i < 2; ++i) {
    extents[i] = shape.entry->dtype == "I64" ? value_at<std::int64_t>(shape.bytes(), i)
                                             : value_at<std::int32_t>(shape.bytes(), i);
  }
  const std::int64_t rows = packed.entry->shape[0], columns = packed.entry->shape[1] * kWordCodes;
  constexpr std::int64_t kWordBytes = 4;
  if (extents[1] != columns && extents[0] == rows && extents[1] > 0 && extents[1] <= kLargestExtent &&
      (extents[1] + kWordBytes - 1) / kWordBytes == packed.entry->shape[1]) {
    return take_eight_bits(r, Layout::compressed_tensors_int8,
                           "it has .weight_packed of int32, four columns of .weight_shape to a word", packed,
                           CodeOrder::words_int8, scales, rows, extents[1]);
  }
  r.check.require(extents[0] == rows && extents[1] == columns, shape.where, " is [", extents[0], ", ", extents[1],
                  "]: it must be [N, K] = [", rows, ", ", columns, "], 8 columns to a word of .weight_packed");
  r.check.require(scales.entry->shape[0] == rows, scales.where, " is ", shape_text(scales.entry->shape),
                  ": it must be [N, K/group], N = ", rows);
  const std::int64_t groups = scales.entry->shape[1];
  const FoundTensor zeros = r.find(r.name + ".weight_zero_point");
  set_int4(r, Layout::compressed_tensors_int4, "it has .weight_packed of int32 and .weight_shape", rows, columns,
           groups, scales, zeros.entry != nullptr);
  if (zeros.entry != nullptr) {
    r.need(".weight_zero_point", {"I32"});
    r.need_shape(zeros, {(rows + kWordCodes - 1) / kWordCodes, groups}, "[ceil(N/8), K/group]");
    r.out.zeros = zeros;
    r.out.zero_order = ZeroOrder::compressed_tensors;
  }
  r.take(packed, CodeOrder::plain, scales, float_source(scales), groups);
  order_columns(r, ".weight_g_idx", groups);
}

void read_gptq_or_awq(LayerReader& r) {
  const FoundTensor codes = r.need(".qweight", {"I32"}), zeros = r.need(".qzeros", {"I32"});
  const FoundTensor scales = r.need(".scales", {"F16", "BF16", "F32"});
  r.need_rank(codes, 2, "int32 words [K/8, N] (gptq) or [K, N/8] (awq)");
  r.need_rank(scales, 2, "[K/group, N]");
  const std::int64_t words = codes.entry->shape[1], rows = scales.entry->shape[1], groups = scales.entry->shape[0];
  r.check.require(words == rows || words * kWordCodes == rows, codes.where, " is ", shape_text(codes.entry->shape),
                  " and scales ", shape_text(scales.entry->shape),
                  ": the second extents must be equal (gptq) or 1 to 8 (awq)");
  const bool gptq = words == rows;
  const std::int64_t columns = codes.entry->shape[0] * (gptq ? kWordCodes : 1);
  r.check.require(rows % kWordCodes == 0, scales.where, " is ", shape_text(scales.entry->shape),
                  ": N must be a multiple of 8, as zero points are packed");
  r.check.require(!gptq || zeros.entry->shape != Shape{groups, rows / 4}, zeros.where, " is ",
                  shape_text(zeros.entry->shape),
                  ", 4 zero points to a word: these are codes of 8 bits, only those of 4 are read");
  r.need_shape(zeros, {groups, rows / kWordCodes}, "[K/group, N/8]");
  set_int4(r, gptq ? Layout::gptq : Layout::awq,
           gptq ? "it has .qweight, whose second extent is that of .scales"
                : "it has .qweight, whose second extent is an eighth of that of .scales",
           rows, columns, groups, scales, true);
  r.out.zeros = zeros;
  r.out.zero_order = gptq ? ZeroOrder::gptq : ZeroOrder::awq;
  r.out.scales_transposed = true;
  r.take(codes, gptq ? CodeOrder::gptq : CodeOrder::awq, scales, float_source(scales), groups);
  if (!gptq) return;
  order_columns(r, ".g_idx", groups);
  r.check.require(r.gptq_version == 1 || r.gptq_version == 2, zeros.where,
                  " holds zero points less 1 in version 1 of gptq and as they are in version 2, and nothing says which "
                  "this is: give the version, or a config.json with its quantization_config beside the file");
  r.out.zero_added = r.gptq_version == 1 ? 1 : 0;
}

}  // namespace heddle::lowbit
