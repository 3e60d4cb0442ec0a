#!/usr/bin/env bash
# All that is measured on one H200, in one run: bash benchmarks/h200.sh OUT_DIR [MODEL_FOLDER]
# Needs PyTorch with CUDA, Triton and this project's dependencies on PYTHONPATH; about nine minutes. MODEL_FOLDER: a
# Llama-3-8B config.json with a tokenizer, for the whole service (weights are random).
set -u
out=$1 model=${2:-}
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
step() { # seconds, name, command…
  local limit=$1 name=$2
  shift 2
  timeout "$limit" "$@" 2>&1 | tee "$out/$name.log"
}
step 150 tests python3 -m pytest -q -c /dev/null --rootdir=. -p no:cacheprovider -W ignore tests/gpu --tb=short
step 75 decode_step python3 -m benchmarks.decode_step
step 40 decode_attention python3 -m benchmarks.decode_attention --page 64
step 60 unified_max python3 -m benchmarks.unified_max
step 35 prefill_attention python3 -m benchmarks.prefill_attention
step 40 linears python3 -m benchmarks.linears
step 20 glue python3 -m benchmarks.glue
step 140 engine python3 -m benchmarks.engine --rounds 2 --out "$out/engine.json"
if [ -n "$model" ]; then
  step 90 service python3 -m benchmarks.service_gpu --model "$model" --new 256 --context 2048 --out "$out/service.json"
fi
