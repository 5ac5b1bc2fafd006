#include "heddle/checkpoint.h"

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>

#include <gtest/gtest.h>
#include <unistd.h>

#include "core/dtypes.h"
#include "heddle/error.h"
#include "lowbit/formats.h"
#include "unit/checkpoint_files.h"

namespace heddle::lowbit {
namespace {

using test::FileBytes;
using test::kAwqOrder;
using test::packed_words;
using test::PlainMatrix;

// Scales as bits: E4M3 and E8M0 that are numbers, positive float16 and float32.
constexpr std::uint32_t kE4M3[2] = {0, 0x7e}, kE8M0[2] = {0, 254}, kF16[2] = {1, 0x7bff}, kF32[2] = {1, 0x7f7fffff};

PlainMatrix nvfp4_matrix() { return {9, 96, 16, kE4M3[0], kE4M3[1]}; }
PlainMatrix mxfp4_matrix() { return {9, 96, 32, kE8M0[0], kE8M0[1]}; }
PlainMatrix int4_matrix(std::int64_t group = 64) { return {72, 256, group, kF16[0], kF16[1]}; }

FileBytes gpt_oss(const std::string& blocks, const std::string& scales) {
  const PlainMatrix m = mxfp4_matrix(), second(9, 96, 32, kE8M0[0], kE8M0[1], 2);
  std::vector<std::uint8_t> codes = m.bytes(), exponents = m.scales_as<std::uint8_t>();
  for (const std::uint8_t byte : second.bytes()) codes.push_back(byte);
  for (const auto byte : second.scales_as<std::uint8_t>()) exponents.push_back(byte);
  return FileBytes().add(blocks, "U8", {2, 9, 3, 16}, codes).add(scales, "U8", {2, 9, 3}, exponents);
}
FileBytes modelopt() {
  const PlainMatrix m = nvfp4_matrix();
  return FileBytes()
      .add("l.weight", "U8", {9, 48}, m.bytes())
      .add("l.weight_scale", "F8_E4M3", {9, 6}, m.scales_as<std::uint8_t>())
      .add<float>("l.weight_scale_2", "F32", {}, {0.37f})
      .add<float>("l.input_scale", "F32", {}, {3});
}
FileBytes compressed_nvfp4() {
  const PlainMatrix m = nvfp4_matrix();
  return FileBytes()
      .add("l.weight_packed", "U8", {9, 48}, m.bytes())
      .add("l.weight_scale", "F8_E4M3", {9, 6}, m.scales_as<std::uint8_t>())
      .add<float>("l.weight_global_scale", "F32", {1}, {7168});
}
FileBytes compressed_mxfp4() {
  const PlainMatrix m = mxfp4_matrix();
  return FileBytes()
      .add("l.weight_packed", "U8", {9, 48}, m.bytes())
      .add("l.weight_scale", "U8", {9, 3}, m.scales_as<std::uint8_t>());
}
FileBytes compressed_int4(const PlainMatrix& m, bool zero_points) {
  FileBytes file;
  file.add("l.weight_packed", "I32", {m.N, m.K / 8},
           packed_words(m.N, m.K, [&](auto n, auto k) { return m.code(n, k); }));
  file.add("l.weight_scale", "F16", {m.N, m.groups()}, m.scales_as<std::uint16_t>());
  file.add<std::int64_t>("l.weight_shape", "I64", {2}, {m.N, m.K});
  if (zero_points) {
    // Packed along N: words [N/8, G].
    std::vector<std::uint32_t> words;
    for (std::int64_t i = 0; i < (m.N + 7) / 8; ++i) {
      for (std::int64_t g = 0; g < m.groups(); ++g) {
        std::uint32_t word = 0;
        for (int p = 0; p < 8 && 8 * i + p < m.N; ++p) word |= m.zero(8 * i + p, g) << (4 * p);
        words.push_back(word);
      }
    }
    file.add("l.weight_zero_point", "I32", {(m.N + 7) / 8, m.groups()}, words);
  }
  return file;
}
PlainMatrix bnb_matrix() { return {5, 192, 64, kF32[0], kF32[1]}; }
FileBytes bitsandbytes(const std::string& type, const std::string& fields = R"("blocksize": 64, "shape": [5, 192])") {
  const PlainMatrix m = bnb_matrix();
  std::vector<float> map;
  for (unsigned code = 0; code < 16; ++code) {
    const auto bits = static_cast<std::uint8_t>(code);
    map.push_back(type == "nf4" ? NF4{bits}.value() : FP4Bnb{bits}.value());
  }
  return FileBytes()
      .add("l.weight", "U8", {480, 1}, m.bytes(true))
      .add("l.weight.absmax", "F32", {15}, m.scales_as<std::uint32_t>())
      .add("l.weight.quant_map", "F32", {16}, map)
      .add_text("l.weight.quant_state.bitsandbytes__" + type,
                R"({"quant_type": ")" + type + R"(", "dtype": "bfloat16", )" + fields + "}");
}
FileBytes bitsandbytes_nested() {
  FileBytes file = bitsandbytes("nf4",
                                R"("blocksize": 64, "shape": [5, 192], "nested_blocksize": 4, "nested_dtype": "float32",
                                   "nested_offset": 0.0625)");
  std::vector<std::uint8_t> codes;
  std::vector<float> map, absmax;
  for (int i = 0; i < 15; ++i) codes.push_back(static_cast<std::uint8_t>(17 * i));
  for (int i = 0; i < 256; ++i) map.push_back(static_cast<float>(i - 128) / 127.3f);
  for (int i = 0; i < 4; ++i) absmax.push_back(0.1f * static_cast<float>(i + 1));
  file.drop("l.weight.absmax");
  return file.add("l.weight.absmax", "U8", {15}, codes)
      .add("l.weight.nested_quant_map", "F32", {256}, map)
      .add("l.weight.nested_absmax", "F32", {4}, absmax);
}
// In version 1 zero points are less 1.
FileBytes gptq(const PlainMatrix& m, int version) {
  // [K/8, N]: eight columns of a row to a word, words of a column of the file beside each other.
  std::vector<std::uint32_t> words;
  for (std::int64_t w = 0; w < m.K / 8; ++w) {
    for (std::int64_t n = 0; n < m.N; ++n) {
      std::uint32_t word = 0;
      for (int i = 0; i < 8; ++i) word |= m.code(n, 8 * w + i) << (4 * i);
      words.push_back(word);
    }
  }
  std::vector<std::int32_t> group_of;
  for (std::int64_t k = 0; k < m.K; ++k) group_of.push_back(static_cast<std::int32_t>(k / m.group));
  return FileBytes()
      .add("l.qweight", "I32", {m.K / 8, m.N}, words)
      .add("l.qzeros", "I32", {m.groups(), m.N / 8},
           packed_words(m.groups(), m.N, [&](auto g, auto n) { return m.zero(n, g) - (version == 1 ? 1 : 0); }))
      .add("l.scales", "F16", {m.groups(), m.N}, m.scales_as<std::uint16_t>(true))
      .add("l.g_idx", "I32", {m.K}, group_of);
}
FileBytes awq(const PlainMatrix& m) {
  return FileBytes()
      .add("l.qweight", "I32", {m.K, m.N / 8},
           packed_words(
               m.K, m.N, [&](auto k, auto n) { return m.code(n, k); }, kAwqOrder))
      .add("l.qzeros", "I32", {m.groups(), m.N / 8},
           packed_words(
               m.groups(), m.N, [&](auto g, auto n) { return m.zero(n, g); }, kAwqOrder))
      .add("l.scales", "F16", {m.groups(), m.N}, m.scales_as<std::uint16_t>(true));
}

// A checkpoint over bytes of exactly the file's size, so that a sanitizer sees what is read beyond.
struct Opened {
  std::vector<char> bytes;
  Checkpoint checkpoint;

  explicit Opened(const FileBytes& file, int gptq_version = 0)
      : bytes(exact(file.bytes())),
        checkpoint({SafeTensors::parse(bytes.data(), bytes.size())}, {.gptq_version = gptq_version}) {}
  static std::vector<char> exact(const std::string& text) { return {text.begin(), text.end()}; }
};

// Storage with memory of exactly its size.
struct Storage {
  QuantizedMatrix matrix;
  std::vector<std::vector<std::uint8_t>> memory;

  explicit Storage(const StoredLayer& layer) : matrix(storage(layer.format, layer.rows, layer.columns)), memory(4) {
    TensorView* views[] = {&matrix.codes, &matrix.scales, &matrix.zeros, &matrix.global_scale};
    for (std::size_t i = 0; i < 4; ++i) {
      if (!views[i]->given()) continue;
      memory[i].assign(static_cast<std::size_t>(views[i]->elements()) * size_of(views[i]->dtype), 0xcd);
      views[i]->data = memory[i].data();
    }
  }
  template <class Value>
  Value at(int tensor, std::int64_t index) const {
    Value value;
    std::memcpy(&value, memory[static_cast<std::size_t>(tensor)].data() + index * sizeof value, sizeof value);
    return value;
  }
  unsigned code(std::int64_t n, std::int64_t k) const {
    return memory[0][static_cast<std::size_t>(n * (matrix.columns / 2) + k / 2)] >> (4 * (k % 2)) & 15u;
  }
};

Storage loaded(const Checkpoint& checkpoint, const std::string& name, const LoadOptions& options = {}) {
  Storage out(checkpoint.layer(name));
  checkpoint.load(name, out.matrix, options);
  return out;
}

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
      {"int4_eight_bits", ct, put<std::int64_t>("l.weight_shape", 1, 128), "codes of 8 bits"},
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
      {"bnb_json_array", nf4, state(std::string(60000, '[')), "is not a JSON object"},
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

void expect_refused(const std::function<void()>& call, const std::string& message) {
  try {
    call();
    FAIL() << "accepted: " << message;
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(message), std::string::npos) << error.what();
  }
}

TEST(Checkpoint, RefusesArgumentsThatDoNotFit) {
  FileBytes bytes = gpt_oss("l.blocks", "l.scales");
  bytes.add<float>("plain.weight", "F32", {1}, {1}).add<float>("attention_blocks", "F32", {1}, {1});
  const Opened file(bytes);
  const Checkpoint& checkpoint = file.checkpoint;
  EXPECT_EQ(checkpoint.layers().size(), 1u);
  expect_refused([&] { checkpoint.layer("absent"); }, "no layer 'absent'");
  expect_refused([&] { checkpoint.layer("plain"); }, "'plain.weight' is F32 without scales");
  Storage out(checkpoint.layer("l"));
  expect_refused([&] { checkpoint.load("l", out.matrix, {.expert = 2}); }, "expert is 2: layer 'l' has 2 of them");
  expect_refused([&] { checkpoint.load("l", out.matrix, {.expert = -1}); }, "expert is -1");
  QuantizedMatrix other = out.matrix;
  other.rows = 8;
  expect_refused([&] { checkpoint.load("l", other); }, "out is for [8, 96] in mxfp4: layer 'l' is [9, 96] in mxfp4");
  other = out.matrix;
  other.scales.shape[1] = 2;
  expect_refused([&] { checkpoint.load("l", other); }, "out.scales is [9, 2]: it must be [9, 3]");
  other = out.matrix;
  other.scales.data = other.codes.data;
  expect_refused([&] { checkpoint.load("l", other); }, "out.scales shares memory with out.codes");
  EXPECT_THROW(Checkpoint({}, {.gptq_version = 3}), Error);
}

}  // namespace
}  // namespace heddle::lowbit
