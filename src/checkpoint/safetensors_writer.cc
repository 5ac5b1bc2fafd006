#include "checkpoint/safetensors_writer.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string_view>

#include <unistd.h>

#include <nlohmann/json.hpp>

#include "core/check.h"
#include "core/files.h"
#include "core/in_quotes.h"

namespace heddle {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

std::size_t element_bytes(std::string_view dtype) {
  if (dtype.ends_with("64")) return 8;
  if (dtype.ends_with("32")) return 4;
  return dtype.ends_with("16") ? 2 : 1;
}

}  // namespace

SafeTensorsWriter::SafeTensorsWriter(const std::string& path, std::vector<Tensor> tensors,
                                     const std::map<std::string, std::string>& metadata)
    : path_(path), file_("safetensors", path, OutputFile::Existing::refuse) {
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const Tensor& a, const Tensor& b) { return element_bytes(a.dtype) > element_bytes(b.dtype); });
  // Text, entry by entry: an ordered_json looks through all its keys before it adds one.
  std::string header = "{";
  const auto add = [&](const std::string& name, const std::string& value) {
    header += text(header.size() > 1 ? "," : "", json(name).dump(), ":", value);
  };
  if (!metadata.empty()) add("__metadata__", json(metadata).dump());
  std::uint64_t end = 0;
  for (const Tensor& tensor : tensors) {
    const bool added = places_.emplace(tensor.name, Place{end, tensor.bytes, false}).second;
    Check("safetensors").require(added, path_, ": tensor ", in_quotes(tensor.name), " would be there twice");
    const ordered_json entry = {
        {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {end, end + tensor.bytes}}};
    add(tensor.name, entry.dump());
    end += tensor.bytes;
  }
  header += "}";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  const std::uint64_t length = header.size();
  for (auto& [name, place] : places_) place.offset += 8 + length;
  std::string begin;
  for (int i = 0; i < 8; ++i) begin += static_cast<char>(length >> (8 * i) & 0xff);

  file_.reserve(8 + length + end);
  file_.write_at(0, begin.data(), begin.size());
  file_.write_at(8, header.data(), header.size());
}

void SafeTensorsWriter::write(const std::string& name, const void* data, std::size_t bytes) {
  const Check check("safetensors");
  const auto found = places_.find(name);
  check.require(found != places_.end(), path_, ": tensor ", in_quotes(name), " was not announced");
  Place& place = found->second;
  check.require(place.bytes == bytes, path_, ": tensor ", in_quotes(name), " has ", bytes, " bytes: ", place.bytes,
                " were announced");
  file_.write_at(place.offset, data, bytes);
  place.written = true;
}

void SafeTensorsWriter::finish() {
  for (const auto& [name, place] : places_) {
    Check("safetensors").require(place.written, path_, ": tensor ", in_quotes(name), " was not written");
  }
  file_.finish();
}

void write_file(const std::string& path, const std::string& content) {
  OutputFile file("safetensors", path, OutputFile::Existing::refuse);
  file.write(content.data(), content.size());
  file.finish();
}

void copy_file(const std::string& from, const std::string& to) {
  constexpr std::size_t kStep = 1 << 20;
  const RegularFile source("safetensors", from);
  OutputFile file("safetensors", to, OutputFile::Existing::refuse);
  std::string piece(kStep, '\0');
  while (true) {
    const ssize_t got = ::read(source.fd(), piece.data(), piece.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw RuntimeError(text("[safetensors] cannot read ", from, ": ", std::strerror(errno)));
    if (got == 0) break;
    file.write(piece.data(), static_cast<std::size_t>(got));
  }
  file.finish();
}

}  // namespace heddle
