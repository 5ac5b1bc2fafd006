// The reader of all JSON from outside: what it takes, and that neither depth nor length nor a pipe ends the process.
#include "core/json.h"

#include <filesystem>
#include <fstream>
#include <string>

#include <gtest/gtest.h>
#include <sys/stat.h>

#include "core/files.h"
#include "heddle/error.h"
#include "kit/messages.h"
#include "unit/deep_json.h"
#include "unit/quantized_model.h"

namespace heddle {
namespace {

using lowbit::test::Folder;
using nlohmann::json;
using test::nested_arrays;
using test::nested_objects;

json parsed(const std::string& content) { return parse_json("reader", "a.json", content); }

TEST(Json, DepthIsBounded) {
  for (const std::string& content : {nested_arrays(kMaxJsonDepth), nested_objects(kMaxJsonDepth)}) {
    const json value = parsed(content), copy = value;
    EXPECT_EQ(copy, value);
    EXPECT_EQ(value.dump(), content);
  }
  const std::string rule = "[reader] a.json nests arrays and objects more than 64 deep, at byte ";
  kit::expect_message([&] { parsed(nested_arrays(65)); }, rule + "64");
  kit::expect_message([&] { parsed(nested_objects(65)); }, rule + "320");
  kit::expect_message([&] { parsed(nested_arrays()); }, rule + "64");
  kit::expect_message([&] { parsed(nested_objects()); }, rule + "320");
  kit::expect_message([&] { parsed(std::string(test::kHostileDepth, '[')); }, rule + "64");
  kit::expect_message(
      [&] {
        parsed(R"({"a\\":[0,")"
               "\\\""
               R"(]",)" +
               nested_arrays(63) + "]}");
      },
      rule);
}

TEST(Json, OnlyBracketsThatNestCount) {
  std::string beside = "[";
  for (int i = 0; i < 1000; ++i) beside += R"([{}],{"[[[[\"[[[[":"]}\\"},)";
  EXPECT_EQ(parsed(beside + "0]").size(), 2001u);
  EXPECT_EQ(parsed("\"" + std::string(1000, '[') + "\\\"" + std::string(1000, '{') + "\"").size(), 1u);
}

TEST(Json, WhatIsNone) {
  for (const char* content : {"", "{", "}", "[}", "{\"a\": NaN}", "{} {}", "\"\xff\"", "]]]]", "{\"a\": 1e999}"}) {
    EXPECT_TRUE(parsed(content).is_discarded()) << content;
  }
  EXPECT_TRUE(parsed("]" + nested_arrays(50)).is_discarded());
}

TEST(Json, LengthOfFilesIsBounded) {
  const Folder folder;
  folder.write("a.json", "{}");
  EXPECT_TRUE(read_json("reader", folder.at("a.json"), 2).is_object());
  kit::expect_message([&] { read_json("reader", folder.at("a.json"), 1); },
                      "[reader] " + folder.at("a.json") + " has 2 bytes: at most 1 are read");
  // Nothing of what is too long is read: this takes no memory.
  std::filesystem::resize_file(folder.at("a.json"), std::uintmax_t{1} << 36);
  kit::expect_message([&] { read_json("reader", folder.at("a.json"), kMaxIndexBytes); },
                      "has 68719476736 bytes: at most 100000000 are read");
}

TEST(Json, OnlyRegularFilesAreRead) {
  const Folder folder;
  const auto refused = [&](const std::string& name) {
    try {
      read_json("reader", folder.at(name), 100);
    } catch (const RuntimeError& error) {
      return std::string(error.what());
    }
    return std::string("it was read");
  };
  ASSERT_EQ(::mkfifo(folder.at("pipe").c_str(), 0600), 0);
  EXPECT_EQ(refused("pipe"), "[reader] " + folder.at("pipe") + " is not a regular file");
  EXPECT_EQ(refused("."), "[reader] " + folder.at(".") + " is not a regular file");
  EXPECT_EQ(refused("absent"), "[reader] cannot open " + folder.at("absent") + ": No such file or directory");
  std::filesystem::create_symlink("absent", folder.at("dangling"));
  EXPECT_NE(refused("dangling").find("No such file or directory"), std::string::npos);
  std::filesystem::create_symlink("loop", folder.at("loop"));
  EXPECT_NE(refused("loop").find("cannot open"), std::string::npos);
  folder.write("a.json", "[1]");
  std::filesystem::create_symlink("a.json", folder.at("link"));
  EXPECT_EQ(read_json("reader", folder.at("link"), 100), json::array({1}));
}

TEST(Files, AreReadToTheirEnd) {
  const Folder folder;
  for (const std::size_t size : {0, 1, 65535, 65536, 65537, 200000}) {
    const std::string content(size, 'x');
    folder.write("file", content);
    EXPECT_EQ(read_file("reader", folder.at("file"), 1 << 20), content);
  }
  EXPECT_NE(read_file("reader", "/proc/self/status", 1 << 20), "");  // which says that it has no bytes
  kit::expect_message([&] { read_file("reader", "/proc/self/status", 3); }, "at most 3 are read");
}

}  // namespace
}  // namespace heddle
