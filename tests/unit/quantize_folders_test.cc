// Folders of models as they are found: with links into a cache, modules behind the encoder, and names that lead
// elsewhere.
#include <algorithm>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <nlohmann/json.hpp>

#include "checkpoint/folder.h"
#include "heddle/checkpoint.h"
#include "heddle/error.h"
#include "kit/messages.h"
#include "unit/deep_json.h"
#include "unit/quantized_model.h"

namespace heddle::lowbit {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using test::FileBytes;
using test::Folder;
using test::kUp;
using test::model;

// What lies under the folder, however deep: a folder's name ends with "/", a link's with "@".
std::vector<std::string> tree(const fs::path& folder) {
  std::vector<std::string> out;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    const std::string name = entry.path().string().substr(folder.string().size() + 1);
    out.push_back(name + (entry.is_symlink() ? "@" : entry.is_directory() ? "/" : ""));
  }
  std::sort(out.begin(), out.end());
  return out;
}

// A model as huggingface_hub keeps it: files under their hashes in blobs/, links to them in snapshots/REVISION/.
class Cache {
 public:
  Folder folder;
  const std::string snapshot = "models--a--b/snapshots/0123abcd";

  void add(const std::string& name, const std::string& content) {
    const std::string hash = "hash" + std::to_string(blobs_++);
    folder.write("models--a--b/blobs/" + hash, content);
    std::string up = "../../";
    for (const char c : name) up += c == '/' ? "../" : "";
    link(name, up + "blobs/" + hash);
  }
  void link(const std::string& name, const std::string& target) const {
    const fs::path path = folder.at(snapshot + "/" + name);
    fs::create_directories(path.parent_path());
    fs::create_symlink(target, path);
  }
  std::string at(const std::string& name = "") const { return folder.at(snapshot + (name.empty() ? "" : "/" + name)); }
  // Quantises the snapshot; the folder that came of it.
  QuantizeReport quantize() const { return quantize_checkpoint(at(), folder.at("out")); }
  void expect_refused(const std::string& message) const {
    const std::vector<std::string> before = tree(folder.path);
    try {
      quantize();
      FAIL() << "it was taken; expected " << message;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(message), std::string::npos) << error.what();
    } catch (const RuntimeError& error) {
      EXPECT_NE(std::string(error.what()).find(message), std::string::npos) << error.what();
    }
    EXPECT_EQ(tree(folder.path), before);
  }

 private:
  int blobs_ = 0;
};

// A model of sentence-transformers, in two files, its modules behind it.
void add_sentence_model(Cache* cache) {
  FileBytes first, second = model();
  test::add(first, "model.layers.1.mlp.up_proj", test::kRows, test::kColumns, 77);
  cache->add("model-00001-of-00002.safetensors", first.bytes());
  cache->add("model-00002-of-00002.safetensors", second.bytes());
  json index = {{"metadata", {{"total_size", 1}}}, {"weight_map", json::object()}};
  for (const auto& tensor : first.tensors) index["weight_map"][tensor.name] = "model-00001-of-00002.safetensors";
  for (const auto& tensor : second.tensors) index["weight_map"][tensor.name] = "model-00002-of-00002.safetensors";
  cache->add("model.safetensors.index.json", index.dump());
  cache->add("config.json", R"({"model_type": "bert", "dtype": "float16"})");
  for (const char* name :
       {"modules.json", "config_sentence_transformers.json", "sentence_bert_config.json", "tokenizer.json",
        "tokenizer_config.json", "vocab.txt", "README.md", ".gitattributes", "1_Pooling/config.json",
        "3_Dense/config.json", "3_Dense/model.safetensors", "3_Dense/deeper/still/file"}) {
    cache->add(name, std::string("content of ") + name);
  }
  fs::create_directory(cache->at("2_Normalize"));
  cache->add("pytorch_model.bin", "other weights");
  cache->add("onnx/model.onnx", "other weights");
  fs::create_directory_symlink("onnx", cache->at("openvino"));  // which is no part of the output
}

TEST(QuantizeFolders, ASnapshotOfACacheComesOutWhole) {
  Cache cache;
  add_sentence_model(&cache);
  const std::vector<std::string> before = tree(cache.folder.path);
  const QuantizeReport report = cache.quantize();
  const std::vector<std::string> wanted = {".gitattributes",
                                           "1_Pooling/",
                                           "1_Pooling/config.json",
                                           "2_Normalize/",
                                           "3_Dense/",
                                           "3_Dense/config.json",
                                           "3_Dense/deeper/",
                                           "3_Dense/deeper/still/",
                                           "3_Dense/deeper/still/file",
                                           "3_Dense/model.safetensors",
                                           "README.md",
                                           "config.json",
                                           "config_sentence_transformers.json",
                                           "model-00001-of-00002.safetensors",
                                           "model-00002-of-00002.safetensors",
                                           "model.safetensors.index.json",
                                           "modules.json",
                                           "sentence_bert_config.json",
                                           "tokenizer.json",
                                           "tokenizer_config.json",
                                           "vocab.txt"};
  EXPECT_EQ(tree(cache.folder.at("out")), wanted);
  for (const std::string& name : wanted) {
    if (name.ends_with("/") || name == "config.json" || name.starts_with("model")) continue;
    EXPECT_EQ(cache.folder.read("out/" + name), "content of " + name);
  }
  EXPECT_EQ(cache.folder.read("out/modules.json"), "content of modules.json");
  // The report names the files, and nothing was written beside the output.
  std::vector<std::string> files = report.files, listed = wanted;
  std::sort(files.begin(), files.end());
  std::erase_if(listed, [](const std::string& name) { return name.ends_with("/"); });
  EXPECT_EQ(files, listed);
  EXPECT_EQ(report.dtype, "float16");
  fs::remove_all(cache.folder.at("out"));
  EXPECT_EQ(tree(cache.folder.path), before);
}

TEST(QuantizeFolders, AFileOfACacheToo) {
  Cache cache;
  cache.add("model.safetensors", model().bytes());
  cache.add("config.json", R"({"model_type": "llama"})");
  quantize_checkpoint(cache.at("model.safetensors"), cache.folder.at("out"));
  EXPECT_EQ(tree(cache.folder.at("out")), (std::vector<std::string>{"config.json", "model.safetensors"}));
}

TEST(QuantizeFolders, NamesAreThoseOfTheFolderHoweverItIsWritten) {
  Cache cache;
  cache.add("model.safetensors", model().bytes());
  cache.add("1_Pooling/config.json", "{}");
  fs::create_directory_symlink(cache.at(), cache.folder.at("linked"));
  for (const std::string& input : {cache.at() + "/", cache.at() + "//", cache.at("1_Pooling/../."),
                                   cache.at("1_Pooling/.."), cache.folder.at("linked"), cache.folder.at("linked/")}) {
    quantize_checkpoint(input, cache.folder.at("out"));
    EXPECT_EQ(tree(cache.folder.at("out")),
              (std::vector<std::string>{"1_Pooling/", "1_Pooling/config.json", "config.json", "model.safetensors"}))
        << input;
    fs::remove_all(cache.folder.at("out"));
  }
}

struct Hostile {
  const char* name;
  std::function<void(Cache&)> change;
  const char* message;
};
void PrintTo(const Hostile& hostile, std::ostream* out) { *out << hostile.name; }

std::vector<Hostile> hostile_folders() {
  const auto pipe = [](const std::string& name) {
    return [name](Cache& cache) {
      fs::create_directories(fs::path(cache.at(name)).parent_path());
      ASSERT_EQ(::mkfifo(cache.at(name).c_str(), 0600), 0);
    };
  };
  const auto link = [](const std::string& name, const std::string& target) {
    return [=](Cache& cache) { cache.link(name, target); };
  };
  const auto file = [](const std::string& name, const std::string& content) {
    return [=](Cache& cache) { cache.add(name, content); };
  };
  const auto mapped_to = [&](const std::string& name) {
    return file("model.safetensors.index.json", json{{"weight_map", {{"lm_head.weight", name}}}}.dump());
  };
  const char* elsewhere = "it must be a safetensors file of the folder";
  const char* deep = "nests arrays and objects more than 64 deep, at byte ";
  return {
      {"folder_linked", link("1_Pooling", "../../blobs"), "1_Pooling is a link to a folder: only links to files"},
      {"folder_linked_to_root", link("9_all", "/"), "9_all is a link to a folder"},
      {"folder_linked_inside", link("1_Pooling/more", ".."), "1_Pooling/more is a link to a folder"},
      {"dangling", link("vocab.txt", "../../blobs/gone"), "cannot follow the link "},
      {"dangling_inside", link("1_Pooling/config.json", "../../../blobs/gone"), "config.json: No such file"},
      {"dangling_config", link("config.json", "../../blobs/gone"), "config.json: No such file or directory"},
      {"dangling_tensors", link("b.safetensors", "../../blobs/gone"), "b.safetensors: No such file or directory"},
      {"dangling_index", link("model.safetensors.index.json", "gone"), "index.json: No such file or directory"},
      {"loop", link("vocab.txt", "vocab.txt"), "vocab.txt: Too many levels of symbolic links"},
      {"pipe", pipe("vocab.txt"), "vocab.txt is neither a file nor a folder"},
      {"pipe_inside", pipe("1_Pooling/pipe"), "pipe is neither a file nor a folder"},
      {"pipe_linked",
       [pipe, link](Cache& cache) {
         pipe("onnx/pipe")(cache);
         link("vocab.txt", "onnx/pipe")(cache);
       },
       "vocab.txt is neither a file nor a folder"},
      {"pipe_config", pipe("config.json"), "config.json is not a regular file"},
      {"pipe_index", pipe("model.safetensors.index.json"), "index.json is not a regular file"},
      {"pipe_tensors", pipe("b.safetensors"), "b.safetensors is not a regular file"},
      {"device", link("vocab.txt", "/dev/zero"), "vocab.txt is neither a file nor a folder"},
      {"index_above", mapped_to("../../x.safetensors"), elsewhere},
      {"index_below", mapped_to("1_Pooling/x.safetensors"), elsewhere},
      {"index_absolute", mapped_to("/x.safetensors"), elsewhere},
      {"index_zero", mapped_to(std::string("model.safetensors\0.safetensors", 30)), elsewhere},
      {"index_metadata", file("model.safetensors.index.json", R"({"metadata": "x", "weight_map": {"a": "b"}})"),
       "index.json: metadata is no object"},
      {"deep_config", file("config.json", heddle::test::nested_objects()), deep},
      {"deep_config_arrays", file("config.json", heddle::test::nested_arrays()), deep},
      {"deep_field", file("config.json", R"({"quantization_config":)" + heddle::test::nested_arrays() + "}"), deep},
      {"deep_other_field", file("config.json", R"({"labels":)" + heddle::test::nested_objects() + "}"), deep},
      {"deep_index", file("model.safetensors.index.json", heddle::test::nested_objects()), deep},
      {"deep_weight_map",
       file("model.safetensors.index.json", R"({"weight_map":)" + heddle::test::nested_objects() + "}"), deep},
      {"deep_metadata", file("model.safetensors.index.json", R"({"metadata":)" + heddle::test::nested_arrays() + "}"),
       deep},
      {"long_config",
       [](Cache& cache) {
         cache.add("config.json", "{}");
         fs::resize_file(cache.at("config.json"), (16 << 20) + 1);
       },
       "config.json has 16777217 bytes: at most 16777216 are read"},
      {"long_index",
       [](Cache& cache) {
         cache.add("model.safetensors.index.json", "{}");
         fs::resize_file(cache.at("model.safetensors.index.json"), 100'000'001);
       },
       "has 100000001 bytes: at most 100000000 are read"},
  };
}

class HostileFolder : public testing::TestWithParam<Hostile> {};

TEST_P(HostileFolder, IsRefusedAndNothingIsWrittenAnywhere) {
  Cache cache;
  cache.add("model.safetensors", model().bytes());
  GetParam().change(cache);
  cache.expect_refused(GetParam().message);
}

INSTANTIATE_TEST_SUITE_P(QuantizeFolders, HostileFolder, testing::ValuesIn(hostile_folders()),
                         [](const auto& info) { return std::string(info.param.name); });

// What does not belong to the output may be anything.
TEST(QuantizeFolders, OtherWeightsAndFoldersAreNotLookedAt) {
  Cache cache;
  cache.add("model.safetensors", model().bytes());
  cache.link("pytorch_model.bin", "../../blobs/gone");
  cache.link("onnx", "/");
  ASSERT_EQ(::mkfifo(cache.at("model.gguf").c_str(), 0600), 0);
  cache.quantize();
  EXPECT_EQ(tree(cache.folder.at("out")), (std::vector<std::string>{"config.json", "model.safetensors"}));
}

TEST(QuantizeFolders, OutputIsANewFolder) {
  Cache cache;
  cache.add("model.safetensors", model().bytes());
  fs::create_directory(cache.folder.at("elsewhere"));
  fs::create_directory_symlink("elsewhere", cache.folder.at("out"));
  cache.expect_refused("exists: it must be a new folder");
  fs::remove(cache.folder.at("out"));
  fs::create_directory_symlink("nowhere", cache.folder.at("out"));
  cache.expect_refused("exists: it must be a new folder");
  fs::remove(cache.folder.at("out"));
  fs::create_directory(cache.folder.at("out"));
  cache.expect_refused("exists: it must be a new folder");
}

TEST(QuantizeFolders, NamesStayInTheOutput) {
  const std::string zero("a\0b", 3);
  const Folder folder;
  const NewFolder out(folder.at("out"));
  for (const std::string& name :
       {std::string(), std::string("/"), std::string("/a"), std::string(".."), std::string("."), std::string("../a"),
        std::string("a/.."), std::string("a/../b"), std::string("a/./b"), std::string("a//b"), std::string("a/"),
        std::string("../../blobs/a"), zero}) {
    EXPECT_FALSE(stays_inside(name)) << name;
    kit::expect_message([&] { out.file(name); }, "is no name in it: names are relative, without parts that are empty");
    kit::expect_message([&] { out.make_folder(name); }, "output " + folder.at("out") + ": '");
  }
  for (const std::string name : {"a", "a/b", "...", "..a", "a../b", ".hidden", "1_Pooling/config.json", "a\\b", " "}) {
    EXPECT_TRUE(stays_inside(name)) << name;
    const std::string path = out.file(name);
    EXPECT_TRUE(path.starts_with(folder.at("out.partial-"))) << path;
    EXPECT_TRUE(path.ends_with("/" + name)) << path;
  }
}

}  // namespace
}  // namespace heddle::lowbit
