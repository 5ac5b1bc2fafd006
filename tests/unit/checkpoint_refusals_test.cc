// Layers of checkpoints that are refused: with which sentence, and with nothing written.
#include <cmath>
#include <cstring>
#include <functional>

#include <gtest/gtest.h>

#include "core/dtypes.h"
#include "heddle/checkpoint.h"
#include "heddle/error.h"
#include "unit/checkpoint_files.h"
#include "unit/deep_json.h"

namespace heddle::lowbit {
namespace {

using namespace test;
using heddle::test::nested_arrays;
using heddle::test::nested_objects;

template <class Value>
std::function<void(FileBytes&)> put(const std::string& name, std::int64_t index, Value value) {
  return [=](FileBytes& file) { std::memcpy(file.at(name).data.data() + index * sizeof value, &value, sizeof value); };
}
std::function<void(FileBytes&)> drop(const std::string& name) {
  return [=](FileBytes& file) { file.drop(name); };
}
std::function<void(FileBytes&)> reshape(const std::string& name, std::vector<std::int64_t> shape) {
  return [=](FileBytes& file) { file.at(name).shape = shape; };
}
std::function<void(FileBytes&)> recast(const std::string& name, const std::string& dtype) {
  return [=](FileBytes& file) { file.at(name).dtype = dtype; };
}
std::function<void(FileBytes&)> replace(const std::string& name, const std::string& dtype,
                                        std::vector<std::int64_t> shape, std::size_t bytes) {
  return [=](FileBytes& file) { file.at(name) = {name, dtype, shape, std::string(bytes, '\x11')}; };
}
std::function<void(FileBytes&)> state(const std::string& content) {
  return [=](FileBytes& file) {
    FileBytes::Tensor& tensor = file.at("l.weight.quant_state.bitsandbytes__nf4");
    tensor.data = content;
    tensor.shape = {static_cast<std::int64_t>(content.size())};
  };
}

struct Refused {
  const char* name;
  FileBytes file;
  std::function<void(FileBytes&)> change;
  const char* message;
  bool values = false;  // seen when the layer is loaded, not before
};
void PrintTo(const Refused& refused, std::ostream* out) { *out << refused.name; }

class RefusedLayer : public testing::TestWithParam<Refused> {};

TEST_P(RefusedLayer, IsNamedWithItsReasonAndNothingIsWritten) {
  FileBytes bytes = GetParam().file;
  const Opened before(bytes, 1);
  const std::string name = before.checkpoint.layers().at(0).name;
  loaded(before.checkpoint, name);  // as it was, it can be
  GetParam().change(bytes);
  const Opened file(bytes, 1);
  const auto expect_message = [&](const std::string& found) {
    EXPECT_NE(found.find(GetParam().message), std::string::npos) << found;
    EXPECT_EQ(found.rfind("[checkpoint] ", 0), 0u) << found;
  };
  if (!GetParam().values) {
    try {
      file.checkpoint.layer(name);
      FAIL() << "accepted";
    } catch (const Error& error) {
      expect_message(error.what());
    }
    for (const StoredLayer& layer : file.checkpoint.layers()) expect_message(layer.refusal);
    return;
  }
  Storage out(file.checkpoint.layer(name));
  const auto untouched = out.memory;
  try {
    file.checkpoint.load(name, out.matrix);
    FAIL() << "accepted";
  } catch (const Error& error) {
    expect_message(error.what());
  }
  EXPECT_EQ(out.memory, untouched);
}

std::vector<Refused> refused_layers() {
  const FileBytes oss = gpt_oss("l.blocks", "l.scales"), nf4 = bitsandbytes("nf4"), nested = bitsandbytes_nested();
  const PlainMatrix m = int4_matrix();
  const FileBytes v1 = gptq(m, 1), ct = compressed_int4(m, true), gemm = awq(m);
  const float nan = std::nanf("");
  return {
      {"oss_rank", oss, reshape("l.blocks", {2, 9, 48}), "'l.blocks' is [2, 9, 48]: it must be [E, N, K/32, 16]"},
      {"oss_block", oss, reshape("l.blocks", {2, 9, 6, 8}), "its last extent must be 16"},
      {"oss_scales", oss, reshape("l.scales", {2, 3, 9}),
       "'l.scales' is [2, 3, 9]: it must be [E, N, K/32] = [2, 9, 3]"},
      {"oss_dtype", oss, recast("l.blocks", "I8"), "'l.blocks' is I8: it must be U8"},
      {"oss_empty", oss, replace("l.blocks", "U8", {2, 0, 3, 16}, 0), "extents from 1 to"},
      {"oss_nan", oss, put<std::uint8_t>("l.scales", 5, 255), "'l.scales', expert 0, row 1, group 2, is 255", true},
      {"modelopt_scale_missing", modelopt(), drop("l.weight_scale"), "'l.weight_scale' is missing"},
      {"modelopt_weight_missing", modelopt(), drop("l.weight"), "'l.weight' is missing"},
      {"modelopt_weight_dtype", modelopt(), recast("l.weight", "F8_E4M3"), "'l.weight' is F8_E4M3: it must be U8"},
      {"modelopt_scale_dtype", modelopt(), recast("l.weight_scale", "U8"), "is U8: it must be F8_E4M3"},
      {"modelopt_scale_shape", modelopt(), reshape("l.weight_scale", {6, 9}), "it must be [N, K/16] = [9, 6]"},
      {"modelopt_odd", modelopt(), replace("l.weight", "U8", {9, 44}, 9 * 44), "K must be a multiple of 16"},
      {"modelopt_global_infinite", modelopt(), put<float>("l.weight_scale_2", 0, INFINITY), "it must be finite"},
      {"modelopt_global_shape", modelopt(), replace("l.weight_scale_2", "F32", {2}, 8), "it must hold one number"},
      {"modelopt_negative_scale", modelopt(), put<std::uint8_t>("l.weight_scale", 7, 0x81),
       "'l.weight_scale', row 1, group 1, is -0.00195312: scales of nvfp4", true},
      {"modelopt_nan_scale", modelopt(), put<std::uint8_t>("l.weight_scale", 0, 0x7f), "row 0, group 0, is nan", true},
      {"modelopt_overflow", modelopt(),
       [](FileBytes& file) {
         put<float>("l.weight_scale_2", 0, 1e36f)(file);
         put<std::uint8_t>("l.weight_scale", 7, 0x7e)(file);
       },
       "'l.weight_scale', row 1, group 1, is 448, times the global scale, 1e+36, inf: scales must be finite", true},
      {"ct_global_missing", compressed_nvfp4(), drop("l.weight_global_scale"), "'l.weight_global_scale' is missing"},
      {"ct_global_zero", compressed_nvfp4(), put<float>("l.weight_global_scale", 0, 0),
       "is 0: scales are divided by it"},
      {"ct_global_nan", compressed_nvfp4(), put<float>("l.weight_global_scale", 0, nan), "is nan: scales are divided"},
      {"ct_global_tiny", compressed_nvfp4(), put<float>("l.weight_global_scale", 0, 1e-45f), "and its inverse too"},
      {"ct_codes_dtype", compressed_nvfp4(), recast("l.weight_packed", "I8"), "it must be U8 or I32"},
      {"mxfp4_scales", compressed_mxfp4(), reshape("l.weight_scale", {27, 1}), "it must be [N, K/32] = [9, 3]"},
      {"mxfp4_nan", compressed_mxfp4(), put<std::uint8_t>("l.weight_scale", 26, 255), "row 8, group 2, is 255", true},
      {"mxfp4_global", compressed_mxfp4(),
       [](FileBytes& file) { file.add<float>("l.weight_global_scale", "F32", {1}, {1}); }, "mxfp4 has no global scale"},
      {"fp4_zero_points", compressed_nvfp4(),
       [](FileBytes& file) { file.add<std::uint8_t>("l.weight_zero_point", "U8", {1}, {1}); },
       "'l.weight_zero_point' is there: nvfp4 and mxfp4 have no zero points"},
      {"bytes_scales", compressed_bytes("I8", 3, 8), reshape("l.weight_scale", {3}),
       "'l.weight_scale' is [3]: it must be [N, 1], one scale a row, = [3, 1]"},
      {"bytes_nan", compressed_bytes("F8_E4M3", 3, 8), put<float>("l.weight_scale", 2, nan), "scales must be finite",
       true},
      {"bytes_nan_code", compressed_bytes("F8_E4M3", 3, 8), put<std::uint8_t>("l.weight", 13, 0xff),
       "'l.weight', row 1, column 5, is nan: codes must be finite", true},
      {"bytes_zero_points", compressed_bytes("I8", 3, 8),
       [](FileBytes& file) {
         file.add<std::int8_t>("l.weight_zero_point", "I8", {3, 1}, {0, 0, 0});
       },
       "storage of 8 bits has no zero points"},
      {"bytes_rank", compressed_bytes("I8", 3, 8), reshape("l.weight", {24}), "'l.weight' is [24]: it must be [N, K]"},
      {"words_shape", compressed_int8_words(3, 9), put<std::int64_t>("l.weight_shape", 1, 13),
       "'l.weight_shape' is [3, 13]"},
      {"int4_eight_bits", ct, put<std::int64_t>("l.weight_shape", 1, 128),
       "it must be [N, 1], one scale a row, = [72, 1]"},
      {"int4_shape", ct, put<std::int64_t>("l.weight_shape", 0, 71), "'l.weight_shape' is [71, 256]"},
      {"int4_shape_missing", ct, drop("l.weight_shape"), "'l.weight_shape' is missing"},
      {"int4_zeros_shape", ct, reshape("l.weight_zero_point", {4, 9}), "it must be [ceil(N/8), K/group] = [9, 4]"},
      {"int4_zeros_dtype", ct, replace("l.weight_zero_point", "I8", {72, 4}, 288), "is I8: it must be I32"},
      {"int4_group", ct, replace("l.weight_scale", "F16", {72, 16}, 72 * 32), "16 columns share a scale"},
      {"int4_uneven", ct, replace("l.weight_scale", "F16", {72, 3}, 72 * 6), "groups must be equally large"},
      {"int4_scale_rows", ct, replace("l.weight_scale", "F16", {71, 4}, 71 * 8), "'l.weight_scale' is [71, 4]"},
      {"int4_scale_infinite", ct, put<std::uint16_t>("l.weight_scale", 6, 0x7c00), "row 1, group 2, is inf", true},
      {"int4_scale_too_fine", ct,
       [](FileBytes& file) {
         file.at("l.weight_scale") = {"l.weight_scale", "F32", {72, 4}, std::string(72 * 16, '\0')};
         put<float>("l.weight_scale", 3, 0.1f)(file);
       },
       "row 0, group 3, is 0.1: storage has float16 scales, which do not hold it exactly", true},
      {"int4_scale_too_large", ct,
       [](FileBytes& file) {
         recast("l.weight_scale", "BF16")(file);
         put<std::uint16_t>("l.weight_scale", 0, f32_to_bf16(1e6f))(file);
       },
       "float16 scales, which do not hold it", true},
      {"bnb_map", nf4, put<float>("l.weight.quant_map", 3, -0.4f), "'l.weight.quant_map'[3] is -0.4: code 3 of nf4"},
      {"bnb_map_nan", nf4, put<float>("l.weight.quant_map", 3, nan), "'l.weight.quant_map'[3] is nan"},
      {"bnb_absmax_shape", nf4, replace("l.weight.absmax", "F32", {14}, 56), "it must be [N K / blocksize] = [15]"},
      {"bnb_absmax_dtype", nf4, recast("l.weight.absmax", "I32"), "is I32: it must be F32 or U8"},
      {"bnb_absmax_infinite", nf4, put<float>("l.weight.absmax", 4, INFINITY), "row 1, group 1, is inf", true},
      {"bnb_codes", nf4, replace("l.weight", "U8", {479, 1}, 479), "has 479 bytes: [N, K] = [5, 192] needs 480"},
      {"bnb_json", nf4, state("{"), "is not a JSON object"},
      {"bnb_json_array", nf4, state(std::string(60000, '[')), "nests arrays and objects more than 64 deep, at byte 64"},
      {"bnb_json_deep", nf4, state(R"({"shape":)" + nested_arrays(32000) + "}"),
       "'l.weight.quant_state.bitsandbytes__nf4' nests arrays and objects more than 64 deep"},
      {"bnb_json_deep_objects", nf4, state(nested_objects(10000)), "more than 64 deep"},
      {"bnb_json_deep_and_long", nf4, state(nested_arrays()), "at most 65536 are read"},
      {"bnb_json_long", nf4, state(std::string(65537, ' ')), "at most 65536"},
      {"bnb_type", nf4, state(R"({"quant_type":"fp4"})"), "it must be nf4, as the tensor's name says"},
      {"bnb_shape", nf4, state(R"({"quant_type":"nf4","shape":[960]})"), "shape is '[960]': it must be [N, K]"},
      {"bnb_extent", nf4, state(R"({"quant_type":"nf4","shape":[-5,192]})"), "shape has '-5'"},
      {"bnb_block", nf4, state(R"({"quant_type":"nf4","shape":[5,192],"blocksize":48})"), "blocksize is 48"},
      {"bnb_no_block", nf4, state(R"({"quant_type":"nf4","shape":[5,192]})"), "blocksize has 'null'"},
      {"bnb_straddling", nf4, state(R"({"quant_type":"nf4","shape":[10,96],"blocksize":64})"),
       "K is 96 and blocksize 64: blocks that go on from one row into the next"},
      {"bnb_nested_missing", nested, drop("l.weight.nested_absmax"), "'l.weight.nested_absmax' is missing"},
      {"bnb_nested_map", nested, reshape("l.weight.nested_quant_map", {16, 16}), "it must be [256]"},
      {"bnb_nested_shape", nested, replace("l.weight.nested_absmax", "F32", {3}, 12), "nested_blocksize)] = [4]"},
      {"bnb_no_offset", nested,
       state(R"({"quant_type":"nf4","shape":[5,192],"blocksize":64,"nested_blocksize":4,"nested_offset":"0"})"),
       "nested_offset is"},
      {"bnb_huge_offset", nested,
       state(R"({"quant_type":"nf4","shape":[5,192],"blocksize":64,"nested_blocksize":4,"nested_offset":1e39})"),
       "nested_offset is '1e+39': it must be a finite number"},
      {"bnb_nested_infinite", nested, put<float>("l.weight.nested_absmax", 1, INFINITY), "row 1, group 1, is", true},
      {"gptq_zeros_missing", v1, drop("l.qzeros"), "'l.qzeros' is missing"},
      {"gptq_scales_missing", v1, drop("l.scales"), "'l.scales' is missing"},
      {"gptq_codes_dtype", v1, recast("l.qweight", "U32"), "'l.qweight' is U32: it must be I32"},
      {"gptq_zeros_shape", v1, reshape("l.qzeros", {9, 4}), "it must be [K/group, N/8] = [4, 9]"},
      {"gptq_eight_bits", v1, replace("l.qzeros", "I32", {4, 18}, 288), "these are codes of 8 bits"},
      {"gptq_neither", v1, replace("l.scales", "F16", {4, 80}, 640), "the second extents must be equal (gptq)"},
      {"gptq_uneven", v1,
       [](FileBytes& file) {
         replace("l.scales", "F16", {3, 72}, 432)(file);
         replace("l.qzeros", "I32", {3, 9}, 108)(file);
       },
       "'l.scales' has 3 groups for K = 256"},
      {"gptq_zero_16", v1, put<std::uint32_t>("l.qzeros", 10, 0xf00),
       "'l.qzeros', row 10, group 1, is stored as 15, a zero point of 16", true},
      {"gptq_g_idx_shape", v1, reshape("l.g_idx", {1, 256}), "'l.g_idx' is [1, 256]: it must be [K] = [256]"},
      {"gptq_g_idx_value", v1, put<std::int32_t>("l.g_idx", 9, 4), "'l.g_idx'[9] is 4: groups are from 0 to 3"},
      {"gptq_g_idx_negative", v1, put<std::int32_t>("l.g_idx", 9, -1), "[9] is -1: groups are from 0 to 3"},
      {"gptq_g_idx_uneven", v1, put<std::int32_t>("l.g_idx", 64, 0), "[64] is 0, the group of 64 columns before"},
      {"awq_zeros", gemm, reshape("l.qzeros", {9, 4}), "it must be [K/group, N/8] = [4, 9]"},
      {"awq_scale_nan", gemm, put<std::uint16_t>("l.scales", 72 + 5, 0x7e00), "row 5, group 1, is nan", true},
      {"two_layouts", v1, [](FileBytes& file) { file.add<float>("l.weight_scale_2", "F32", {}, {1}); },
       "layer 'l' has both 'l.weight_scale_2' and 'l.qweight'"},
  };
}

INSTANTIATE_TEST_SUITE_P(Checkpoint, RefusedLayer, testing::ValuesIn(refused_layers()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace heddle::lowbit
