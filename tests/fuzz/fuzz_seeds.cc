// Writes the seed corpora: fuzz_seeds <folder> fills <folder>/safetensors, checkpoint, arguments and lowbit.
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

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: fuzz_seeds <folder>\n";
    return 1;
  }
  const std::filesystem::path root = argv[1];
  std::filesystem::create_directories(root / "safetensors");
  std::filesystem::create_directories(root / "checkpoint");
  std::filesystem::create_directories(root / "arguments");
  std::filesystem::create_directories(root / "lowbit");

  write(root / "safetensors/empty", safetensors("{}", 0));
  write(root / "safetensors/one", safetensors(R"({"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}})", 24));
  write(root / "safetensors/metadata", safetensors(R"({"__metadata__":{"format":"pt"}})", 0));
  write(root / "safetensors/many",
        safetensors(R"({"__metadata__":{"k":"\u00e9"},"a":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]},)"
                    R"("b":{"dtype":"I64","shape":[],"data_offsets":[2,10]},)"
                    R"("c":{"dtype":"BOOL","shape":[0,7],"data_offsets":[10,10]},)"
                    R"("d":{"dtype":"F16","shape":[1,1,1,1],"data_offsets":[10,12]}}   )",
                    12));

  // The argument fuzzer reads zero bytes as "as it should be", so zeros alone are valid calls and few bytes disturb
  // them.
  std::mt19937 random(1);
  for (int seed = 0; seed < 64; ++seed) {
    std::string bytes(160, '\0');
    bytes[0] = static_cast<char>(seed % 4);
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
