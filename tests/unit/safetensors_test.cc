#include "heddle/safetensors.h"

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include "heddle/error.h"
#include "unit/deep_json.h"

namespace heddle {
namespace {

// A file: the header's length (or `claimed`), the header, `data` bytes of data that count up.
std::string file_bytes(const std::string& header, std::size_t data, std::uint64_t claimed = UINT64_MAX) {
  const std::uint64_t length = claimed == UINT64_MAX ? header.size() : claimed;
  std::string out;
  for (int i = 0; i < 8; ++i) out += static_cast<char>(length >> (8 * i) & 0xff);
  out += header;
  for (std::size_t i = 0; i < data; ++i) out += static_cast<char>(i);
  return out;
}

std::string one(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"a":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}";
}

class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& content)
      : path_(std::filesystem::temp_directory_path() /
              ("heddle_safetensors_" + std::to_string(getpid()) + "_" + std::to_string(count_++))) {
    std::ofstream(path_, std::ios::binary) << content;
  }
  ~TemporaryFile() { std::filesystem::remove(path_); }
  std::string path() const { return path_.string(); }

 private:
  static inline int count_ = 0;
  std::filesystem::path path_;
};

TEST(SafeTensors, ReadsTensorsAndMetadata) {
  const std::string header = R"({"__metadata__":{"format":"pt","note":""},)"
                             R"("b":{"dtype":"BF16","shape":[3],"data_offsets":[24,30]},)"
                             R"("a":{"data_offsets":[0,24],"shape":[2,3],"dtype":"F32"},)"
                             R"("none":{"dtype":"I64","shape":[4,0],"data_offsets":[30,30]},)"
                             R"("scalar":{"dtype":"U8","shape":[],"data_offsets":[30,31]}}    )";
  const TemporaryFile file(file_bytes(header + std::string((8 - header.size() % 8) % 8, ' '), 31));
  const SafeTensors tensors = SafeTensors::open(file.path());
  EXPECT_EQ(tensors.entries().size(), 4u);
  EXPECT_EQ(tensors.metadata().at("format"), "pt");
  EXPECT_EQ(tensors.metadata().at("note"), "");

  const TensorView a = tensors.tensor("a");
  EXPECT_EQ(a.dtype, DType::f32);
  EXPECT_EQ(a.shape_text(), "[2, 3]");
  EXPECT_TRUE(a.contiguous());
  EXPECT_EQ(static_cast<const unsigned char*>(a.data)[23], 23);
  const TensorView b = tensors.tensor("b");
  EXPECT_EQ(b.dtype, DType::bf16);
  EXPECT_EQ(static_cast<const unsigned char*>(b.data)[0], 24);
  EXPECT_EQ(tensors.entries().at("none").bytes, 0u);
  EXPECT_EQ(tensors.entries().at("scalar").shape.size(), 0u);
  EXPECT_EQ(*static_cast<const unsigned char*>(tensors.entries().at("scalar").data), 30);
}

TEST(SafeTensors, ViewsOutliveTheObjectTheyWereCopiedFrom) {
  const TemporaryFile file(file_bytes(one("U8", "[2]", "[0,2]"), 2));
  SafeTensors kept = SafeTensors::open(file.path());
  {
    const SafeTensors copy = kept;
    kept = SafeTensors::open(file.path());
    EXPECT_EQ(static_cast<const unsigned char*>(copy.entries().at("a").data)[1], 1);
  }
  EXPECT_EQ(static_cast<const unsigned char*>(kept.entries().at("a").data)[1], 1);
}

TEST(SafeTensors, EveryDTypeHasItsSize) {
  const std::pair<const char*, int> sizes[] = {
      {"BOOL", 1}, {"U8", 1},   {"I8", 1},  {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"F8_E8M0", 1}, {"I16", 2}, {"U16", 2},
      {"F16", 2},  {"BF16", 2}, {"I32", 4}, {"U32", 4},     {"F32", 4},     {"F64", 8},     {"I64", 8}, {"U64", 8}};
  for (const auto& [dtype, size] : sizes) {
    const int bytes = 3 * size;
    const std::string content = file_bytes(one(dtype, "[3,1]", "[0," + std::to_string(bytes) + "]"), bytes);
    EXPECT_EQ(SafeTensors::parse(content.data(), content.size()).entries().at("a").bytes, 3u * size) << dtype;
  }
}

TEST(SafeTensors, NoTensors) {
  const std::string content = file_bytes("{}", 0);
  EXPECT_TRUE(SafeTensors::parse(content.data(), content.size()).entries().empty());
}

// Opening must not read the data: a sparse file of 64 GiB opens at once, in the memory of its header.
TEST(SafeTensors, MapsWithoutReading) {
  constexpr std::uint64_t kBytes = std::uint64_t{1} << 36;
  const std::string header = one("F32", "[" + std::to_string(kBytes / 4) + "]", "[0," + std::to_string(kBytes) + "]");
  const TemporaryFile file(file_bytes(header, 0));
  std::error_code failure;
  std::filesystem::resize_file(file.path(), 8 + header.size() + kBytes, failure);
  if (failure) GTEST_SKIP() << "this file system has no sparse file of 64 GiB: " << failure.message();
  const SafeTensors tensors = SafeTensors::open(file.path());
  EXPECT_EQ(tensors.entries().at("a").bytes, kBytes);
}

struct Hostile {
  const char* name;
  std::string content;
  const char* message;  // part of what the error must say
};

void PrintTo(const Hostile& file, std::ostream* out) { *out << file.name; }

class HostileFile : public testing::TestWithParam<Hostile> {};

TEST_P(HostileFile, IsRefusedWithItsReason) {
  // Copied to memory of exactly that size, so that a sanitizer sees a read past the end.
  const std::vector<char> exact(GetParam().content.begin(), GetParam().content.end());
  try {
    SafeTensors::parse(exact.data(), exact.size());
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(GetParam().message), std::string::npos) << error.what();
    EXPECT_EQ(std::string(error.what()).rfind("[safetensors] bytes in memory", 0), 0u) << error.what();
  }
  const TemporaryFile file(GetParam().content);
  EXPECT_THROW(SafeTensors::open(file.path()), Error);
}

std::vector<Hostile> hostile_files() {
  const std::string ok = one("U8", "[4]", "[0,4]");
  const std::string entry = R"({"dtype":"U8","shape":[4],"data_offsets":[0,4]})";
  return {
      {"empty", "", ": not a safetensors file: it has 0 bytes, and the header's length alone takes 8"},
      {"seven_bytes", std::string(7, '\0'), "has 7 bytes"},
      {"json", "{\n  \"architectures\": []\n}",
       ": not a safetensors file: its first 8 bytes say that the header has 7165896756295633531 bytes: at most "
       "100000000"},
      {"no_header", file_bytes("", 0), ": not a safetensors file: the header does not begin with '{'"},
      {"length_alone", file_bytes("", 0, 2), "does not begin with '{'"},
      {"length_past_end", file_bytes("{}", 0, 3), "the header's length is 3 bytes: only 2 follow it"},
      {"length_above_limit", file_bytes("{}", 0, 100'000'001), "at most 100000000 are allowed"},
      {"length_all_ones", file_bytes("{}", 0, UINT64_MAX - 1), "at most 100000000 are allowed"},
      {"truncated_data", file_bytes(ok, 3), "ends at byte 4: the data section has 3 bytes"},
      {"truncated_header", file_bytes(ok, 0, ok.size() - 1), "not valid JSON"},
      {"array", file_bytes("[]", 0), "does not begin with '{'"},
      {"leading_space", file_bytes(" {}", 0), "does not begin with '{'"},
      {"byte_order_mark", file_bytes("\xef\xbb\xbf{}", 0), "does not begin with '{'"},
      {"two_values", file_bytes("{}{}", 0), "not valid JSON"},
      {"trailing_comma", file_bytes(R"({"a":)" + entry + ",}", 4), "not valid JSON"},
      {"invalid_utf8", file_bytes("{\"\xff\":" + entry + "}", 4), "not valid JSON"},
      {"trailing_zero_byte", file_bytes(ok + std::string(1, '\0'), 4), "the header holds a zero byte"},
      {"tensor_twice", file_bytes(R"({"a":)" + entry + R"(,"a":)" + entry + "}", 4), "tensor 'a' appears twice"},
      {"tensor_twice_by_escape", file_bytes(R"({"a":)" + entry + R"(,"\u0061":)" + entry + "}", 4),
       "tensor 'a' appears twice"},
      {"metadata_twice", file_bytes(R"({"__metadata__":{},"__metadata__":{}})", 0), "'__metadata__' appears twice"},
      {"metadata_key_twice", file_bytes(R"({"__metadata__":{"k":"1","k":"2"}})", 0), "has the key 'k' twice"},
      {"metadata_number", file_bytes(R"({"__metadata__":{"k":1}})", 0), "it maps strings to strings"},
      {"metadata_nested", file_bytes(R"({"__metadata__":{"k":{}}})", 0), "it maps strings to strings"},
      {"metadata_not_object", file_bytes(R"({"__metadata__":"x"})", 0), "'__metadata__' is a string"},
      {"field_twice", file_bytes(R"({"a":{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}})", 4),
       "has the field 'dtype' twice"},
      {"shape_twice", file_bytes(R"({"a":{"dtype":"U8","shape":[4],"shape":[4],"data_offsets":[0,4]}})", 4),
       "has the field 'shape' twice"},
      {"unknown_field", file_bytes(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"x":1}})", 4),
       "has the unknown field 'x'"},
      {"no_dtype", file_bytes(R"({"a":{"shape":[4],"data_offsets":[0,4]}})", 4), "has no dtype"},
      {"no_shape", file_bytes(R"({"a":{"dtype":"U8","data_offsets":[0,4]}})", 4), "has no shape"},
      {"no_offsets", file_bytes(R"({"a":{"dtype":"U8","shape":[4]}})", 4), "has no data_offsets"},
      {"unknown_dtype", file_bytes(one("F4", "[4]", "[0,4]"), 4), "has the unknown dtype 'F4'"},
      {"lower_case_dtype", file_bytes(one("f32", "[1]", "[0,4]"), 4), "has the unknown dtype 'f32'"},
      {"dtype_number", file_bytes(R"({"a":{"dtype":1,"shape":[4],"data_offsets":[0,4]}})", 4),
       "dtype is a number: it must be a string"},
      {"tensor_not_object", file_bytes(R"({"a":[4]})", 4), "'a' is an array: it must be an object"},
      {"tensor_null", file_bytes(R"({"a":null})", 4), "'a' is null: it must be an object"},
      {"negative_extent", file_bytes(one("U8", "[-4]", "[0,4]"), 4), "shape holds -4: it must not be negative"},
      {"fractional_extent", file_bytes(one("U8", "[4.0]", "[0,4]"), 4), "shape holds '4.0': it must be an integer"},
      {"huge_extent", file_bytes(one("U8", "[99999999999999999999]", "[0,4]"), 4), "it must be an integer below 2^63"},
      {"extent_2_63", file_bytes(one("U8", "[9223372036854775808]", "[0,4]"), 4), "it must be below 2^63"},
      {"overflowing_shape", file_bytes(one("F32", "[4294967296,4294967296]", "[0,0]"), 0), "size in bytes passes 2^64"},
      {"overflow_before_zero", file_bytes(one("U8", "[4294967296,4294967296,0]", "[0,0]"), 0), "passes 2^64"},
      {"nested_shape", file_bytes(one("U8", "[[4]]", "[0,4]"), 4), "shape holds an array: it must hold integers"},
      {"string_in_shape", file_bytes(one("U8", "[\"4\"]", "[0,4]"), 4), "shape holds a string"},
      {"shape_not_array", file_bytes(one("U8", "4", "[0,4]"), 4), "shape is a number: it must be an array of integers"},
      {"one_offset", file_bytes(one("U8", "[4]", "[4]"), 4), "has 1 data_offsets: it must have 2"},
      {"three_offsets", file_bytes(one("U8", "[4]", "[0,4,4]"), 4), "has 3 data_offsets: it must have 2"},
      {"negative_offset", file_bytes(one("U8", "[4]", "[-1,3]"), 4), "data_offsets holds -1"},
      {"reversed_offsets", file_bytes(one("U8", "[4]", "[4,0]"), 4), "begins at byte 4 and ends at 0"},
      {"offset_past_end", file_bytes(one("U8", "[4]", "[1,5]"), 4), "ends at byte 5: the data section has 4 bytes"},
      {"offset_all_ones", file_bytes(one("U8", "[4]", "[18446744073709551612,18446744073709551615]"), 4),
       "the data section has 4 bytes"},
      {"too_few_bytes", file_bytes(one("F32", "[2]", "[0,4]"), 4), "has 4 bytes of data: its dtype and shape need 8"},
      {"too_many_bytes", file_bytes(one("U8", "[2]", "[0,4]"), 4), "has 4 bytes of data: its dtype and shape need 2"},
      {"hole_at_the_start", file_bytes(one("U8", "[3]", "[1,4]"), 4), "bytes 0 to 1 of the data section belong to no"},
      {"hole_at_the_end", file_bytes(one("U8", "[3]", "[0,3]"), 4), "bytes 3 to 4 of the data section belong to no"},
      {"hole_between",
       file_bytes(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                  R"("b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})",
                  4),
       "bytes 1 to 2 of the data section belong to no tensor; the next one is 'b'"},
      {"overlap",
       file_bytes(R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},)"
                  R"("b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})",
                  4),
       "tensor 'b' begins at byte 2, inside another tensor that ends at 3"},
      {"same_range", file_bytes(R"({"a":)" + entry + R"(,"b":)" + entry + "}", 4),
       "tensor 'b' begins at byte 0, inside another"},
      {"empty_tensor_inside",
       file_bytes(R"({"a":)" + entry + R"(,"b":{"dtype":"U8","shape":[0],"data_offsets":[2,2]}})", 4),
       "tensor 'b' begins at byte 2, inside another"},
      {"data_without_tensors", file_bytes("{}", 1), "bytes 0 to 1 of the data section belong to no tensor"},
      {"empty_name", file_bytes(R"({"":)" + entry + "}", 4), "a tensor's name has 0 bytes"},
      {"long_name", file_bytes("{\"" + std::string(1025, 'x') + "\":" + entry + "}", 4),
       "a tensor's name has 1025 bytes"},
      {"nested_arrays", file_bytes("{\"a\":" + test::nested_arrays() + "}", 0),
       ": the header nests arrays and objects more than 64 deep, at byte 68"},
      {"nested_objects", file_bytes(test::nested_objects(), 0), "more than 64 deep, at byte 320"},
      {"nested_in_metadata", file_bytes(R"({"__metadata__":{"k":)" + test::nested_arrays() + "}}", 0),
       "more than 64 deep"},
      {"nested_metadata", file_bytes(R"({"__metadata__":)" + test::nested_objects() + "}", 0), "more than 64 deep"},
      {"nested_shape_deep", file_bytes(one("U8", test::nested_arrays(), "[0,4]"), 4), "more than 64 deep"},
      {"unclosed", file_bytes("{\"a\":" + std::string(100'000, '['), 0), "more than 64 deep"},
      {"control_characters", file_bytes(R"({"a\n\u001b":[]})", 0),
       "'a?"
       "?' is an array"},
  };
}

INSTANTIATE_TEST_SUITE_P(SafeTensors, HostileFile, testing::ValuesIn(hostile_files()),
                         [](const auto& info) { return std::string(info.param.name); });

void expect_refused_view(const SafeTensors& tensors, const std::string& name, const std::string& message) {
  try {
    tensors.tensor(name);
    FAIL() << "viewed " << name;
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(message), std::string::npos) << error.what();
  }
}

TEST(SafeTensors, RefusesViewsItCannotGive) {
  std::string header =
      R"({"odd":{"dtype":"F32","shape":[1],"data_offsets":[1,5]},"byte":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
      R"("long":{"dtype":"I64","shape":[1],"data_offsets":[5,13]},"deep":{"dtype":"BOOL","shape":[1,1,1,1,1],)"
      R"("data_offsets":[13,14]},"scalar":{"dtype":"BOOL","shape":[],"data_offsets":[14,15]}})";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  const TemporaryFile file(file_bytes(header, 15));
  const SafeTensors tensors = SafeTensors::open(file.path());
  expect_refused_view(tensors, "odd", "tensor 'odd' is not aligned to 4 bytes");
  expect_refused_view(tensors, "byte", "tensor 'byte' is U8: only F32, F16, BF16, I32 and BOOL can be viewed");
  expect_refused_view(tensors, "long", "tensor 'long' is I64");
  expect_refused_view(tensors, "deep", "tensor 'deep' has 5 dimensions");
  expect_refused_view(tensors, "scalar", "tensor 'scalar' has 0 dimensions");
  expect_refused_view(tensors, "absent", file.path() + " has no tensor 'absent'");
}

TEST(SafeTensors, FilesThatCannotBeReadAreRuntimeErrors) {
  EXPECT_THROW(SafeTensors::open("/nonexistent/model.safetensors"), RuntimeError);
  EXPECT_THROW(SafeTensors::open(std::filesystem::temp_directory_path().string()), RuntimeError);
  const TemporaryFile pipe("");
  std::filesystem::remove(pipe.path());
  ASSERT_EQ(::mkfifo(pipe.path().c_str(), 0600), 0);
  EXPECT_THROW(SafeTensors::open(pipe.path()), RuntimeError);  // and does not wait for one who writes
}

}  // namespace
}  // namespace heddle
