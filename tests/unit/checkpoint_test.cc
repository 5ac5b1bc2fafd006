#include "heddle/checkpoint.h"

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/dtypes.h"
#include "heddle/error.h"
#include "kit/messages.h"
#include "unit/checkpoint_files.h"
#include "unit/deep_json.h"

namespace heddle::lowbit {
namespace {

using namespace test;

template <class Scale>
void expect_holds(const Storage& out, const PlainMatrix& m, bool zero_points = false) {
  ASSERT_EQ(out.matrix.rows, m.N);
  ASSERT_EQ(out.matrix.columns, m.K);
  const std::int64_t group = out.matrix.format.group, groups = m.K / group;
  for (std::int64_t n = 0; n < m.N; ++n) {
    for (std::int64_t k = 0; k < m.K; ++k) ASSERT_EQ(out.code(n, k), m.code(n, k)) << n << ", " << k;
    for (std::int64_t g = 0; g < groups; ++g) {
      ASSERT_EQ(out.at<Scale>(1, n * groups + g), static_cast<Scale>(m.scale(n, g * group / m.group)))
          << n << ", " << g;
      if (zero_points) {
        ASSERT_EQ(out.at<std::uint8_t>(2, n * groups + g), m.zero(n, g * group / m.group)) << n << ", " << g;
      }
    }
  }
}

void expect_layer(const Opened& file, const std::string& name, Layout layout, const std::string& format) {
  const std::vector<StoredLayer> layers = file.checkpoint.layers();
  ASSERT_EQ(layers.size(), 1u);
  EXPECT_EQ(layers[0].name, name);
  EXPECT_EQ(layers[0].refusal, "");
  const StoredLayer layer = file.checkpoint.layer(name);
  EXPECT_EQ(layer.layout, layout) << name_of(layer.layout);
  EXPECT_EQ(name_of(layer.format), format);
  EXPECT_NE(layer.reason, "");
  EXPECT_TRUE(layer.column_order.empty());
}

TEST(Checkpoint, GptOss) {
  const PlainMatrix first = mxfp4_matrix(), second(9, 96, 32, kE8M0[0], kE8M0[1], 2);
  for (const auto& [name, dot] : {std::pair{"block.0.mlp.mlp1_weight", "."}, std::pair{"mlp.experts.gate_up_proj", "_"},
                                  std::pair{"mlp.experts.down_proj", "_"}}) {
    const Opened file(gpt_oss(std::string(name) + dot + "blocks", std::string(name) + dot + "scales"));
    expect_layer(file, name, Layout::gpt_oss_mxfp4, "mxfp4");
    const StoredLayer layer = file.checkpoint.layer(name);
    EXPECT_EQ(layer.experts, 2);
    EXPECT_EQ(layer.gate_up_interleaved, std::string(name).find("down") == std::string::npos);
    expect_holds<std::uint8_t>(loaded(file.checkpoint, name), first);
    expect_holds<std::uint8_t>(loaded(file.checkpoint, name, {.expert = 1}), second);
  }
}

TEST(Checkpoint, ModelOpt) {
  const Opened file(modelopt());
  expect_layer(file, "l", Layout::modelopt_nvfp4, "nvfp4");
  const Storage out = loaded(file.checkpoint, "l");
  expect_holds<std::uint8_t>(out, nvfp4_matrix());
  EXPECT_EQ(out.at<float>(3, 0), 0.37f);
}

TEST(Checkpoint, CompressedTensorsNvfp4DividesByTheGlobalScale) {
  const Opened file(compressed_nvfp4());
  expect_layer(file, "l", Layout::compressed_tensors_nvfp4, "nvfp4");
  const Storage out = loaded(file.checkpoint, "l");
  expect_holds<std::uint8_t>(out, nvfp4_matrix());
  EXPECT_EQ(out.at<float>(3, 0), 1.0f / 7168.0f);
}

TEST(Checkpoint, CompressedTensorsMxfp4) {
  FileBytes bytes = compressed_mxfp4();
  for (const char* dtype : {"U8", "F8_E8M0"}) {
    bytes.at("l.weight_scale").dtype = dtype;
    const Opened file(bytes);
    expect_layer(file, "l", Layout::compressed_tensors_mxfp4, "mxfp4");
    expect_holds<std::uint8_t>(loaded(file.checkpoint, "l"), mxfp4_matrix());
  }
}

TEST(Checkpoint, CompressedTensorsIn8Bits) {
  for (const std::int64_t columns : {1, 3, 4, 7, 8, 32}) {  // no code of which is a NaN of E4M3
    const struct {
      FileBytes file;
      Layout layout;
      const char* format;
    } cases[] = {{compressed_bytes("I8", 5, columns), Layout::compressed_tensors_int8, "int8_row"},
                 {compressed_bytes("F8_E4M3", 5, columns), Layout::compressed_tensors_fp8, "fp8_row"},
                 {compressed_int8_words(5, columns), Layout::compressed_tensors_int8, "int8_row"}};
    for (const auto& [bytes, layout, format] : cases) {
      const Opened file(bytes);
      expect_layer(file, "l", layout, format);
      const Storage out = loaded(file.checkpoint, "l");
      EXPECT_EQ(out.matrix.columns, columns);
      EXPECT_EQ(out.memory[0], byte_codes(5, columns));
      for (std::int64_t n = 0; n < 5; ++n) EXPECT_EQ(out.at<float>(1, n), row_scales(5)[static_cast<std::size_t>(n)]);
    }
  }
}

TEST(Checkpoint, CompressedTensorsInt4) {
  for (const bool zero_points : {false, true}) {
    const PlainMatrix m(13, 128, 32, kF16[0], kF16[1]);  // 13: the last word of zero points is not full
    const Opened file(compressed_int4(m, zero_points));
    expect_layer(file, "l", Layout::compressed_tensors_int4, zero_points ? "int4_g32_zp" : "int4_g32");
    expect_holds<std::uint16_t>(loaded(file.checkpoint, "l"), m, zero_points);
  }
}

TEST(Checkpoint, BitsAndBytes) {
  for (const char* type : {"nf4", "fp4"}) {
    const Opened file(bitsandbytes(type));
    expect_layer(file, "l", Layout::bitsandbytes, type == std::string("nf4") ? "nf4" : "fp4_bnb");
    expect_holds<std::uint32_t>(loaded(file.checkpoint, "l"), bnb_matrix());
  }
  FileBytes as_bf16 = bitsandbytes("nf4");
  as_bf16.at("l.weight").dtype = "BF16";
  as_bf16.at("l.weight").shape = {240, 1};
  expect_holds<std::uint32_t>(loaded(Opened(as_bf16).checkpoint, "l"), bnb_matrix());
}

TEST(Checkpoint, BitsAndBytesNestedAbsmaxIsExpanded) {
  const Opened file(bitsandbytes_nested());
  const Storage out = loaded(file.checkpoint, "l");
  for (int i = 0; i < 15; ++i) {
    const volatile float product = static_cast<float>(17 * i - 128) / 127.3f * (0.1f * static_cast<float>(i / 4 + 1));
    EXPECT_EQ(out.at<float>(1, i), product + 0.0625f) << i;
  }
}

TEST(Checkpoint, Gptq) {
  for (const int version : {1, 2}) {
    for (const std::int64_t group : {32, 64, 128}) {
      const PlainMatrix m = int4_matrix(group);
      const Opened file(gptq(m, version), version);
      expect_layer(file, "l", Layout::gptq, "int4_g" + std::to_string(group) + "_zp");
      expect_holds<std::uint16_t>(loaded(file.checkpoint, "l"), m, true);
    }
  }
  FileBytes without = gptq(int4_matrix(), 2);
  without.drop("l.g_idx");
  expect_holds<std::uint16_t>(loaded(Opened(without, 2).checkpoint, "l"), int4_matrix(), true);
}

TEST(Checkpoint, ScalesOfLargerGroupsAreRepeated) {
  const PlainMatrix m(16, 768, 384, kF16[0], kF16[1]), row(16, 96, 96, kF16[0], kF16[1]);
  const Opened large(gptq(m, 2), 2), whole(compressed_int4(row, true));
  expect_layer(large, "l", Layout::gptq, "int4_g128_zp");
  expect_holds<std::uint16_t>(loaded(large.checkpoint, "l"), m, true);
  expect_layer(whole, "l", Layout::compressed_tensors_int4, "int4_g32_zp");
  expect_holds<std::uint16_t>(loaded(whole.checkpoint, "l"), row, true);
}

TEST(Checkpoint, Awq) {
  const PlainMatrix m = int4_matrix();
  const Opened file(awq(m));
  expect_layer(file, "l", Layout::awq, "int4_g64_zp");
  expect_holds<std::uint16_t>(loaded(file.checkpoint, "l"), m, true);
}

TEST(Checkpoint, ColumnsAreOrderedByTheirGroupIfTheCallerAllowsIt) {
  PlainMatrix m = int4_matrix();
  std::vector<std::int32_t> group_of;
  for (std::int64_t k = 0; k < m.K; ++k) group_of.push_back(static_cast<std::int32_t>(k * 7 % m.groups()));
  FileBytes files[] = {gptq(m, 2), compressed_int4(m, true)};
  std::memcpy(files[0].at("l.g_idx").data.data(), group_of.data(), group_of.size() * 4);
  files[1].add("l.weight_g_idx", "I32", {m.K}, group_of);
  for (const FileBytes& bytes : files) {
    const Opened file(bytes, 2);
    const StoredLayer layer = file.checkpoint.layer("l");
    ASSERT_EQ(layer.column_order.size(), static_cast<std::size_t>(m.K));
    Storage refused(layer);
    EXPECT_THROW(file.checkpoint.load("l", refused.matrix), Error);
    EXPECT_EQ(refused.memory[0][0], 0xcd);
    const Storage out = loaded(file.checkpoint, "l", {.reorder_columns = true});
    std::vector<bool> seen(static_cast<std::size_t>(m.K));
    for (std::int64_t j = 0; j < m.K; ++j) {
      const std::int32_t k = layer.column_order[static_cast<std::size_t>(j)];
      EXPECT_FALSE(seen[static_cast<std::size_t>(k)]);
      seen[static_cast<std::size_t>(k)] = true;
      EXPECT_EQ(group_of[static_cast<std::size_t>(k)], j / m.group);
      for (std::int64_t n = 0; n < m.N; ++n) ASSERT_EQ(out.code(n, j), m.code(n, k));
    }
    for (std::int64_t i = 0; i < m.N * m.groups(); ++i) {
      ASSERT_EQ(out.at<std::uint16_t>(1, i), m.scales[static_cast<std::size_t>(i)]);
      ASSERT_EQ(out.at<std::uint8_t>(2, i), m.zeros[static_cast<std::size_t>(i)]);
    }
  }
  // Unset in compressed-tensors: -1 everywhere.
  files[1].drop("l.weight_g_idx");
  files[1].add("l.weight_g_idx", "I32", {m.K}, std::vector<std::int32_t>(static_cast<std::size_t>(m.K), -1));
  expect_holds<std::uint16_t>(loaded(Opened(files[1]).checkpoint, "l"), m, true);
}

TEST(Checkpoint, ColumnsOfLargerGroupsAreOrderedToo) {
  const PlainMatrix m(16, 512, 256, kF16[0], kF16[1]);
  FileBytes bytes = gptq(m, 2);
  for (std::int32_t k = 0; k < 512; ++k) {  // odd columns are the second group
    const std::int32_t group = k % 2;
    std::memcpy(bytes.at("l.g_idx").data.data() + 4 * k, &group, 4);
  }
  const Storage out = loaded(Opened(bytes, 2).checkpoint, "l", {.reorder_columns = true});
  ASSERT_EQ(name_of(out.matrix.format), "int4_g128_zp");
  for (std::int64_t n = 0; n < m.N; ++n) {
    for (std::int64_t j = 0; j < m.K; ++j) ASSERT_EQ(out.code(n, j), m.code(n, 2 * (j % 256) + j / 256));
    for (std::int64_t g = 0; g < 4; ++g) {
      ASSERT_EQ(out.at<std::uint16_t>(1, n * 4 + g), m.scale(n, g / 2));
      ASSERT_EQ(out.at<std::uint8_t>(2, n * 4 + g), m.zero(n, g / 2));
    }
  }
}

TEST(Checkpoint, ScalesOfOtherDtypesAreTakenWhereFloat16HoldsThem) {
  const PlainMatrix m = int4_matrix();
  FileBytes file = compressed_int4(m, false);
  FileBytes::Tensor& scales = file.at("l.weight_scale");
  const std::vector<std::uint16_t> f16 = m.scales_as<std::uint16_t>();
  std::string f32;
  for (const std::uint16_t bits : f16) {
    const float value = f16_to_f32(bits);
    f32.append(reinterpret_cast<const char*>(&value), 4);
  }
  scales.dtype = "F32";
  scales.data = f32;
  expect_holds<std::uint16_t>(loaded(Opened(file).checkpoint, "l"), m);

  scales.dtype = "BF16";
  scales.data.clear();
  for (std::size_t i = 0; i < f16.size(); ++i) {
    const std::uint16_t bits = f32_to_bf16(0.003f * static_cast<float>(i % 50 + 1));
    scales.data.append(reinterpret_cast<const char*>(&bits), 2);
  }
  const Storage out = loaded(Opened(file).checkpoint, "l");
  for (std::size_t i = 0; i < f16.size(); ++i) {
    ASSERT_EQ(f16_to_f32(out.at<std::uint16_t>(1, static_cast<std::int64_t>(i))),
              bf16_to_f32(f32_to_bf16(0.003f * static_cast<float>(i % 50 + 1))));
  }
}

TEST(Checkpoint, SameBytesWithOneThreadAndWithMany) {
  const PlainMatrix m(520, 256, 64, kF16[0], kF16[1]);
  const Opened file(awq(m));
  Storage one(file.checkpoint.layer("l")), many(file.checkpoint.layer("l"));
  for (auto [out, threads] : {std::pair{&one, 1}, std::pair{&many, 4}}) {
    const auto pool = make_thread_pool(threads);
    Runtime runtime;
    runtime.executor = pool.get();
    file.checkpoint.load("l", out->matrix, {}, runtime);
  }
  EXPECT_EQ(one.memory, many.memory);
  expect_holds<std::uint16_t>(many, m, true);
}

class Folder {
 public:
  Folder() : path_(std::filesystem::temp_directory_path() / ("heddle_checkpoint_" + std::to_string(getpid()))) {
    std::filesystem::create_directory(path_);
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  void write(const std::string& name, const std::string& content) const {
    std::ofstream(path_ / name, std::ios::binary) << content;
  }
  std::string path(const std::string& name = "") const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

TEST(Checkpoint, TensorsOfALayerMayBeInSeveralFiles) {
  const PlainMatrix m = int4_matrix();
  FileBytes all = gptq(m, 1), first, second;
  for (const FileBytes::Tensor& tensor : all.tensors) {
    (tensor.name == "l.qweight" ? first : second).tensors.push_back(tensor);
  }
  second.add<float>("norm.weight", "F32", {1}, {1});
  const Folder folder;
  folder.write("a.safetensors", first.bytes());
  folder.write("b.safetensors", second.bytes());
  folder.write("config.json", R"({"quantization_config": {"quant_method": "gptq", "bits": 4}})");
  expect_holds<std::uint16_t>(loaded(Checkpoint::open({folder.path()}), "l"), m, true);
  expect_holds<std::uint16_t>(
      loaded(Checkpoint::open({folder.path("b.safetensors"), folder.path("a.safetensors")}), "l"), m, true);
  try {
    Checkpoint::open({folder.path(), folder.path("a.safetensors")});
    FAIL() << "accepted a tensor twice";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("tensor 'l.qweight' is in "), std::string::npos) << error.what();
  }
  EXPECT_THROW(Checkpoint::open({}), Error);
  EXPECT_THROW(Checkpoint::open({folder.path("absent")}), RuntimeError);
}

TEST(Checkpoint, TheVersionOfGptqComesFromTheConfiguration) {
  const PlainMatrix m = int4_matrix();
  const struct {
    const char *file, *content;
    int version;  // 0: refused
  } cases[] = {
      {"config.json", R"({"quantization_config": {"quant_method": "gptq", "checkpoint_format": "gptq"}})", 1},
      {"config.json", R"({"quantization_config": {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}})", 2},
      {"quantize_config.json", R"({"bits": 4, "group_size": 64})", 1},
      {"quantize_config.json", R"({"bits": 4, "checkpoint_format": "gptq_v2"})", 2},
      {"config.json", R"({"quantization_config": {"quant_method": "gptq", "checkpoint_format": "marlin"}})", 0},
      {"config.json", R"({"quantization_config": {"quant_method": "awq"}})", 0},
      {"config.json", R"({"hidden_size": 4})", 0},
      {"config.json", R"([{"quantization_config")", 0},
  };
  for (const auto& c : cases) {
    const Folder folder;
    folder.write("m.safetensors", gptq(m, c.version).bytes());
    folder.write(c.file, c.content);
    const Checkpoint checkpoint = Checkpoint::open({folder.path("m.safetensors")});
    if (c.version == 0) {
      EXPECT_NE(checkpoint.layers().at(0).refusal.find("give the version"), std::string::npos) << c.content;
      EXPECT_THROW(checkpoint.layer("l"), Error);
    } else {
      expect_holds<std::uint16_t>(loaded(checkpoint, "l"), m, true);
    }
  }
}

TEST(Checkpoint, AConfigurationThatIsNestedDeepIsRefused) {
  const std::string arrays = heddle::test::nested_arrays(), objects = heddle::test::nested_objects();
  for (const std::string& content :
       {arrays, objects, R"({"quantization_config":)" + arrays + "}", R"({"quantization_config":)" + objects + "}"}) {
    for (const char* name : {"config.json", "quantize_config.json"}) {
      const Folder folder;
      folder.write("m.safetensors", gptq(int4_matrix(), 1).bytes());
      folder.write(name, content);
      kit::expect_message(
          [&] { Checkpoint::open({folder.path("m.safetensors")}); },
          "[checkpoint] " + folder.path(name) + " nests arrays and objects more than 64 deep, at byte ");
    }
  }
}

TEST(Checkpoint, AConfigurationThatIsNoFileIsAsGoodAsNone) {
  const Folder folder;
  folder.write("m.safetensors", gptq(int4_matrix(), 1).bytes());
  ASSERT_EQ(::mkfifo(folder.path("config.json").c_str(), 0600), 0);
  std::filesystem::create_directory(folder.path("quantize_config.json"));
  const Checkpoint checkpoint = Checkpoint::open({folder.path("m.safetensors")});
  EXPECT_NE(checkpoint.layers().at(0).refusal.find("give the version"), std::string::npos);
}

TEST(Checkpoint, RefusesArgumentsThatDoNotFit) {
  FileBytes bytes = gpt_oss("l.blocks", "l.scales");
  bytes.add<float>("plain.weight", "F32", {1}, {1}).add<float>("attention_blocks", "F32", {1}, {1});
  const Opened file(bytes);
  const Checkpoint& checkpoint = file.checkpoint;
  EXPECT_EQ(checkpoint.layers().size(), 1u);
  kit::expect_message([&] { checkpoint.layer("absent"); }, "no layer 'absent'");
  kit::expect_message([&] { checkpoint.layer("plain"); }, "'plain.weight' is F32: layer 'plain' is not in 4 or 8 bits");
  Storage out(checkpoint.layer("l"));
  kit::expect_message([&] { checkpoint.load("l", out.matrix, {.expert = 2}); }, "expert is 2: layer 'l' has 2 of them");
  kit::expect_message([&] { checkpoint.load("l", out.matrix, {.expert = -1}); }, "expert is -1");
  QuantizedMatrix other = out.matrix;
  other.rows = 8;
  kit::expect_message([&] { checkpoint.load("l", other); },
                      "out is for [8, 96] in mxfp4: layer 'l' is [9, 96] in mxfp4");
  other = out.matrix;
  other.scales.shape[1] = 2;
  kit::expect_message([&] { checkpoint.load("l", other); }, "out.scales is [9, 2]: it must be [9, 3]");
  other = out.matrix;
  other.scales.data = other.codes.data;
  kit::expect_message([&] { checkpoint.load("l", other); }, "out.scales shares memory with out.codes");
  EXPECT_THROW(Checkpoint({}, {.gptq_version = 3}), Error);
}

}  // namespace
}  // namespace heddle::lowbit
