#include "draw_ranks.h"

#include <algorithm>
#include <fstream>
#include <iostream>

#include "choices.h"
#include "explain_ranks.h"
#include "heddle/error.h"
#include "output.h"
#include "picture.h"

namespace heddle::cli {
namespace {

using distributed::Area;
using distributed::Plan;

constexpr std::int64_t kMostCells = 320;  // to a side
constexpr int kMostNamed = 16;            // ranks

// Neighbours differ, whatever the number of ranks.
std::string colour_of(int rank, int ranks) {
  return text("hsl(", rank * 360 / ranks, ",60%,", rank % 2 == 0 ? 45 : 60, "%)");
}

// The rows, or keys, that stand for each of so many equal parts of the whole: one of each part, at another place in
// each, so that rows dealt out in turns are not always the same rank's.
std::vector<std::int64_t> samples(std::int64_t length, std::int64_t cells) {
  std::vector<std::int64_t> out;
  for (std::int64_t cell = 0; cell < cells; ++cell) {
    const std::int64_t begin = cell * length / cells, size = (cell + 1) * length / cells - begin;
    out.push_back(begin + cell % size);
  }
  return out;
}

// The rank of each row.
std::vector<int> owners(const Plan& plan) {
  std::vector<int> out(static_cast<std::size_t>(plan.problem().rows));
  for (int rank = 0; rank < plan.problem().ranks; ++rank) {
    for (const distributed::Run& run : plan.runs(rank)) {
      for (std::int64_t n = 0; n < run.count; ++n) out[static_cast<std::size_t>(run.begin + run.step * n)] = rank;
    }
  }
  return out;
}

// Of an area of a document: rows and keys are the same positions.
bool attends(const Area& area, std::int64_t row, std::int64_t key) {
  if (row < area.q_begin || row >= area.q_end || key < area.key_begin || key >= area.key_end) return false;
  if (area.causal != Causal::none && key > row) return false;
  return (area.window_left < 0 || key >= row - area.window_left) &&
         (area.window_right < 0 || key <= row + area.window_right);
}

// Cells of one rank, in runs of a row.
class Cells {
 public:
  explicit Cells(int ranks) : of_rank_(static_cast<std::size_t>(ranks)) {}
  // owner: of each column of the row; -1: nobody's.
  void add_row(std::int64_t row, const std::vector<int>& owner) {
    for (std::size_t begin = 0, end; begin < owner.size(); begin = end) {
      for (end = begin + 1; end < owner.size() && owner[end] == owner[begin];) ++end;
      Tiles& tiles = owner[begin] < 0 ? empty_ : of_rank_[static_cast<std::size_t>(owner[begin])];
      tiles.add(static_cast<std::int64_t>(begin), row, static_cast<std::int64_t>(end - begin));
    }
  }
  std::string elements() const {
    std::string out = empty_.element(kEmptyColour);
    const int ranks = static_cast<int>(of_rank_.size());
    for (int rank = 0; rank < ranks; ++rank) {
      out += of_rank_[static_cast<std::size_t>(rank)].element(colour_of(rank, ranks));
    }
    return out;
  }

 private:
  Tiles empty_;
  std::vector<Tiles> of_rank_;
};

std::string svg(const Plan& plan, const std::string& caption) {
  const std::int64_t length = plan.problem().rows, cells = std::min(length, kMostCells);
  const int ranks = plan.problem().ranks;
  const std::vector<std::int64_t> at = samples(length, cells);
  const std::vector<int> owner = owners(plan);
  const auto owner_at = [&](std::int64_t cell) {
    return owner[static_cast<std::size_t>(at[static_cast<std::size_t>(cell)])];
  };
  Cells square(ranks), keys(ranks), rows(ranks);
  std::vector<int> of_keys;
  for (std::int64_t cell = 0; cell < cells; ++cell) {
    std::vector<int> of_row;
    const std::int64_t row = at[static_cast<std::size_t>(cell)];
    for (const std::int64_t key : at) {
      const bool met = std::ranges::any_of(plan.areas(), [&](const Area& area) { return attends(area, row, key); });
      of_row.push_back(met ? owner_at(cell) : -1);
    }
    square.add_row(cell, of_row);
    rows.add_row(cell, {owner_at(cell)});
    of_keys.push_back(owner_at(cell));
  }
  keys.add_row(0, of_keys);

  const int named = std::min(ranks, kMostNamed), lines = (named + 3) / 4;
  constexpr double kStrip = 12, kAt = 40;
  std::string out =
      picture_head(kPictureSide + 60, kPictureSide + 84 + 20.0 * (lines + (ranks > named ? 1 : 0)), caption);
  out += text("<text x=\"", kAt, "\" y=\"16\">keys, and rows from above: whose they are</text>\n");
  out += picture_of_tiles(kAt, 22, kPictureSide, kStrip, cells, 1, keys.elements());
  out += picture_of_tiles(kAt - 18, 40, kStrip, kPictureSide, 1, cells, rows.elements());
  out += picture_of_tiles(kAt, 40, kPictureSide, kPictureSide, cells, cells, square.elements());
  out += text("<text x=\"", kAt, "\" y=\"", kPictureSide + 62, "\">", caption, "</text>\n");
  double most = 0;
  for (int rank = 0; rank < ranks; ++rank) most = std::max(most, plan.pairs(rank));
  for (int rank = 0; rank < named; ++rank) {
    const double x = kAt + 160.0 * (rank % 4), y = kPictureSide + 73 + 20.0 * (rank / 4);
    out += text("<rect x=\"", x, "\" y=\"", y, "\" width=\"12\" height=\"12\" fill=\"", colour_of(rank, ranks),
                "\"/><text x=\"", x + 17, "\" y=\"", y + 11, "\">rank ", rank, ", work ",
                most > 0 ? fixed(plan.pairs(rank) / most, 3) : "0", "</text>\n");
  }
  if (ranks > named) {
    out += text("<text x=\"", kAt, "\" y=\"", kPictureSide + 84 + 20.0 * lines, "\">and ", ranks - named,
                " more</text>\n");
  }
  return out + "</svg>\n";
}

}  // namespace

void DrawRanks::add_to(CLI::App& verb) {
  verb.add_option("--ranks", ranks, "Instead of a pattern who computes what in a plan for so many processes");
  add_order_flag(verb, order);
  verb.add_option("--documents", documents, "Lengths of documents that --length is packed of, beside --ranks");
  verb.add_option("--window", window, "Keys that each row sees to its left and right, -1 is open; beside --ranks")
      ->expected(2);
}

distributed::Problem DrawRanks::problem_of(std::int64_t length, bool causal) const {
  distributed::Problem out{.rows = length, .ranks = ranks};
  out.causal = causal ? Causal::top_left : Causal::none;
  if (!window.empty()) out.window_left = window[0], out.window_right = window[1];
  out.cu_seqlens = bounds_of(documents);
  out.order = distributed::order_named(order, "draw");
  return out;
}

void DrawRanks::run(std::int64_t length, bool causal, const std::string& out, bool json) const {
  const Plan plan(problem_of(length, causal));
  std::string words = text(ranks, " ranks, ", order, ", ", length, " rows");
  if (!documents.empty()) words += text(" of ", documents.size(), " documents");
  if (causal) words += ", causal";
  if (!window.empty()) words += text(", window ", window[0], " ", window[1]);
  words += ": balance " + fixed(plan.balance(), 3);
  write_picture(out, svg(plan, words));
  if (json) {
    std::cout
        << Json{{"ranks", ranks}, {"order", order}, {"length", length}, {"causal", causal}, {"balance", plan.balance()},
                {"out", out}}
               .dump(2)
        << '\n';
    return;
  }
  std::cout << out << ": " << words << '\n';
}

void write_picture(const std::string& out, const std::string& picture) {
  std::ofstream file(out, std::ios::binary);
  file << picture;
  file.close();
  if (!file) throw RuntimeError("--out is " + out + ": it cannot be written");
}

}  // namespace heddle::cli
