#!/bin/sh
# Compiler launcher for kernels: runs the command, and fails when the assembler spilled registers to local memory or took
# asynchronous matrix products one by one. Both make a tuned kernel several times slower without another sign.
output=$("$@" 2>&1)
status=$?
bad=$(printf '%s\n' "$output" | grep -E '[1-9][0-9]* bytes (stack frame|spill)|wgmma.mma_async instructions are serialized')
if [ $status -ne 0 ]; then
  printf '%s\n' "$output" >&2
  exit $status
fi
printf '%s\n' "$output" | grep -vE '^ptxas info|bytes stack frame|^$' >&2
if [ -n "$bad" ]; then
  printf '%s\n' "$output" >&2
  echo "strict_ptxas.sh: registers are spilled, or matrix products serialised, in a kernel that must not" >&2
  exit 1
fi
exit 0
