#!/usr/bin/env bash
# Profiles of four shapes on one H200, in one run: bash benchmarks/profile_h200.sh OUT [SECONDS]
# Random weights and no tokenizer. Needs PyTorch with CUDA, Triton, transformers and this project's dependencies on
# PYTHONPATH. A shape is a process of its own with a limit of its own, and what it had measured by then is kept; all end
# within SECONDS (default 200). Leaves OUT/profile-SHAPE.json and OUT/profile.log.
set -u
out=$1 end=$((SECONDS + ${2:-200}))
mkdir -p "$out"
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 OMP_NUM_THREADS=8 TOKENIZERS_PARALLELISM=false
export HF_HUB_OFFLINE=1
profile() { # seconds, shape, arguments…
  local limit=$1 shape=$2 left=$((end - SECONDS - 8))
  shift 2
  [ "$limit" -gt "$left" ] && limit=$left
  [ "$limit" -lt 15 ] && { echo "$shape: no time left" | tee -a "$out/profile.log"; return; }
  echo "== $shape, at most $limit s" | tee -a "$out/profile.log"
  local started=$SECONDS
  timeout -k 8 "$limit" python3 -m diptych.cli profile "$shape" --device cuda --load-format dummy --threads 8 \
    --out "$out/profile-${shape,,}.json" "$@" >>"$out/profile.log" 2>&1
  echo "== $shape: status $? after $((SECONDS - started)) s" | tee -a "$out/profile.log"
  tail -n 2 "$out/profile.log" | head -n 1 | cut -c 1-1500
}
profile 60 Llama-2-7B --context 256,3072 --rounds 6 --show operators,latency,cache,table6
profile 55 Llama-3-8B --context 256,1024,3072 --rounds 6 --show operators,latency,mha
profile 50 Qwen3-30B-A3B --context 256,2048 --rounds 5 --new 16 --show operators,latency
profile 50 Mixtral-8x7B --context 256,2048 --rounds 5 --new 16 --show operators,latency
