#include "output.h"

#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iostream>

#include "heddle/error.h"

namespace heddle::cli {
namespace {

std::string coloured(const char* code, const std::string& text) {
  return colours() ? std::string("\x1b[") + code + "m" + text + "\x1b[0m" : text;
}

// Columns that the text takes: escape sequences none, a UTF-8 character one.
std::size_t width(const std::string& text) {
  std::size_t columns = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\x1b') {
      while (i < text.size() && text[i] != 'm') ++i;
    } else if ((static_cast<unsigned char>(text[i]) & 0xc0) != 0x80) {
      ++columns;
    }
  }
  return columns;
}

}  // namespace

bool colours() {
  static const bool on = isatty(STDOUT_FILENO) == 1 && std::getenv("NO_COLOR") == nullptr;
  return on;
}

std::string green(const std::string& text) { return coloured("32", text); }
std::string red(const std::string& text) { return coloured("31", text); }
std::string bold(const std::string& text) { return coloured("1", text); }
std::string dim(const std::string& text) { return coloured("2", text); }

void Table::print() const {
  std::vector<std::size_t> widths;
  for (std::size_t c = 0; c < columns_.size(); ++c) {
    std::size_t widest = width(columns_[c].name);
    for (const auto& row : rows_) widest = std::max(widest, width(row[c]));
    widths.push_back(widest);
  }
  const auto line = [&](const auto& cell, const auto& style) {
    std::string out;
    for (std::size_t c = 0; c < columns_.size(); ++c) {
      const std::string gap(widths[c] - width(cell(c)), ' ');
      const bool last = c + 1 == columns_.size();
      out += columns_[c].align == Align::right ? gap + style(cell(c)) : style(cell(c)) + (last ? "" : gap);
      if (!last) out += "  ";
    }
    std::cout << out << '\n';
  };
  line([&](std::size_t c) { return columns_[c].name; }, bold);
  for (const auto& row : rows_) {
    line([&](std::size_t c) { return row[c]; }, [](const std::string& text) { return text; });
  }
}

std::string fixed(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

std::string bytes_text(double bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  int unit = 0;
  while (bytes >= 1024 && unit < 6) {
    bytes /= 1024;
    ++unit;
  }
  return fixed(bytes, unit == 0 ? 0 : 2) + " " + units[unit];
}

std::string seconds_text(double seconds) {
  if (!(seconds < 1.0)) return fixed(seconds, 3) + " s";
  if (seconds >= 1e-3) return fixed(seconds * 1e3, 3) + " ms";
  return fixed(seconds * 1e6, 3) + " us";
}

std::int64_t bytes_from(const std::string& text) {
  char* unit = nullptr;
  const double value = std::strtod(text.c_str(), &unit);
  while (*unit == ' ') ++unit;
  struct Unit {
    const char* name;
    double factor;
  };
  constexpr Unit kUnits[] = {{"", 1},         {"B", 1},      {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30},
                             {"TiB", 0x1p40}, {"kB", 1e3},   {"KB", 1e3},     {"MB", 1e6},     {"GB", 1e9},
                             {"TB", 1e12},    {"K", 0x1p10}, {"M", 0x1p20},   {"G", 0x1p30}};
  for (const Unit& known : kUnits) {
    if (unit != text.c_str() && std::string(unit) == known.name && value >= 0 && value * known.factor < 0x1p62) {
      return static_cast<std::int64_t>(value * known.factor);
    }
  }
  throw Error("'" + text + "' is not an amount of memory: write a number and B, KiB, MiB, GiB, kB, MB or GB");
}

}  // namespace heddle::cli
