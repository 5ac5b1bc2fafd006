#include "problem/index_rules.h"

#include "core/check.h"

namespace heddle {

const char* name_of(IndexName name) {
  switch (name) {
    case IndexName::none:
      break;
    case IndexName::q:
      return "q";
    case IndexName::k:
      return "k";
    case IndexName::v:
      return "v";
    case IndexName::x:
      return "x";
    case IndexName::k_cache:
      return "k_cache";
    case IndexName::v_cache:
      return "v_cache";
    case IndexName::k_tail:
      return "k_tail";
    case IndexName::v_tail:
      return "v_tail";
    case IndexName::cu_seqlens_q:
      return "cu_seqlens_q";
    case IndexName::cu_seqlens_k:
      return "cu_seqlens_k";
    case IndexName::cu_seqlens:
      return "cu_seqlens";
    case IndexName::max_seqlen_q:
      return "max_seqlen_q";
    case IndexName::max_seqlen_k:
      return "max_seqlen_k";
    case IndexName::longest:
      return "longest";
    case IndexName::seqused_q:
      return "seqused_q";
    case IndexName::seqused_k:
      return "seqused_k";
    case IndexName::seqlens:
      return "seqlens";
    case IndexName::offsets:
      return "offsets";
    case IndexName::cache_leftpad:
      return "cache_leftpad";
    case IndexName::page_table:
      return "page_table";
    case IndexName::cache_batch_idx:
      return "cache_batch_idx";
    case IndexName::row_idx:
      return "row_idx";
    case IndexName::page:
      return "page";
    case IndexName::cache_row:
      return "cache row";
    case IndexName::pages_hold:
      return "page_table's pages hold";
    case IndexName::rows_hold:
      return "the cache's rows hold";
    case IndexName::sequences_hold:
      return "the cache's sequences hold";
    case IndexName::tables_number:
      return "cos's rows number";
    case IndexName::q_offset:
      return "q_offset";
    case IndexName::key_offset:
      return "key_offset";
    case IndexName::columns_number:
      return "the columns of bias and mask number";
    case IndexName::k_pooled:
      return "k_pooled";
    case IndexName::seqused:
      return "seqused";
    case IndexName::lengths:
      return "lengths";
    case IndexName::positions_number:
      return "positions number";
  }
  return "";
}

void append(std::string& out, IndexName name) { out += name_of(name); }

namespace {

std::string from_0_to(const BadIndex& bad) {
  switch (bad.rule) {
    case IndexRule::length:
      return text("the sequence's length, ", bad.limit);
    case IndexRule::used_length:
      return text("the used length, ", bad.limit);
    case IndexRule::among_rows:
      return text(bad.limit - 1, " (", bad.whose, " has ", bad.limit, " rows)");
    case IndexRule::among_pages:
      return text(bad.limit - 1, " (", bad.whose, " has ", bad.limit, " pages)");
    default:
      return text(bad.limit - 1);
  }
}

}  // namespace

std::string sentence(const BadIndex& bad) {
  switch (bad.rule) {
    case IndexRule::kept:
      return "";
    case IndexRule::zero:
      return text(bad.tensor, "[0] is ", bad.value, ": it must be 0");
    case IndexRule::ordered:
      return text(bad.tensor, " decreases from ", bad.other, " to ", bad.value, " at entry ", bad.i,
                  ": it must never decrease");
    case IndexRule::total:
      return text(bad.tensor, " ends at ", bad.value, ": it must end at ", bad.whose, "'s first extent, ", bad.limit);
    case IndexRule::longest:
      return text(bad.whose, " is ", bad.limit, ": the longest sequence has ", bad.value);
    case IndexRule::not_negative:
      return text(bad.tensor, "[", bad.i, "] is ", bad.value, ": it must be at least 0");
    case IndexRule::fits:
      return text(bad.tensor, "[", bad.i, "] is ", bad.value, ": with ", bad.other, " rows ",
                  bad.step > 1 ? text(bad.step, " apart ") : "", "sequence ", bad.i, " ends at position ",
                  bad.value + positions_of_rows(bad.other, bad.step), ", and ", bad.whose, " ", bad.limit);
    case IndexRule::own_slot:
      return text("position ", bad.value, " of sequence ", bad.i, " and position ", bad.other, " of sequence ", bad.j,
                  " are both slot ", bad.slot, " of ", bad.whose, " ", bad.limit,
                  ": the rows of one call must go to slots of their own");
    case IndexRule::own_row:
    case IndexRule::own_page:
      return text("sequences ", bad.i, " and ", bad.j, " both write to ",
                  bad.rule == IndexRule::own_row ? "row " : "page ", bad.limit, ": they must have their own");
    default:
      break;
  }
  const std::string where = bad.j >= 0 ? text(bad.i, ", ", bad.j) : text(bad.i);
  return text(bad.tensor, "[", where, "] is ", bad.value, ": it must be from 0 to ", from_0_to(bad));
}

}  // namespace heddle
