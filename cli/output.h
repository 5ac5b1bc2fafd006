// What the command prints: aligned text tables, units, and colours when a person is watching.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace heddle::cli {

// Standard output is a terminal and NO_COLOR is not set.
bool colours();
// The texts, coloured if colours().
std::string green(const std::string& text);
std::string red(const std::string& text);
std::string bold(const std::string& text);
std::string dim(const std::string& text);

enum class Align : std::uint8_t { left, right };

// Rows of cells under a heading, each column as wide as its widest cell.
class Table {
 public:
  struct Column {
    std::string name;
    Align align = Align::left;
  };
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}
  void add(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  void print() const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

// 1536 -> "1.50 KiB"
std::string bytes_text(double bytes);
// Seconds with three digits and the unit that suits: "1.23 ms"
std::string seconds_text(double seconds);
std::string fixed(double value, int digits);

// "512", "512KiB", "1.5 GiB", "2GB" to bytes; throws Error.
std::int64_t bytes_from(const std::string& text);

}  // namespace heddle::cli
