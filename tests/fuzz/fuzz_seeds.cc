// Writes the seed corpora: fuzz_seeds <folder> fills <folder>/safetensors, checkpoint, json, arguments, lowbit and
// patterns.
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <random>
#include <string>

namespace {

void write(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

std::string safetensors(const std::string& header, std::size_t data) {
  std::string out;
  for (int i = 0; i < 8; ++i) out += static_cast<char>(header.size() >> (8 * i));
  return out + header + std::string(data, 'x');
}

// A piece that the JSON fuzzer repeats 2^doublings times.
std::string piece(int doublings, const std::string& text) {
  return static_cast<char>(doublings) + (static_cast<char>(text.size()) + text);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: fuzz_seeds <folder>\n";
    return 1;
  }
  const std::filesystem::path root = argv[1];
  std::filesystem::create_directories(root / "safetensors");
  std::filesystem::create_directories(root / "checkpoint");
  std::filesystem::create_directories(root / "json");
  std::filesystem::create_directories(root / "arguments");
  std::filesystem::create_directories(root / "lowbit");
  std::filesystem::create_directories(root / "patterns");

  for (const std::string pattern :
       {"local(12, 0) | strided(7) | sink(4)", "(columns(0, 33) | diagonals(-2, 17)) & dilated(3, 9)",
        "rows(5) | random(2, size=20, seed=3)", "local(2)|sink(1)&(strided(3)|(local(70)))"}) {
    write(root / "patterns" / std::to_string(pattern.size()), "\x50\x1b\x10" + pattern);
  }

  write(root / "safetensors/empty", safetensors("{}", 0));
  write(root / "safetensors/one", safetensors(R"({"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}})", 24));
  write(root / "safetensors/metadata", safetensors(R"({"__metadata__":{"format":"pt"}})", 0));
  write(root / "safetensors/many",
        safetensors(R"({"__metadata__":{"k":"\u00e9"},"a":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]},)"
                    R"("b":{"dtype":"I64","shape":[],"data_offsets":[2,10]},)"
                    R"("c":{"dtype":"BOOL","shape":[0,7],"data_offsets":[10,10]},)"
                    R"("d":{"dtype":"F16","shape":[1,1,1,1],"data_offsets":[10,12]}}   )",
                    12));

  write(root / "safetensors/nested", safetensors("{\"a\":" + std::string(80, '[') + std::string(80, ']') + "}", 0));

  for (const int doublings : {4, 6, 10, 18}) {
    const std::string name = std::to_string(doublings), key = R"({"a":)";
    write(root / "json" / ("arrays" + name), piece(doublings, "[") + piece(doublings, "]"));
    write(root / "json" / ("objects" + name), piece(doublings, key) + piece(0, "0") + piece(doublings, "}"));
    write(root / "json" / ("inside" + name),
          piece(0, key) + piece(doublings, "[") + piece(doublings, "]") + piece(0, R"(,"b":{"c":[1,-2.5e-3,null]}})"));
    write(root / "json" / ("wide" + name), piece(0, "[") + piece(doublings, "{},[],") + piece(0, "\"x\\u00e9\"]"));
    write(root / "json" / ("string" + name), piece(0, "[\"") + piece(doublings, "[{\\\"") + piece(0, "\"]"));
    write(root / "json" / ("metadata" + name),
          piece(0, R"({"__metadata__":{"k":)") + piece(doublings, "[") + piece(doublings, "]") + piece(0, "}}"));
  }

  // The argument fuzzer reads zero bytes as "as it should be", so zeros alone are valid calls and few bytes disturb
  // them.
  std::mt19937 random(1);
  for (int seed = 0; seed < 64; ++seed) {
    std::string bytes(160, '\0');
    bytes[0] = static_cast<char>(seed % 8);
    for (int i = 0; i < seed; ++i) bytes[random() % bytes.size()] = static_cast<char>(random());
    write(root / "arguments" / std::to_string(seed), bytes);
    bytes[0] = static_cast<char>(seed % 13);  // the format
    write(root / "lowbit" / std::to_string(seed), bytes);
  }

  // A made file in each layout, as it should be and a little bent; then a whole file.
  for (int seed = 0; seed < 64; ++seed) {
    std::string bytes(96, '\0');
    bytes[1] = static_cast<char>(seed % 3);
    for (int i = 0; i < seed / 8; ++i) bytes[2 + random() % (bytes.size() - 2)] = static_cast<char>(random());
    bytes[4] = static_cast<char>(seed % 8);  // the layout
    write(root / "checkpoint" / std::to_string(seed), bytes);
  }
  const std::string nvfp4 = R"({"l.weight":{"dtype":"U8","shape":[2,8],"data_offsets":[0,16]},)"
                            R"("l.weight_scale":{"dtype":"F8_E4M3","shape":[2,1],"data_offsets":[16,18]},)"
                            R"("l.weight_scale_2":{"dtype":"F32","shape":[],"data_offsets":[18,22]}})";
  write(root / "checkpoint/file", std::string("f\x01") + safetensors(nvfp4, 22));
}
