#!/usr/bin/env bash
# The main job on a bare Debian 12 machine: install, build, replay policies at equal bytes on the
# bundled trace of a real model, print the table.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/install.sh build
mkdir -p build
log=build/demo.log
quietly() { "$@" >>$log 2>&1 || { tail -n 40 $log >&2; exit 1; }; }
: >$log
quietly cmake --preset release -DBUILD_TESTING=OFF -DKVREPLAY_BENCHMARKS=OFF
quietly cmake --build --preset release --target kvreplay

# tau = q0.5 puts the gate at the median confidence of the recorded run. Budgets are scaled so that
# every policy's mean bytes equal those of a window of 256 entries.
build/release/replay/kvreplay replay traces/samples/smollm2-1k.h5 \
  -p full \
  -p window:budget=256 \
  -p streaming:budget=256 \
  -p h2o:budget=256 \
  -p tova:budget=256 \
  -p confkv:high=256,low=256 \
  -p confkv:tau=q0.5,high=128,low=384 \
  -p confkv:tau=q0.5,high=128,low=384,shrink=2 \
  -p confkv-l:tau=q0.5,high=128,low=384,shrink=2 \
  -p confkv-l:tau=q0.5,high=128,low=384,shrink=2+int8:window=64 \
  --match-bytes window:budget=256 "$@"
