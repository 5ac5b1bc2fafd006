// heddle draw: a picture of the tiles that a pattern keeps, or of who computes what in a plan.
#include <algorithm>
#include <cstdint>
#include <iostream>
#include <memory>
#include <string>

#include "choices.h"
#include "core/check.h"
#include "draw_ranks.h"
#include "heddle/error.h"
#include "heddle/patterns.h"
#include "output.h"
#include "picture.h"
#include "problem.h"
#include "verbs.h"

namespace heddle::cli {
namespace {

constexpr std::int64_t kMostTiles = 2048;  // to a side
constexpr const char *kWhole = "#1f4e79", *kPartial = "#7fb0de";

std::int64_t ceil_div(std::int64_t x, std::int64_t y) { return (x + y - 1) / y; }

struct Draw {
  CommonFlags common;
  DrawRanks plan;
  std::string expression, out;
  std::int64_t length = 4096, block_size = 64, query_rows = 64, head = 0;
  bool causal = false;

  void run() {
    require_at_least_one(length, "--length");
    if (plan.ranks != 0) {
      if (!expression.empty()) throw Error("pattern is given beside --ranks: a picture is of one or the other");
      return plan.run(length, causal, out, common.json);
    }
    if (!plan.documents.empty()) throw Error("--documents is given without --ranks: it is about a plan");
    if (!plan.window.empty())
      throw Error("--window is given without --ranks: the pattern says it, as local(left, right)");
    if (expression.empty()) throw Error("pattern is missing: an expression, or --ranks for a plan");
    const Pattern pattern = Pattern::parse(expression);
    const PatternLength sequence{length, length};
    const PatternLists lists =
        pattern_lists({&pattern, 1}, 1, {&sequence, 1},
                      {.causal = causal, .block_size = block_size, .query_rows = query_rows, .first_head = head});
    const std::int64_t rows = lists.lists, columns = ceil_div(length, block_size);
    if (std::max(rows, columns) > kMostTiles) {
      throw Error(text("--length is ", length, ": that is ", rows, " x ", columns, " tiles, and a picture has at most ",
                       kMostTiles, " to a side; draw a shorter sequence"));
    }
    write_picture(out, svg(pattern, lists, rows, columns));
    tell(pattern, lists);
  }

  std::string svg(const Pattern& pattern, const PatternLists& lists, std::int64_t rows, std::int64_t columns) const {
    Tiles dark, light, empty;
    for (std::int64_t row = 0; row < rows; ++row) {
      const std::int64_t there =
          causal ? std::min(columns, (std::min(length, (row + 1) * query_rows) - 1) / block_size + 1) : columns;
      empty.add(0, row, there);
      const std::int32_t* const offsets = lists.offsets.data() + row;
      for (std::int32_t n = offsets[0]; n < offsets[1];) {
        const std::int32_t begin = n;
        const bool all = lists.mask_ids[static_cast<std::size_t>(n)] < 0;
        const auto goes_on = [&](std::int32_t at) {
          const auto k = static_cast<std::size_t>(at);
          return at < offsets[1] && lists.blocks[k] == lists.blocks[k - 1] + 1 && (lists.mask_ids[k] < 0) == all;
        };
        while (goes_on(++n)) {
        }
        (all ? dark : light).add(lists.blocks[static_cast<std::size_t>(begin)], row, n - begin);
      }
    }
    const double most = static_cast<double>(std::max(rows, columns));
    const double width = kPictureSide * static_cast<double>(columns) / most,
                 height = kPictureSide * static_cast<double>(rows) / most;
    const std::string caption = escaped(pattern.text()) + (causal ? ", causal" : "");
    const std::string kept = fixed(100 * share(lists), 2) + " % of the pairs";
    std::string out = picture_head(kPictureSide + 40, height + 92, text(caption, ", ", length, " rows and keys"));
    out += picture_of_tiles(20, 20, width, height, columns, rows,
                            empty.element(kEmptyColour) + dark.element(kWhole) + light.element(kPartial));
    out += text("<text x=\"20\" y=\"", height + 44, "\">", caption, "</text>\n");
    double x = 20;
    const auto entry = [&](const char* colour, const std::string& words) {
      out += text("<rect x=\"", x, "\" y=\"", height + 57, "\" width=\"12\" height=\"12\" fill=\"", colour,
                  "\"/><text x=\"", x + 17, "\" y=\"", height + 68, "\">", words, "</text>\n");
      x += 135;
    };
    entry(kWhole, std::to_string(lists.whole_tiles) + " whole");
    entry(kPartial, std::to_string(lists.partial_tiles) + " partial");
    entry(kEmptyColour, "left out");
    out += text("<text x=\"", x, "\" y=\"", height + 68, "\">", kept, "; tiles of ", query_rows, " x ", block_size,
                "</text>\n</svg>\n");
    return out;
  }

  static double share(const PatternLists& lists) {
    return static_cast<double>(lists.pairs) / static_cast<double>(std::max<std::int64_t>(lists.all_pairs, 1));
  }

  void tell(const Pattern& pattern, const PatternLists& lists) const {
    if (common.json) {
      std::cout << Json{{"pattern", pattern.text()},
                        {"length", length},
                        {"causal", causal},
                        {"block_size", block_size},
                        {"query_rows", query_rows},
                        {"head", head},
                        {"whole_tiles", lists.whole_tiles},
                        {"partial_tiles", lists.partial_tiles},
                        {"all_tiles", lists.all_tiles},
                        {"pairs", share(lists)},
                        {"out", out}}
                       .dump(2)
                << '\n';
      return;
    }
    std::cout << out << ": " << pattern.text() << (causal ? ", causal" : "") << ", " << lists.whole_tiles
              << " whole and " << lists.partial_tiles << " partial of " << lists.all_tiles << " tiles, "
              << fixed(100 * share(lists), 2) << " % of the pairs\n";
  }
};

}  // namespace

void add_draw(CLI::App& app) {
  CLI::App* verb =
      app.add_subcommand("draw", "A picture (SVG) of the tiles that a pattern keeps, or of who computes what");
  examples(*verb, {"heddle draw \"local(128) | strided(32) | sink(4)\" --length 4096 --out picture.svg",
                   "heddle draw \"local(256) | random(3)\" --causal --head 2 --length 8192 --out picture.svg",
                   "heddle draw --ranks 4 --order balanced --documents 3000 1096 --causal --out picture.svg"});
  const auto self = std::make_shared<Draw>();
  self->common.add_to(*verb, false);
  verb->add_option("pattern", self->expression,
                   "local(left, right), strided(step), dilated(n, step), sink(n), columns(j, ...), rows(p, ...), "
                   "diagonals(d, ...), random(n, size=64, seed=0), joined by | and &");
  self->plan.add_to(*verb);
  verb->add_option("-o,--out", self->out, "The file to write")->required();
  verb->add_option("--length", self->length, "Rows and keys")->capture_default_str();
  verb->add_flag("--causal", self->causal, "A row attends no key behind itself");
  verb->add_option("--block-size", self->block_size, "Keys of a tile: 16, 32, 64 or 128")->capture_default_str();
  verb->add_option("--query-rows", self->query_rows, "Rows of a tile")->capture_default_str();
  verb->add_option("--head", self->head, "Which head, where they differ (random)")->capture_default_str();
  verb->callback([self] { self->run(); });
}

}  // namespace heddle::cli
