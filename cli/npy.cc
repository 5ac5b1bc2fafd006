#include "npy.h"

#include <cstring>

#include "core/files.h"
#include "heddle/error.h"

namespace heddle::cli {
namespace {

constexpr std::size_t kPrefix = 12;           // magic, version and the longer of the two length fields
constexpr std::size_t kMaxHeader = 64 << 10;  // NumPy itself writes less than 1 KiB
constexpr char kMagic[] = "\x93NUMPY";

struct Descr {
  const char* name;
  DType dtype;
};
constexpr Descr kDescrs[] = {{"<f4", DType::f32}, {"<f2", DType::f16}, {"<i4", DType::i32}, {"|b1", DType::boolean}};

// "<f8" -> "float64"; what is no plain number stays as NumPy writes it.
std::string words_of(const std::string& descr) {
  constexpr std::pair<char, const char*> kKinds[] = {{'f', "float"}, {'i', "int"}, {'u', "uint"}, {'c', "complex"}};
  const std::string size = descr.size() > 2 ? descr.substr(2) : "";
  const bool digits = !size.empty() && size.size() < 3 && size.find_first_not_of("0123456789") == std::string::npos;
  for (const auto& [kind, name] : kKinds) {
    if (!digits || descr[1] != kind) continue;
    return (descr[0] == '>' ? "big-endian " : "") + std::string(name) + std::to_string(8 * std::stoi(size));
  }
  return "elements of type '" + descr + "'";
}

// Reads the header's dictionary: {'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }
class HeaderParser {
 public:
  HeaderParser(const char* at, const char* end, const std::string& name) : at_(at), end_(end), name_(name) {}

  void parse(NpyHeader& header) {
    bool descr = false, order = false, shape = false;
    expect('{');
    while (!accept('}')) {
      const std::string key = quoted();
      expect(':');
      if (key == "descr" && !descr) {
        descr = true;
        header.dtype = dtype(quoted());
      } else if (key == "fortran_order" && !order) {
        order = true;
        header.fortran_order = boolean();
      } else if (key == "shape" && !shape) {
        shape = true;
        header.shape = tuple();
      } else {
        fail("key '" + key + "' is unknown or repeated");
      }
      if (!accept(',') && !(skip(), at_ < end_ && *at_ == '}')) fail("an entry is not followed by ',' or '}'");
    }
    if (!descr || !order || !shape) fail("descr, fortran_order or shape is missing");
    skip();
    if (at_ != end_) fail("text follows the dictionary");
  }

  [[noreturn]] void fail(const std::string& why) const { throw Error(name_ + " is not a valid .npy file: " + why); }

 private:
  void skip() {
    while (at_ < end_ && (*at_ == ' ' || *at_ == '\n')) ++at_;
  }
  bool accept(char c) {
    skip();
    if (at_ == end_ || *at_ != c) return false;
    ++at_;
    return true;
  }
  void expect(char c) {
    if (!accept(c)) fail(std::string("'") + c + "' is missing in the header");
  }
  std::string quoted() {
    expect('\'');
    const char* begin = at_;
    while (at_ < end_ && *at_ != '\'') ++at_;
    if (at_ == end_) fail("a string in the header does not end");
    return std::string(begin, at_++);
  }
  bool word(const char* text) {
    skip();
    const std::size_t length = std::strlen(text);
    if (static_cast<std::size_t>(end_ - at_) < length || std::memcmp(at_, text, length) != 0) return false;
    at_ += length;
    return true;
  }
  bool boolean() {
    if (word("True")) return true;
    if (word("False")) return false;
    fail("fortran_order is neither True nor False");
  }
  DType dtype(const std::string& descr) const {
    for (const Descr& known : kDescrs) {
      if (descr == known.name) return known.dtype;
    }
    throw Error(name_ + " holds " + words_of(descr) +
                ": float32, float16, int32 or bool is wanted, little-endian (bfloat16 comes in safetensors files)");
  }
  std::vector<std::int64_t> tuple() {
    std::vector<std::int64_t> extents;
    expect('(');
    while (!accept(')')) {
      skip();
      std::int64_t value = 0;
      const char* begin = at_;
      for (; at_ < end_ && *at_ >= '0' && *at_ <= '9'; ++at_) {
        if (__builtin_mul_overflow(value, 10, &value) || __builtin_add_overflow(value, *at_ - '0', &value)) {
          fail("an extent does not fit 63 bits");
        }
      }
      if (at_ == begin) fail("an extent is not a number");
      extents.push_back(value);
      if (!accept(',') && !(skip(), at_ < end_ && *at_ == ')')) fail("an extent is not followed by ',' or ')'");
    }
    if (extents.empty() || extents.size() > kMaxRank) {
      throw Error(name_ + " has " + std::to_string(extents.size()) + " dimensions: it must have from 1 to " +
                  std::to_string(kMaxRank));
    }
    return extents;
  }

  const char *at_, *end_;
  const std::string& name_;
};

}  // namespace

NpyHeader parse_npy_header(const std::string& bytes, std::size_t file_bytes, const std::string& name) {
  HeaderParser nothing(nullptr, nullptr, name);
  if (bytes.size() < kPrefix || std::memcmp(bytes.data(), kMagic, 6) != 0) {
    nothing.fail("it does not begin with NumPy's magic bytes");
  }
  const auto byte = [&](std::size_t i) { return static_cast<std::size_t>(static_cast<unsigned char>(bytes[i])); };
  const std::size_t version = byte(6);
  if (version < 1 || version > 3 || byte(7) != 0) {
    nothing.fail("format version " + std::to_string(version) + "." + std::to_string(byte(7)) + " is unknown");
  }
  const std::size_t fields = version == 1 ? 10 : 12;
  std::size_t length = byte(8) | byte(9) << 8;
  if (version > 1) length |= byte(10) << 16 | byte(11) << 24;
  if (length > kMaxHeader) nothing.fail("its header claims " + std::to_string(length) + " bytes");
  if (fields + length > bytes.size()) nothing.fail("it ends inside its header");

  NpyHeader header;
  header.header_bytes = fields + length;
  HeaderParser(bytes.data() + fields, bytes.data() + header.header_bytes, name).parse(header);
  std::int64_t data = static_cast<std::int64_t>(size_of(header.dtype));
  for (const std::int64_t extent : header.shape) {
    if (__builtin_mul_overflow(data, extent, &data)) nothing.fail("its shape's bytes do not fit 63 bits");
  }
  header.data_bytes = static_cast<std::size_t>(data);
  const std::size_t found = file_bytes - header.header_bytes;
  if (found != header.data_bytes) {
    nothing.fail("its shape needs " + std::to_string(header.data_bytes) + " bytes of data and it holds " +
                 std::to_string(found));
  }
  return header;
}

HostTensor read_npy(std::string_view operation, const std::string& path) {
  const RegularFile file(operation, path);
  std::string start(std::min(file.size(), kPrefix + kMaxHeader), '\0');
  file.read_at(0, start.data(), start.size());
  const NpyHeader header = parse_npy_header(start, file.size(), path);

  HostTensor tensor(header.dtype, header.shape);
  if (header.fortran_order) tensor.reverse_strides();
  file.read_at(header.header_bytes, tensor.data(), header.data_bytes);
  if (header.dtype == DType::boolean) {
    for (std::size_t i = 0; i < header.data_bytes; ++i) {
      if (static_cast<unsigned>(tensor.data()[i]) > 1) {
        throw Error(path + " holds the bool " + std::to_string(static_cast<unsigned>(tensor.data()[i])) +
                    " at element " + std::to_string(i) + ": bools must be 0 or 1");
      }
    }
  }
  return tensor;
}

void write_npy(const std::string& path, const TensorView& view) {
  const HostTensor data = converted(view, view.dtype == DType::bf16 ? DType::f32 : view.dtype);
  std::string header = "{'descr': '";
  for (const Descr& known : kDescrs) {
    if (known.dtype == data.view().dtype) header += known.name;
  }
  header += "', 'fortran_order': False, 'shape': (";
  for (int i = 0; i < view.rank; ++i)
    header += std::to_string(view.shape[i]) + (view.rank == 1 ? "," : i + 1 < view.rank ? ", " : "");
  header += "), }";
  header.append(63 - (10 + header.size()) % 64, ' ').push_back('\n');  // data starts at a multiple of 64
  std::string prefix(kMagic, 6);
  prefix += {'\x01', '\x00', static_cast<char>(header.size() & 0xff), static_cast<char>(header.size() >> 8)};

  OutputFile file("run", path, OutputFile::Existing::replace);
  file.write(prefix.data(), prefix.size());
  file.write(header.data(), header.size());
  file.write(data.data(), data.bytes());
  file.finish();
}

}  // namespace heddle::cli
