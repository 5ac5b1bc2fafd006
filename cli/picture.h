// Pictures of rows and keys as SVG.
#pragma once

#include <cstdint>
#include <string>

#include "core/check.h"

namespace heddle::cli {

constexpr double kPictureSide = 640;  // pixels of the longer side of the square of rows and keys
constexpr const char* kEmptyColour = "#e9edf2";

inline std::string escaped(const std::string& words) {
  std::string out;
  for (const char c : words) out += c == '&' ? "&amp;" : c == '<' ? "&lt;" : std::string(1, c);
  return out;
}

// Rectangles of one colour, as a path of tiles.
class Tiles {
 public:
  void add(std::int64_t column, std::int64_t row, std::int64_t width) {
    path_ += text("M", column, " ", row, "h", width, "v1h-", width, "z");
  }
  std::string element(const std::string& colour) const {
    return path_.empty() ? "" : text("<path fill=\"", colour, "\" d=\"", path_, "\"/>\n");
  }

 private:
  std::string path_;
};

// What a picture begins with; it ends with "</svg>\n".
inline std::string picture_head(double width, double height, const std::string& title) {
  return text("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"", width, "\" height=\"", height,
              "\" font-family=\"sans-serif\" font-size=\"13\" fill=\"#1c1c1c\">\n<title>", title,
              "</title>\n<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n");
}

// `columns` by `rows` tiles at (x, y), stretched over width and height. elements: their paths.
inline std::string picture_of_tiles(double x, double y, double width, double height, std::int64_t columns,
                                    std::int64_t rows, const std::string& elements) {
  return text("<svg x=\"", x, "\" y=\"", y, "\" width=\"", width, "\" height=\"", height, "\" viewBox=\"0 0 ", columns,
              " ", rows, "\" preserveAspectRatio=\"none\" shape-rendering=\"crispEdges\">\n", elements, "</svg>\n");
}

}  // namespace heddle::cli
