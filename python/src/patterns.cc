#include "heddle/patterns.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "convert.h"

namespace heddle::python {
namespace {

std::vector<Pattern> parsed(const std::vector<std::string>& expressions) {
  std::vector<Pattern> out;
  for (const std::string& expression : expressions) out.push_back(Pattern::parse(expression));
  return out;
}

// An array that owns its memory.
template <class Element, class Stored>
nb::object array_of(std::vector<Stored> values, std::initializer_list<std::size_t> shape) {
  static_assert(sizeof(Element) == sizeof(Stored));
  values.reserve(1);  // so that an empty one has an address
  auto* kept = new std::vector<Stored>(std::move(values));
  const nb::capsule owner(kept, [](void* memory) noexcept { delete static_cast<std::vector<Stored>*>(memory); });
  return nb::cast(nb::ndarray<nb::numpy, Element>(kept->data(), shape, owner));
}

nb::tuple lists(const std::vector<std::string>& expressions, std::int64_t heads,
                const std::vector<std::pair<std::int64_t, std::int64_t>>& sequences, bool causal,
                std::int64_t block_size, std::int64_t query_rows, bool packed) {
  PatternLists out;
  {
    nb::gil_scoped_release released;
    std::vector<PatternLength> lengths;
    for (const auto& [rows, keys] : sequences) lengths.push_back({rows, keys});
    out = pattern_lists(parsed(expressions), heads, lengths,
                        {.causal = causal, .block_size = block_size, .query_rows = query_rows, .packed = packed});
  }
  const auto words = static_cast<std::size_t>((block_size + 31) / 32), rows = static_cast<std::size_t>(query_rows);
  const std::size_t masks = out.masks.size() / (words * rows), entries = out.blocks.size();
  const std::size_t units = static_cast<std::size_t>(out.units), ends = static_cast<std::size_t>(out.lists + 1);
  return nb::make_tuple(array_of<std::int32_t>(std::move(out.offsets), {units, ends}),
                        array_of<std::int32_t>(std::move(out.blocks), {entries}),
                        array_of<std::int32_t>(std::move(out.mask_ids), {entries}),
                        array_of<std::int32_t>(std::move(out.masks), {masks, rows, words}),
                        nb::make_tuple(out.whole_tiles, out.partial_tiles, out.all_tiles, out.pairs, out.all_pairs));
}

// bool [heads, rows, keys].
nb::object mask(const std::vector<std::string>& expressions, std::int64_t heads, std::int64_t rows, std::int64_t keys,
                bool causal) {
  const std::vector<Pattern> patterns = parsed(expressions);
  std::vector<std::uint8_t> out;
  out.reserve(static_cast<std::size_t>(heads * rows * keys));
  for (std::int64_t h = 0; h < heads; ++h) {
    const Pattern& pattern = patterns.size() == 1 ? patterns[0] : patterns.at(static_cast<std::size_t>(h));
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < keys; ++j) out.push_back(pattern.keeps({rows, keys}, causal, h, i, j) ? 1 : 0);
    }
  }
  return array_of<bool>(std::move(out), {static_cast<std::size_t>(heads), static_cast<std::size_t>(rows),
                                         static_cast<std::size_t>(keys)});
}

}  // namespace

void bind_patterns(nb::module_& module) {
  module.def(
      "pattern_text", [](const std::string& expression) { return Pattern::parse(expression).text(); },
      nb::arg("expression"));
  module.def(
      "pattern_by_head", [](const std::string& expression) { return Pattern::parse(expression).by_head(); },
      nb::arg("expression"));
  module.def("pattern_lists", &lists, nb::arg("expressions"), nb::arg("heads"), nb::arg("sequences"), nb::arg("causal"),
             nb::arg("block_size"), nb::arg("query_rows"), nb::arg("packed"));
  module.def("pattern_mask", &mask, nb::arg("expressions"), nb::arg("heads"), nb::arg("rows"), nb::arg("keys"),
             nb::arg("causal"));
}

}  // namespace heddle::python
