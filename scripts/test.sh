#!/usr/bin/env bash
# Builds from clean and runs every test: C++, Python, then C++ again under the sanitizers; fuzzes for a minute where clang is.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh
rm -rf build/release build/sanitize build/fuzz
cmake --preset release
cmake --build --preset release
ctest --preset release
PYTHONPATH=build/release/python .venv/bin/python -m pytest -q tests/python
cmake --preset sanitize
cmake --build --preset sanitize
ctest --preset sanitize
if command -v clang++ >/dev/null; then
  cmake --preset fuzz
  cmake --build --preset fuzz
  for target in build/fuzz/tests/fuzz/*_fuzz; do
    "$target" -max_total_time=30 -print_final_stats=1
  done
else
  echo "clang++ is not installed: the fuzz targets were not run (scripts/setup.sh --dev installs it)."
fi
