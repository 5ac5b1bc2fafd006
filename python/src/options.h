// Tuples of options: a table of their items for each operation that has one. Python has the same tables, in
// heddle._options and heddle._linear_options, and compares names when it is imported.
#pragma once

#include <array>
#include <string_view>
#include <type_traits>

#include "convert.h"
#include "core/check.h"
#include "heddle/error.h"

namespace heddle::python {

// One item: its name, how errors call it, and how it gets into the library's options.
template <class Options>
struct OptionItem {
  using Take = void (*)(Arguments& arguments, nb::handle item, const char* words, Options& out);

  const char* name;
  const char* words;
  Take take;

  constexpr OptionItem(const char* name, Take take, const char* words = nullptr)
      : name(name), words(words != nullptr ? words : name), take(take) {}
};

template <class Member, class Options>
Options options_with(Member Options::*);
template <auto kMember>
using OptionsOf = decltype(options_with(kMember));

template <auto kMember>
void take_array(Arguments& arguments, nb::handle item, const char* words, OptionsOf<kMember>& out) {
  out.*kMember = arguments.read(item, words);
}
// Also of an enumeration, whose values Python has as numbers.
template <auto kMember>
void take_integer(Arguments& arguments, nb::handle item, const char* words, OptionsOf<kMember>& out) {
  auto& member = out.*kMember;
  member = static_cast<std::remove_reference_t<decltype(member)>>(arguments.integer(item, words));
}
template <auto kMember>
void take_number(Arguments& arguments, nb::handle item, const char* words, OptionsOf<kMember>& out) {
  out.*kMember = static_cast<float>(arguments.number(item, words));
}
template <auto kMember>
void take_flag(Arguments& arguments, nb::handle item, const char* words, OptionsOf<kMember>& out) {
  out.*kMember = arguments.flag(item, words);
}
// Of what Python's code has made a bool.
template <auto kMember>
void take_truth(Arguments&, nb::handle item, const char*, OptionsOf<kMember>& out) {
  out.*kMember = truth(item);
}
template <auto kMember>
void take_text(Arguments& arguments, nb::handle item, const char* words, OptionsOf<kMember>& out) {
  out.*kMember = arguments.string(item, words);
}
// An enumeration by the names that the library has for it.
template <auto kMember, auto kNamed>
void take_named(Arguments& arguments, nb::handle item, const char* words, OptionsOf<kMember>& out) {
  out.*kMember = kNamed(arguments.string(item, words));
}
void take_scale(Arguments& arguments, nb::handle item, const char* words, AttentionOptions& out);
void take_dropout_p(Arguments& arguments, nb::handle item, const char* words, AttentionOptions& out);
void take_dropout_seed(Arguments& arguments, nb::handle item, const char* words, AttentionOptions& out);

// Item by item. other_words: what errors call the item `other` for this caller.
template <class Options, std::size_t kCount>
void take_options(const std::array<OptionItem<Options>, kCount>& table, Arguments& arguments, const nb::tuple& items,
                  Options& out, std::size_t other = kCount, const char* other_words = nullptr) {
  if (items.size() != kCount) throw Error(text("[heddle] the options must be a tuple of ", kCount, " items"));
  for (std::size_t i = 0; i < kCount; ++i) {
    const OptionItem<Options>& option = table[i];
    option.take(arguments, NB_TUPLE_GET_ITEM(items.ptr(), static_cast<Py_ssize_t>(i)),
                i == other ? other_words : option.words, out);
  }
}

template <class Options, std::size_t kCount>
nb::tuple names_of(const std::array<OptionItem<Options>, kCount>& table) {
  nb::list names;
  for (const OptionItem<Options>& option : table) names.append(option.name);
  return nb::tuple(names);
}

// Of attention.
inline constexpr std::array kOptionItems{
    OptionItem("alibi_slopes", take_array<&AttentionOptions::alibi_slopes>),
    OptionItem("bias", take_array<&AttentionOptions::bias>),
    OptionItem("mask", take_array<&AttentionOptions::mask>),
    OptionItem("sink", take_array<&AttentionOptions::sink>),
    OptionItem("cu_seqlens_q", take_array<&AttentionOptions::cu_seqlens_q>),
    OptionItem("cu_seqlens_k", take_array<&AttentionOptions::cu_seqlens_k>),
    OptionItem("seqused_q", take_array<&AttentionOptions::seqused_q>),
    OptionItem("seqused_k", take_array<&AttentionOptions::seqused_k>),
    OptionItem("page_table", take_array<&AttentionOptions::page_table>),
    OptionItem("cache_batch_idx", take_array<&AttentionOptions::cache_batch_idx>),
    OptionItem("cache_leftpad", take_array<&AttentionOptions::cache_leftpad>),
    OptionItem("draft_mask", take_array<&AttentionOptions::draft_mask>),
    OptionItem("q_offset", take_array<&AttentionOptions::q_offset>),
    OptionItem("key_offset", take_array<&AttentionOptions::key_offset>),
    OptionItem("q_scale", take_array<&AttentionOptions::q_scale>),
    OptionItem("k_scale", take_array<&AttentionOptions::k_scale>),
    OptionItem("v_scale", take_array<&AttentionOptions::v_scale>),
    OptionItem("scale", take_scale),
    OptionItem("causal", take_integer<&AttentionOptions::causal>),
    OptionItem("window_left", take_integer<&AttentionOptions::window_left>, "window's left side"),
    OptionItem("window_right", take_integer<&AttentionOptions::window_right>, "window's right side"),
    OptionItem("q_step", take_integer<&AttentionOptions::q_step>),
    OptionItem("key_step", take_integer<&AttentionOptions::key_step>),
    OptionItem("softcap", take_number<&AttentionOptions::softcap>),
    OptionItem("dropout_p", take_dropout_p),
    OptionItem("dropout_seed", take_dropout_seed),
    OptionItem("max_seqlen_q", take_integer<&AttentionOptions::max_seqlen_q>),
    OptionItem("max_seqlen_k", take_integer<&AttentionOptions::max_seqlen_k>),
    OptionItem("batch_invariant", take_truth<&AttentionOptions::batch_invariant>),
    OptionItem("deterministic", take_truth<&AttentionOptions::deterministic>),
    OptionItem("float32_out", take_truth<&AttentionOptions::float32_out>),
    OptionItem("precision", take_integer<&AttentionOptions::precision>),
    OptionItem("method", take_text<&AttentionOptions::method>),
    OptionItem("force", take_text<&AttentionOptions::force>),
};

// Where the item of this name lies in the tuple.
consteval std::size_t option_index(std::string_view name) {
  std::size_t index = 0;
  while (kOptionItems.at(index).name != name) ++index;
  return index;
}

}  // namespace heddle::python
