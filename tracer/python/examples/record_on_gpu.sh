#!/usr/bin/env bash
# Records a model on a GPU in every way that kvtrace knows, checks each trace in double, and prints
# the overhead, measured against the same passes without recording.
#   record_on_gpu.sh MODEL_DIR TEXT_FILE KVREPLAY [PYTHON]     needs torch with CUDA, transformers
# The last lines belong into docs/RECORDING.md, with the names of the GPU and of the model.
set -euo pipefail
model=$1 text=$2 kvreplay=$3 python=${4:-python3}
here=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH}
"$python" -c 'import torch; print(torch.cuda.get_device_name(), torch.__version__)'

record() { # NAME ARGUMENTS...
  local name=$1
  shift
  "$python" -m kvtrace record --hf "$model" --text "$text" -o "$work/$name.h5" --device cuda \
    --baseline "$@" 2>>"$work/rates"
  "$kvreplay" inspect "$work/$name.h5" --check --quiet | tail -n 1
}

record forced-bf16 --dtype bfloat16 --max-tokens 2048 --prompt-length 1024 --block 512
record forced-fp16 --dtype float16 --max-tokens 2048 --prompt-length 1024 --block 512
record eager-bf16 --dtype bfloat16 --attn eager --max-tokens 1024 --generate 128
record generate-bf16 --dtype bfloat16 --max-tokens 1024 --generate 256 --with wo,residual,value_norm
record decode-rows --dtype bfloat16 --max-tokens 4096 --generate 256 --rows decode
"$kvreplay" replay "$work/generate-bf16.h5" -p full -p h2o:budget=256 -p streaming:budget=256 --quiet
sed "s|$work/||" "$work/rates"
