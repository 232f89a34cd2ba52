#!/usr/bin/env bash
# Predicts and runs steps of Qwen2.5-3B's shape on a GPU, with 64 GiB of host memory or more:
# 32 x 1024 tokens, policy double_buffer, AdamW on the CPU.
#
# run.sh OUT calibrates, plans, trains 7 steps (2 of warm-up) from random weights on the sources of
# the Python library, and compares.
set -euo pipefail
out=${1:?a folder for the result}
megatrain=(python3 -m megatrain.experiments.cli)
work=(--batch 32 --seq 1024 --dtype bf16 --plain-packing)
mkdir -p "$out"
"${megatrain[@]}" calibrate qwen2.5-3b "${work[@]}" --name h200 --host-memory 110GiB \
    --out "$out/hardware.toml"
"${megatrain[@]}" plan qwen2.5-3b --hardware "$out/hardware.toml" --policy double_buffer \
    "${work[@]}" --out "$out/plan.toml"
corpus=$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["stdlib"])')
"${megatrain[@]}" train "$out/plan.toml" --init random --data "$corpus" --steps 7 --rate 1e-4 \
    --no-export --out "$out/run"
"${megatrain[@]}" compare "$out/run"
