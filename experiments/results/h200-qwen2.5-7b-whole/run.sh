#!/usr/bin/env bash
# Predicts and runs steps of Qwen2.5-7B's shape on an H200, with 128 GiB of host memory:
# 32 x 1024 tokens, compiled layers, and the policy that the planner chooses.
#
# run.sh OUT calibrates. Then it plans, trains 8 steps (2 of warm-up) from random weights on the
# sources of the Python library, and compares: first with the whole device, then with 24 GiB of it.
set -euo pipefail
out=${1:?a folder for the result}
megatrain=(python3 -m megatrain.experiments.cli)
work=(--batch 32 --seq 1024 --dtype bf16 --compile --plain-packing)
mkdir -p "$out"
"${megatrain[@]}" calibrate qwen2.5-7b "${work[@]}" --name h200 --host-memory 118GiB \
    --out "$out/hardware.toml"
corpus=$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["stdlib"])')
for case in whole 24GiB; do
    limit=()
    [ "$case" = whole ] || limit=(--device-memory "$case")
    "${megatrain[@]}" plan qwen2.5-7b --hardware "$out/hardware.toml" "${work[@]}" "${limit[@]}" \
        --out "$out/$case.toml"
    "${megatrain[@]}" train "$out/$case.toml" --init random --data "$corpus" --steps 8 \
        --rate 1e-5 --no-export --out "$out/$case"
    "${megatrain[@]}" compare "$out/$case"
done
