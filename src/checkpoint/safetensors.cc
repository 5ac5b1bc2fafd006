#include "heddle/safetensors.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include <sys/mman.h>

#include "core/check.h"
#include "core/files.h"
#include "core/in_quotes.h"
#include "core/json.h"

namespace heddle {
namespace {

using nlohmann::json;

constexpr std::size_t kMaxName = 1024;
constexpr const char* kMetadata = "__metadata__";

struct FileDType {
  const char* name;
  std::uint64_t bytes;
};
constexpr FileDType kDTypes[] = {{"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"F8_E8M0", 1},
                                 {"I16", 2},  {"U16", 2}, {"F16", 2}, {"BF16", 2},    {"I32", 4},     {"U32", 4},
                                 {"F32", 4},  {"F64", 8}, {"I64", 8}, {"U64", 8}};

// One tensor as the header describes it; nothing in it is checked against the data yet.
struct Described {
  std::optional<std::string> dtype;
  std::optional<std::vector<std::uint64_t>> shape, offsets;
};

// Reads the header's JSON event by event and accepts only
//   {"name": {"dtype": string, "shape": [n...], "data_offsets": [n...]}, "__metadata__": {string: string}}
// so nesting, unknown fields, other types and duplicate keys end the parse at once, with a sentence in `failure`.
class HeaderReader : public nlohmann::json_sax<json> {
 public:
  std::map<std::string, Described> tensors;
  std::map<std::string, std::string> metadata;
  std::string failure;

  bool null() override { return unexpected("null"); }
  bool boolean(bool) override { return unexpected("a boolean"); }
  bool number_integer(number_integer_t value) override {
    if (at_ == At::array) return fail(text(where(), " holds ", value, ": it must not be negative"));
    return unexpected("a number");
  }
  bool number_unsigned(number_unsigned_t value) override {
    if (at_ != At::array) return unexpected("a number");
    numbers_->push_back(value);
    return true;
  }
  bool number_float(number_float_t, const string_t& digits) override {
    if (at_ == At::array) {
      return fail(text(where(), " holds ", in_quotes(digits), ": it must be an integer below 2^63"));
    }
    return unexpected("a number");
  }
  bool string(string_t& value) override {
    if (at_ == At::metadata) {
      metadata.emplace(key_, std::move(value));
      return true;
    }
    if (at_ == At::tensor && key_ == "dtype") {
      tensor_->dtype = std::move(value);
      return true;
    }
    return unexpected("a string");
  }
  bool binary(binary_t&) override { return unexpected("binary data"); }

  bool start_object(std::size_t) override {
    if (at_ == At::outside) {
      at_ = At::top;
      return true;
    }
    if (at_ != At::top) return unexpected("an object");
    if (key_ == kMetadata) {
      at_ = At::metadata;
    } else {
      at_ = At::tensor;
      tensor_ = &tensors[key_];
    }
    return true;
  }
  bool end_object() override {
    at_ = at_ == At::top ? At::outside : At::top;
    return true;
  }
  bool start_array(std::size_t) override {
    if (at_ != At::tensor || (key_ != "shape" && key_ != "data_offsets")) return unexpected("an array");
    numbers_ = &(key_ == "shape" ? tensor_->shape : tensor_->offsets).emplace();
    at_ = At::array;
    return true;
  }
  bool end_array() override {
    at_ = At::tensor;
    return true;
  }
  bool key(string_t& value) override {
    switch (at_) {
      case At::top:
        if (value == kMetadata) {
          if (std::exchange(has_metadata_, true)) return fail("'__metadata__' appears twice");
        } else if (value.empty() || value.size() > kMaxName) {
          return fail(text("a tensor's name has ", value.size(), " bytes: it must have 1 to ", kMaxName));
        } else if (tensors.contains(value)) {
          return fail(text("tensor ", in_quotes(value), " appears twice"));
        }
        name_ = value;
        break;
      case At::metadata:
        if (metadata.contains(value)) return fail(text("'__metadata__' has the key ", in_quotes(value), " twice"));
        break;
      default:
        if (value != "dtype" && value != "shape" && value != "data_offsets") {
          return fail(text("tensor ", in_quotes(name_), " has the unknown field ", in_quotes(value)));
        }
        if ((value == "dtype" && tensor_->dtype) || (value == "shape" && tensor_->shape) ||
            (value == "data_offsets" && tensor_->offsets)) {
          return fail(text("tensor ", in_quotes(name_), " has the field ", in_quotes(value), " twice"));
        }
    }
    key_ = std::move(value);
    return true;
  }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception&) override {
    return fail(text("the header is not valid JSON at byte ", position));
  }

 private:
  enum class At { outside, top, tensor, metadata, array };

  std::string where() const { return text("tensor ", in_quotes(name_), ": ", key_); }
  bool fail(std::string sentence) {
    failure = std::move(sentence);
    return false;
  }
  bool unexpected(const char* found) {
    switch (at_) {
      case At::outside:
        return fail(text("the header is ", found, ": it must be an object"));
      case At::top:
        return fail(text(in_quotes(key_), " is ", found, ": it must be an object"));
      case At::metadata:
        return fail(text("'__metadata__' has ", found, " under ", in_quotes(key_), ": it maps strings to strings"));
      case At::array:
        return fail(text(where(), " holds ", found, ": it must hold integers"));
      case At::tensor:
        break;
    }
    return fail(text(where(), " is ", found, ": it must be ", key_ == "dtype" ? "a string" : "an array of integers"));
  }

  At at_ = At::outside;
  bool has_metadata_ = false;
  std::string name_, key_;
  Described* tensor_ = nullptr;
  std::vector<std::uint64_t>* numbers_ = nullptr;
};

std::uint64_t read_length(const std::byte* bytes) {
  std::uint64_t value = 0;
  for (int i = 7; i >= 0; --i) value = value << 8 | static_cast<std::uint64_t>(bytes[i]);
  return value;
}

// Checks one description against the `size` bytes of the data section at `data`.
SafeTensors::Entry checked_entry(const Check& check, const std::string& source, const std::string& name,
                                 const Described& described, const std::byte* data, std::uint64_t size) {
  const std::string where = text(source, ": tensor ", in_quotes(name));
  check.require(described.dtype.has_value(), where, " has no dtype");
  check.require(described.shape.has_value(), where, " has no shape");
  check.require(described.offsets.has_value(), where, " has no data_offsets");
  const auto* dtype = std::find_if(std::begin(kDTypes), std::end(kDTypes),
                                   [&](const FileDType& known) { return *described.dtype == known.name; });
  check.require(dtype != std::end(kDTypes), where, " has the unknown dtype ", in_quotes(*described.dtype));

  SafeTensors::Entry entry;
  entry.dtype = *described.dtype;
  std::uint64_t bytes = dtype->bytes;
  for (const std::uint64_t extent : *described.shape) {
    check.require(extent <= INT64_MAX, where, " has the extent ", extent, ": it must be below 2^63");
    check.require(!__builtin_mul_overflow(bytes, extent, &bytes), where, ": its shape's size in bytes passes 2^64");
    entry.shape.push_back(static_cast<std::int64_t>(extent));
  }

  check.require(described.offsets->size() == 2, where, " has ", described.offsets->size(),
                " data_offsets: it must have 2");
  const std::uint64_t begin = (*described.offsets)[0], end = (*described.offsets)[1];
  check.require(begin <= end, where, " begins at byte ", begin, " and ends at ", end, ": the end comes first");
  check.require(end <= size, where, " ends at byte ", end, ": the data section has ", size, " bytes");
  check.require(end - begin == bytes, where, " has ", end - begin, " bytes of data: its dtype and shape need ", bytes);
  entry.data = data + begin;
  entry.bytes = bytes;
  return entry;
}

// Every byte of the data section belongs to one tensor.
void check_cover(const Check& check, const std::string& source,
                 const std::map<std::string, SafeTensors::Entry>& entries, const std::byte* data, std::uint64_t size) {
  struct Range {
    std::uint64_t begin, end;
    const std::string* name;
  };
  std::vector<Range> ranges;
  for (const auto& [name, entry] : entries) {
    const auto begin = static_cast<std::uint64_t>(static_cast<const std::byte*>(entry.data) - data);
    ranges.push_back({begin, begin + entry.bytes, &name});
  }
  std::sort(ranges.begin(), ranges.end(),
            [](const Range& a, const Range& b) { return std::pair(a.begin, a.end) < std::pair(b.begin, b.end); });
  std::uint64_t covered = 0;
  for (const Range& range : ranges) {
    check.require(range.begin >= covered, source, ": tensor ", in_quotes(*range.name), " begins at byte ", range.begin,
                  ", inside another tensor that ends at ", covered);
    check.require(range.begin == covered, source, ": bytes ", covered, " to ", range.begin,
                  " of the data section belong to no tensor; the next one is ", in_quotes(*range.name));
    covered = range.end;
  }
  check.require(covered == size, source, ": bytes ", covered, " to ", size, " of the data section belong to no tensor");
}

}  // namespace

SafeTensors SafeTensors::read(const void* bytes, std::size_t size, const std::string& source) {
  const Check check("safetensors");
  // What these say of a file is that it is of another kind, or was cut off.
  const std::string other = text(source, ": not a safetensors file: ");
  check.require(size >= 8, other, "it has ", size, " bytes, and the header's length alone takes 8");
  const auto* begin = static_cast<const std::byte*>(bytes);
  const std::uint64_t length = read_length(begin);
  const auto* header = reinterpret_cast<const char*>(begin + 8);
  check.require(length <= kMaxIndexBytes, other, "its first 8 bytes say that the header has ", length,
                " bytes: at most ", kMaxIndexBytes, " are allowed");
  check.require(length > 0 && size > 8 && header[0] == '{', other, "the header does not begin with '{'");
  check.require(length <= size - 8, source, ": the header's length is ", length, " bytes: only ", size - 8,
                " follow it");

  // The JSON lexer takes a zero byte for the end of its input.
  check.require(std::memchr(header, 0, length) == nullptr, source, ": the header holds a zero byte");

  require_shallow_json("safetensors", source + ": the header", {header, length});
  HeaderReader reader;
  if (!json::sax_parse(header, header + length, &reader))
    throw Error(text("[safetensors] ", source, ": ", reader.failure));

  SafeTensors result;
  result.source_ = source;
  const std::byte* data = begin + 8 + length;
  const std::uint64_t data_size = size - 8 - length;
  for (const auto& [name, described] : reader.tensors) {
    result.entries_.emplace(name, checked_entry(check, source, name, described, data, data_size));
  }
  check_cover(check, source, result.entries_, data, data_size);
  result.metadata_ = std::move(reader.metadata);
  return result;
}

SafeTensors SafeTensors::parse(const void* data, std::size_t bytes) { return read(data, bytes, "bytes in memory"); }

SafeTensors SafeTensors::open(const std::string& path) {
  const RegularFile file("safetensors", path);
  const std::size_t size = file.size();
  if (size == 0) return read(nullptr, 0, path);
  void* address = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.fd(), 0);
  if (address == MAP_FAILED) throw RuntimeError(text("[safetensors] cannot map ", path, ": ", std::strerror(errno)));
  const std::shared_ptr<const void> mapping(address, [size](const void* p) { ::munmap(const_cast<void*>(p), size); });
  SafeTensors result = read(address, size, path);
  result.mapping_ = mapping;
  return result;
}

TensorView SafeTensors::tensor(const std::string& name) const {
  const Check check("safetensors");
  const auto found = entries_.find(name);
  check.require(found != entries_.end(), source_, " has no tensor ", in_quotes(name));
  const Entry& entry = found->second;
  const std::string where = text(source_, ": tensor ", in_quotes(name));

  static constexpr std::pair<const char*, DType> kViewable[] = {
      {"F32", DType::f32}, {"F16", DType::f16}, {"BF16", DType::bf16}, {"I32", DType::i32}, {"BOOL", DType::boolean}};
  const auto* dtype = std::find_if(std::begin(kViewable), std::end(kViewable),
                                   [&](const auto& known) { return entry.dtype == known.first; });
  check.require(dtype != std::end(kViewable), where, " is ", entry.dtype,
                ": only F32, F16, BF16, I32 and BOOL can be viewed");
  check.require(!entry.shape.empty() && entry.shape.size() <= kMaxRank, where, " has ", entry.shape.size(),
                " dimensions: 1 to ", kMaxRank, " can be viewed");
  const std::size_t alignment = size_of(dtype->second);
  check.require(reinterpret_cast<std::uintptr_t>(entry.data) % alignment == 0, where, " is not aligned to ", alignment,
                " bytes in the file, as its dtype needs to be viewed");

  TensorView view;
  view.data = const_cast<void*>(entry.data);
  view.dtype = dtype->second;
  view.rank = static_cast<int>(entry.shape.size());
  std::copy(entry.shape.begin(), entry.shape.end(), view.shape.begin());
  view.stride = contiguous_strides(view.rank, view.shape);
  return view;
}

}  // namespace heddle
