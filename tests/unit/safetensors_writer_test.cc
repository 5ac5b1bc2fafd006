// What the writer of safetensors files writes, byte by byte and read back.
#include "checkpoint/safetensors_writer.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "heddle/error.h"
#include "heddle/safetensors.h"
#include "unit/quantized_model.h"

namespace heddle {
namespace {

using Tensor = SafeTensorsWriter::Tensor;
using lowbit::test::Folder;

TEST(SafeTensorsWriter, WritesTheHeaderInItsOrder) {
  const Folder folder;
  {
    SafeTensorsWriter writer(folder.at("m"), {{"a\"\\\n\u00e9", "U8", {3}, 3}, {"b", "F32", {1, 2}, 8}},
                             {{"k", "\"v\""}, {"format", "pt"}});
    writer.write("b", "01234567", 8);
    writer.write("a\"\\\n\u00e9", "xyz", 3);
    writer.finish();
  }
  std::string header = R"({"__metadata__":{"format":"pt","k":"\"v\""},)"
                       R"("b":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},)"
                       "\"a\\\"\\\\\\n\u00e9\""
                       R"(:{"dtype":"U8","shape":[3],"data_offsets":[8,11]}})";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  const std::string file = folder.read("m");
  ASSERT_EQ(file.size(), 8 + header.size() + 11);
  EXPECT_EQ(static_cast<unsigned char>(file[0]), header.size());
  EXPECT_EQ(file.substr(8), header + "01234567xyz");
  EXPECT_EQ(SafeTensors::open(folder.at("m")).metadata().at("k"), "\"v\"");
}

TEST(SafeTensorsWriter, WritesAFileOfNoTensors) {
  const Folder folder;
  SafeTensorsWriter(folder.at("m"), {}, {}).finish();
  EXPECT_TRUE(SafeTensors::open(folder.at("m")).entries().empty());
}

// As the experts of a large model have. Each name is written once, and looked for among no others.
TEST(SafeTensorsWriter, WritesVeryManyTensors) {
  constexpr std::size_t kCount = 100'000;
  const Folder folder;
  std::vector<Tensor> tensors;
  for (std::size_t i = 0; i < kCount; ++i) {
    tensors.push_back({"model.layers.0.mlp.experts." + std::to_string(i) + ".down_proj.weight", "U8", {1}, 1});
  }
  SafeTensorsWriter writer(folder.at("m"), tensors, {});
  for (const Tensor& tensor : tensors) writer.write(tensor.name, "x", 1);
  writer.finish();
  EXPECT_EQ(SafeTensors::open(folder.at("m")).entries().size(), kCount);
}

TEST(SafeTensorsWriter, LeavesNothingThatIsNotFinished) {
  const Folder folder;
  { const SafeTensorsWriter writer(folder.at("m"), {{"a", "U8", {3}, 3}}, {}); }
  EXPECT_TRUE(folder.names().empty());
  EXPECT_THROW(SafeTensorsWriter(folder.at("m"), {{"a", "U8", {3}, 3}, {"a", "U8", {3}, 3}}, {}), Error);
  EXPECT_TRUE(folder.names().empty());
  folder.write("m", "precious");
  EXPECT_THROW(SafeTensorsWriter(folder.at("m"), {}, {}), RuntimeError);
  EXPECT_EQ(folder.read("m"), "precious");
}

}  // namespace
}  // namespace heddle
