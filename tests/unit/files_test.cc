// Files that are written whole or not at all, whatever their names lead to.
#include "core/files.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include "heddle/error.h"
#include "unit/quantized_model.h"

namespace heddle {
namespace {

namespace fs = std::filesystem;
using lowbit::test::Folder;
using Names = std::vector<std::string>;

void replace(const std::string& path, const std::string& content) {
  OutputFile file("test", path, OutputFile::Existing::replace);
  file.write(content.data(), content.size());
  file.finish();
}

mode_t mode_of(const std::string& path) {
  struct stat status {};
  EXPECT_EQ(::stat(path.c_str(), &status), 0);
  return status.st_mode & 07777;
}

TEST(OutputFile, AppearsWhenItIsFinished) {
  const Folder folder;
  {
    OutputFile file("test", folder.at("new"), OutputFile::Existing::replace);
    file.write("half", 4);
    EXPECT_FALSE(fs::exists(folder.at("new")));
  }
  EXPECT_TRUE(folder.names().empty()) << "what is not finished is removed";
  folder.write("old", "before");
  {
    OutputFile file("test", folder.at("old"), OutputFile::Existing::replace);
    file.write("after", 5);
    EXPECT_EQ(folder.read("old"), "before");
    file.finish();
  }
  EXPECT_EQ(folder.read("old"), "after");
  EXPECT_EQ(folder.names(), Names{"old"});
}

TEST(OutputFile, HasTheModeOfWhatItReplaces) {
  const Folder folder;
  const mode_t mask = ::umask(027);
  replace(folder.at("new"), "x");
  ::umask(mask);
  EXPECT_EQ(mode_of(folder.at("new")), 0640u);
  ASSERT_EQ(::chmod(folder.at("new").c_str(), 0604), 0);
  replace(folder.at("new"), "y");
  EXPECT_EQ(mode_of(folder.at("new")), 0604u);
}

TEST(OutputFile, FollowsLinksAndLeavesThem) {
  const Folder folder;
  folder.write("inner/file", "before");
  fs::create_symlink("inner/file", folder.at("link"));
  fs::create_symlink("link", folder.at("chain"));
  replace(folder.at("chain"), "after");
  EXPECT_TRUE(fs::is_symlink(folder.at("chain")) && fs::is_symlink(folder.at("link")));
  EXPECT_EQ(folder.read("inner/file"), "after");

  fs::create_symlink("inner/absent", folder.at("dangling"));
  replace(folder.at("dangling"), "made");
  EXPECT_TRUE(fs::is_symlink(folder.at("dangling")));
  EXPECT_EQ(folder.read("inner/absent"), "made");

  fs::create_symlink("round", folder.at("round"));
  EXPECT_THROW(replace(folder.at("round"), "x"), RuntimeError);
  EXPECT_TRUE(fs::is_symlink(folder.at("round")));
}

TEST(OutputFile, WritesThroughDevicesAndPipes) {
  const Folder folder;
  // By links, so that a mistake would not cost the machine's own.
  fs::create_symlink("/dev/null", folder.at("null"));
  fs::create_symlink("/dev/full", folder.at("full"));
  replace(folder.at("null"), "x");
  EXPECT_THROW(replace(folder.at("full"), "x"), RuntimeError);
  for (const char* device : {"null", "full"}) {
    EXPECT_TRUE(fs::is_symlink(folder.at(device)) && fs::is_character_file(folder.at(device))) << device;
  }

  ASSERT_EQ(::mkfifo(folder.at("pipe").c_str(), 0600), 0);
  const int reader = ::open(folder.at("pipe").c_str(), O_RDONLY | O_NONBLOCK);
  ASSERT_GE(reader, 0);
  replace(folder.at("pipe"), "through");
  char got[8] = {};
  EXPECT_EQ(::read(reader, got, sizeof got), 7);
  EXPECT_STREQ(got, "through");
  ::close(reader);
  EXPECT_EQ(folder.names(), (Names{"full", "null", "pipe"}));

  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);  // as the shell's >(...) hands over
  replace("/dev/fd/" + std::to_string(ends[1]), "too");
  EXPECT_EQ(::read(ends[0], got, sizeof got), 3);
  ::close(ends[0]);
  ::close(ends[1]);
}

TEST(OutputFile, WritesFilesWhoseNamesAreGone) {
  const Folder folder;
  folder.write("file", "before, and longer");
  const int fd = ::open(folder.at("file").c_str(), O_RDWR);
  ASSERT_GE(fd, 0);
  fs::remove(folder.at("file"));
  replace("/dev/fd/" + std::to_string(fd), "after");
  char got[32] = {};
  EXPECT_EQ(::pread(fd, got, sizeof got, 0), 5);
  EXPECT_STREQ(got, "after");
  ::close(fd);
  EXPECT_TRUE(folder.names().empty());
}

TEST(OutputFile, SaysWhatItCannot) {
  const Folder folder;
  const auto refusal = [&](const std::string& path, OutputFile::Existing existing) {
    try {
      OutputFile("test", path, existing).finish();
    } catch (const RuntimeError& error) {
      return std::string(error.what());
    }
    return std::string("nothing was refused");
  };
  folder.write("file", "precious");
  EXPECT_EQ(refusal(folder.at("file"), OutputFile::Existing::refuse),
            "[test] cannot create " + folder.at("file") + ": File exists");
  EXPECT_EQ(refusal(folder.at("no/file"), OutputFile::Existing::replace),
            "[test] cannot write " + folder.at("no/file") + ": No such file or directory");
  EXPECT_EQ(refusal(folder.at("file/inner"), OutputFile::Existing::replace),
            "[test] cannot write " + folder.at("file/inner") + ": Not a directory");
  EXPECT_EQ(refusal(folder.path.string(), OutputFile::Existing::replace),
            "[test] cannot write " + folder.path.string() + ": Is a directory");
  fs::create_symlink("elsewhere", folder.at("link"));
  EXPECT_EQ(refusal(folder.at("link"), OutputFile::Existing::refuse),
            "[test] cannot create " + folder.at("link") + ": File exists");
  EXPECT_EQ(folder.names(), (Names{"file", "link"}));
}

TEST(SameFile, GoesByWhatPathsLeadTo) {
  const Folder folder;
  folder.write("a", "");
  folder.write("b", "");
  fs::create_symlink("a", folder.at("link"));
  fs::create_hard_link(folder.at("a"), folder.at("hard"));
  fs::create_symlink("absent", folder.at("dangling"));
  const auto same = [&](const std::string& one, const std::string& two) {
    return same_file(folder.at(one), folder.at(two));
  };
  EXPECT_TRUE(same("a", "a") && same("a", "link") && same("a", "hard") && same("a", "./a"));
  EXPECT_FALSE(same("a", "b") || same("a", "absent"));
  EXPECT_TRUE(same("absent", "absent") && same("absent", "dangling") && same("absent", "./absent"));
  EXPECT_FALSE(same("absent", "other"));
  EXPECT_FALSE(same_file("/dev/null", "/dev/null")) << "what is written there is not kept";
}

}  // namespace
}  // namespace heddle
