#include "distributed/pieces.h"

#include <map>
#include <tuple>

namespace heddle::distributed {
namespace {

// Part of a run of rows against part of a run of keys: one sequence of a packed call.
struct Match {
  std::int64_t q, q_count, key, key_count;  // where they lie
  std::int64_t q_offset, key_offset;
  double pairs;
};

// Matches that one call may serve: the same options, and rows and keys of one wave each, so that they mostly ascend
// together.
using Group = std::tuple<int, int, Causal, std::int64_t, std::int64_t, std::int64_t, std::int64_t>;

template <class Use>
void for_each_match(const std::vector<Area>& areas, const Cuts& rows, const Cuts& keys, const Use& use) {
  for (std::size_t n = 0; n < areas.size(); ++n) {
    const Area& area = areas[n];
    const Band band(area);
    for (const Run& q : rows.of(n)) {
      for (const Run& key : keys.of(n)) {
        const Line all_rows = row_line(area, q.begin, q.step, q.count);
        const Line met = band.keys_met(all_rows, key_line(area, key.begin, key.step, key.count));
        if (met.count == 0) continue;
        const Line meeting = band.rows_that_meet(all_rows, met);
        if (meeting.count == 0) continue;
        if (!use(area, band, q, all_rows, meeting, key, met)) return;
      }
    }
  }
}

// A call under construction; sequences that are all gap, rows without keys or keys without rows, keep it packed.
void add_sequence(Piece& piece, std::int64_t q_count, std::int64_t key_count, std::int64_t q_offset,
                  std::int64_t key_offset) {
  piece.cu_seqlens_q.push_back(static_cast<std::int32_t>(piece.cu_seqlens_q.back() + q_count));
  piece.cu_seqlens_k.push_back(static_cast<std::int32_t>(piece.cu_seqlens_k.back() + key_count));
  piece.q_offset.push_back(static_cast<std::int32_t>(q_offset));
  piece.key_offset.push_back(static_cast<std::int32_t>(key_offset));
  piece.max_seqlen_q = std::max(piece.max_seqlen_q, q_count);
  piece.max_seqlen_k = std::max(piece.max_seqlen_k, key_count);
  piece.q_end += q_count;
  piece.key_end += key_count;
}

void add_match(Piece& piece, const Match& match) {
  if (piece.cu_seqlens_q.empty()) {
    piece.q_begin = piece.q_end = match.q;
    piece.key_begin = piece.key_end = match.key;
    piece.cu_seqlens_q = piece.cu_seqlens_k = {0};
  }
  if (match.q > piece.q_end) add_sequence(piece, match.q - piece.q_end, 0, 0, 0);
  if (match.key > piece.key_end) add_sequence(piece, 0, match.key - piece.key_end, 0, 0);
  // Positions are differences: where one would be negative, both are moved.
  const std::int64_t moved = std::max<std::int64_t>(-std::min(match.q_offset, match.key_offset), 0);
  add_sequence(piece, match.q_count, match.key_count, match.q_offset + moved, match.key_offset + moved);
  piece.pairs += match.pairs;
}

}  // namespace

bool any_piece(const std::vector<Area>& areas, const Cuts& rows, const Cuts& keys) {
  bool any = false;
  for_each_match(areas, rows, keys, [&](const auto&...) {
    any = true;
    return false;
  });
  return any;
}

bool cover_once(const std::vector<Piece>& pieces, std::int64_t rows) {
  for (const Piece& piece : pieces) rows -= piece.q_end - piece.q_begin;
  return rows == 0 && std::ranges::all_of(pieces, &Piece::first);
}

std::vector<Piece> PieceMaker::pieces(const Cuts& rows, const Cuts& keys) {
  std::map<Group, std::vector<Match>> groups;
  for_each_match(areas_, rows, keys,
                 [&](const Area& area, const Band& band, const Run& q, const Line& all_rows, const Line& meeting,
                     const Run& key, const Line& met) {
                   const Causal causal = area.causal == Causal::none ? Causal::none : Causal::top_left;
                   const Line all_keys = key_line(area, key.begin, key.step, key.count);
                   groups[{q.wave, key.wave, causal, area.window_left, area.window_right, q.step, key.step}].push_back(
                       {.q = q.local + (meeting.first - all_rows.first) / q.step,
                        .q_count = meeting.count,
                        .key = key.local + (met.first - all_keys.first) / key.step,
                        .key_count = met.count,
                        .q_offset = meeting.first,
                        .key_offset = met.first,
                        .pairs = band.pairs(meeting, met)});
                   return true;
                 });
  std::vector<Piece> out;
  for (auto& [group, matches] : groups) {
    std::ranges::sort(matches, {}, [](const Match& m) { return std::pair(m.q, m.key); });
    std::vector<Piece> calls;
    for (const Match& match : matches) {
      auto call = std::ranges::find_if(
          calls, [&](const Piece& piece) { return piece.q_end <= match.q && piece.key_end <= match.key; });
      if (call == calls.end()) {
        call = calls.emplace(calls.end());
        std::tie(std::ignore, std::ignore, call->causal, call->window_left, call->window_right, call->q_step,
                 call->key_step) = group;
      }
      add_match(*call, match);
    }
    out.insert(out.end(), calls.begin(), calls.end());
  }
  for (Piece& piece : out) piece.first = cover(piece);
  return out;
}

bool PieceMaker::cover(const Piece& piece) {
  const auto begin = covered_.begin() + piece.q_begin, end = covered_.begin() + piece.q_end;
  const bool first = std::find(begin, end, true) == end;
  std::fill(begin, end, true);
  return first;
}

std::vector<Piece> one_sequence_each(const std::vector<Piece>& pieces) {
  std::vector<Piece> out;
  for (const Piece& piece : pieces) {
    for (std::size_t n = 0; n < piece.q_offset.size(); ++n) {
      if (piece.q_offset.size() == 1) {
        out.push_back(piece);
        break;
      }
      Piece one = piece;
      one.q_begin = piece.q_begin + piece.cu_seqlens_q[n];
      one.q_end = piece.q_begin + piece.cu_seqlens_q[n + 1];
      if (one.q_begin == one.q_end) continue;
      one.key_begin = piece.key_begin + piece.cu_seqlens_k[n];
      one.key_end = piece.key_begin + piece.cu_seqlens_k[n + 1];
      one.cu_seqlens_q = {0, static_cast<std::int32_t>(one.q_end - one.q_begin)};
      one.cu_seqlens_k = {0, static_cast<std::int32_t>(one.key_end - one.key_begin)};
      one.q_offset = {piece.q_offset[n]};
      one.key_offset = {piece.key_offset[n]};
      one.max_seqlen_q = one.q_end - one.q_begin;
      one.max_seqlen_k = one.key_end - one.key_begin;
      out.push_back(one);
    }
  }
  return out;
}

}  // namespace heddle::distributed
