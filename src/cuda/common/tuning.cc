#include "cuda/common/tuning.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <map>
#include <vector>

#include "core/check.h"
#include "core/files.h"
#include "core/json.h"

namespace heddle::cuda {
namespace {

using Json = nlohmann::json;

constexpr int kMostMultiprocessors = 1 << 16;

// The characters of a text; where the reader stands is told by what it read last.
class Reader {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = char;

  Reader(const char* at, const char** last) : at_(at), last_(last) {}
  char operator*() const { return *(*last_ = at_); }
  Reader& operator++() {
    ++at_;
    return *this;
  }
  Reader operator++(int) {
    const Reader before = *this;
    ++at_;
    return before;
  }
  bool operator==(const Reader& other) const { return at_ == other.at_; }
  bool operator!=(const Reader& other) const { return at_ != other.at_; }

 private:
  const char* at_;
  const char** last_;
};

class TuningFile {
 public:
  explicit TuningFile(const std::string& path) : path_(path) {
    try {
      text_ = read_file("heddle", path, kMaxConfigBytes);
    } catch (const RuntimeError&) {  // there is none, or it is a folder or a pipe
    }
    if (text_.empty()) refuse("there is no such file that can be read, or it is empty");
    last_ = text_.data();
    if (const std::size_t at = json_too_deep_at(text_); at != std::string::npos) {
      last_ += at;
      refuse_at_line(line(), text("arrays and objects are nested more than ", kMaxJsonDepth, " deep"));
    }
    parse();
  }

  TunedOn made() const {
    // First: what else there is in a file of another form is no mistake.
    if (json_.is_object() && json_.contains("schema") && json_["schema"] != kTuningSchema) {
      refuse_at(path_of({"schema"}), text("'schema' is ", json_["schema"].dump(), ": it must be ", kTuningSchema));
    }
    require_members(json_, "", "the file", {"schema", "gpu", "version", "kernels"});
    const Json& gpu = json_["gpu"];
    require_members(gpu, path_of({"gpu"}), "'gpu'", {"name", "compute_capability", "multiprocessors"});
    const Json& multiprocessors = gpu["multiprocessors"];
    if (!multiprocessors.is_number_integer() || multiprocessors < 1 || multiprocessors > kMostMultiprocessors) {
      refuse_at(path_of({"gpu", "multiprocessors"}),
                text("'multiprocessors' is ", multiprocessors.dump(), ": it must be from 1 to ", kMostMultiprocessors));
    }
    return {.gpu = word({"gpu", "name"}),
            .capability = word({"gpu", "compute_capability"}),
            .multiprocessors = multiprocessors.get<int>(),
            .version = word({"version"})};
  }

  void apply(CostTable& table) const {
    const Json& kernels = json_["kernels"];
    if (!kernels.is_object()) {
      refuse_at(path_of({"kernels"}), text("'kernels' is ", kernels.dump(), ": it must be an object"));
    }
    for (const auto& [name, costs] : kernels.items()) {
      const auto line =
          std::find_if(table.begin(), table.end(), [&, &key = name](const NamedCost& x) { return x.name == key; });
      if (line == table.end()) {
        refuse_at(path_of({"kernels", name}), text("'", name, "' is no kernel of this version"));
      }
      if (!costs.is_object()) {
        refuse_at(path_of({"kernels", name}),
                  text("'", name, "' is ", costs.dump(), ": it must be an object of costs"));
      }
      for (const auto& [field, value] : costs.items()) set(name, field, value, line->cost);
    }
  }

 private:
  void parse() {
    std::vector<std::string> keys;
    const auto note_lines = [&](int depth, Json::parse_event_t event, const Json& parsed) {
      if (event != Json::parse_event_t::key) return true;
      keys.resize(static_cast<std::size_t>(depth - 1));
      keys.push_back(parsed.get<std::string>());
      if (!lines_.emplace(path_of(keys), line()).second)
        refuse_at_line(line(), text("'", keys.back(), "' is given twice"));
      return true;
    };
    try {
      json_ = Json::parse(Reader(text_.data(), &last_), Reader(text_.data() + text_.size(), &last_), note_lines);
    } catch (const Json::exception& error) {
      std::string what = error.what();  // "[json.exception.…] parse error at line 3, column 7: …"
      if (const std::size_t end = what.find("] "); end != std::string::npos) what.erase(0, end + 2);
      if (const std::size_t end = what.find(": "); what.starts_with("parse error") && end != std::string::npos) {
        what.erase(0, end + 2);
      }
      refuse_at_line(line(), text("it must be JSON: ", what));
    }
  }

  // `value`, which lies at `path`, is an object of these members and no others.
  void require_members(const Json& value, const std::string& path, const std::string& name,
                       std::initializer_list<const char*> members) const {
    std::string known;
    for (const char* member : members) known += (known.empty() ? "" : ", ") + std::string(member);
    if (!value.is_object()) refuse_at(path, text(name, " must be an object of ", known));
    for (const auto& [key, inner] : value.items()) {
      if (std::find(members.begin(), members.end(), key) == members.end()) {
        refuse_at(path + path_of({key}), text("'", key, "' is unknown: ", name, " has ", known));
      }
    }
    for (const char* member : members) {
      if (!value.contains(member)) refuse_at(path, text("'", member, "' is missing: ", name, " has ", known));
    }
  }

  std::string word(const std::vector<std::string>& keys) const {
    const Json* value = &json_;
    for (const std::string& key : keys) value = &(*value)[key];
    if (!value->is_string()) {
      refuse_at(path_of(keys), text("'", keys.back(), "' is ", value->dump(), ": it must be a string"));
    }
    return value->get<std::string>();
  }

  void set(const std::string& name, const std::string& field, const Json& value, Cost& cost) const {
    const std::string at = path_of({"kernels", name, field});
    double* const out = field == "fixed"   ? &cost.fixed
                        : field == "flops" ? &cost.flops
                        : field == "bytes" ? &cost.bytes
                                           : nullptr;
    if (out == nullptr) {
      refuse_at(at, text("'", field, "' of '", name, "' is unknown: it must be fixed, flops or bytes"));
    }
    const double least = field == "fixed" ? 0 : 1;
    if (!value.is_number() || !(value.get<double>() >= least)) {
      refuse_at(at,
                text("'", field, "' of '", name, "' is ", value.dump(), ": it must be a number of at least ", least));
    }
    *out = value.get<double>();
  }

  static std::string path_of(const std::vector<std::string>& keys) {
    std::string out;
    for (const std::string& key : keys) out += key + '\n';
    return out;
  }

  // Of the character read last.
  std::ptrdiff_t line() const { return 1 + std::count(text_.data(), last_, '\n'); }

  [[noreturn]] void refuse(const std::string& what) const {
    throw Error(text("[heddle] HEDDLE_TUNING is ", path_, ": ", what, "; `heddle tune` writes such a file"));
  }
  [[noreturn]] void refuse_at_line(std::ptrdiff_t line, const std::string& what) const {
    refuse(text("line ", line, ": ", what));
  }
  [[noreturn]] void refuse_at(const std::string& keys, const std::string& what) const {
    const auto found = lines_.find(keys);
    refuse_at_line(found != lines_.end() ? found->second : 1, what);
  }

  const std::string& path_;
  std::string text_;
  const char* last_ = nullptr;
  Json json_;
  std::map<std::string, std::ptrdiff_t> lines_;  // of each key, by path_of() it
};

}  // namespace

Tuning read_tuning(const std::string& path, const CostTable& table, std::string_view version) {
  const TuningFile file(path);
  Tuning out{file.made(), table};
  if (out.made.version == version) file.apply(out.costs);
  return out;
}

}  // namespace heddle::cuda
