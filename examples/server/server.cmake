# heddle_server, where its libraries are found: cpp-httplib (by CMake as its project installs it, by pkg-config as Debian's
# libcpp-httplib-dev does), CLI11 and nlohmann-json.
find_package(httplib QUIET)
find_package(CLI11 QUIET)
if(NOT httplib_FOUND AND NOT CMAKE_CROSSCOMPILING)
  find_package(PkgConfig QUIET)
  if(PkgConfig_FOUND)
    pkg_check_modules(cpp_httplib QUIET IMPORTED_TARGET cpp-httplib)
  endif()
  if(cpp_httplib_FOUND)
    add_library(httplib::httplib ALIAS PkgConfig::cpp_httplib)
  endif()
endif()
if(NOT TARGET httplib::httplib OR NOT CLI11_FOUND)
  message(STATUS "examples/server is not built: it needs cpp-httplib and CLI11 (Debian: libcpp-httplib-dev, libcli11-dev)")
  return()
endif()

add_executable(heddle_server server/main.cc server/scheduler.cc server/decoder.cc)
set_target_properties(heddle_server PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/server)
# What it spends its time in is the library.
target_compile_options(heddle_server PRIVATE -Wall -Wextra -O1)
target_link_libraries(heddle_server PRIVATE heddle::heddle httplib::httplib CLI11::CLI11 nlohmann_json::nlohmann_json)
