#!/usr/bin/env bash
# Cross-compiles the CPU kernels for Arm and runs the case table with their NEON target under qemu-user.
set -euo pipefail
cd "$(dirname "$0")/.."

build=build/neon
cmake -S tests/neon -B "$build" -G Ninja -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ >/dev/null
cmake --build "$build"
pids=()
for shard in 0 1; do
  qemu-aarch64-static "$build/neon_check" "$build/results.$shard.json" $shard 2 &
  pids+=($!)
done
failed=0
for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
exit $failed
