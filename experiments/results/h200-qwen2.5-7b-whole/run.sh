#!/usr/bin/env bash
# Predict and run one optimizer step of Qwen2.5-7B's shape, 32 x 1024 tokens, compiled layers, whatever policy the planner finds. Needs an H200 and 128 GiB of host memory.
# run.sh OUT: calibrates, plans, trains 8 steps (2 of warm-up) on the Python library's sources from random weights, and compares; then again with 24 GiB of device memory.
set -euo pipefail
out=${1:?a folder for the result}
megatrain=(python3 -m megatrain.experiments.cli)
work=(--batch 32 --seq 1024 --dtype bf16 --compile --plain-packing)
mkdir -p "$out"
"${megatrain[@]}" calibrate qwen2.5-7b "${work[@]}" --name h200 --host-memory 118GiB --out "$out/hardware.toml"
corpus=$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["stdlib"])')
for case in whole 24GiB; do
    limit=()
    [ "$case" = whole ] || limit=(--device-memory "$case")
    "${megatrain[@]}" plan qwen2.5-7b --hardware "$out/hardware.toml" "${work[@]}" "${limit[@]}" --out "$out/$case.toml"
    "${megatrain[@]}" train "$out/$case.toml" --init random --data "$corpus" --steps 8 --rate 1e-5 --no-export --out "$out/$case"
    "${megatrain[@]}" compare "$out/$case"
done
