"""The main job on a laptop's scale: make a model, calibrate, plan, train, compare. `python -m megatrain.experiments.demo --out demo`

Each stage is a `megatrain` command, printed as it is run. The device's memory is capped below what the model needs, so that weights,
gradients and optimizer state really stream; on a machine without CUDA the device is a capped pool in RAM.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import sysconfig
import time
from pathlib import Path

from megatrain.experiments import cli, options
from megatrain.experiments.options import OneLineParser
from megatrain.experiments.script import ended
from megatrain.simulator.errors import UserError
from megatrain.simulator.units import format_bytes

BATCH, SEQUENCE, ACCUMULATION, LOSS_CHUNK = 2, 128, 1, 128
CAP = 0.2
"""device memory, as a share of what weights, gradients and optimizer state take"""
CUDA_WORKSPACE_BYTES = 112 * 2**20
"""device memory on top with CUDA: cuBLAS takes 32 MiB for every thread that multiplies, more than this whole model's slots"""
STEPS = 300


def make_model(folder: Path, seed: int) -> int:
    """A Qwen2-style model with random weights as a Hugging Face folder; returns its number of parameters."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    config = Qwen2Config(
        hidden_size=256, intermediate_size=896, num_hidden_layers=12, num_attention_heads=4, num_key_value_heads=2, vocab_size=320,
        tie_word_embeddings=False, max_position_embeddings=1024, use_cache=False, bos_token_id=256, eos_token_id=256,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def stage(number: int, title: str) -> None:
    print(f"\n=== {number}. {title}", flush=True)


def command(*words: object) -> None:
    """Runs one `megatrain` command as a user would; stops the demo where it fails."""
    arguments = [str(word) for word in words]
    print(f"$ megatrain {shlex.join(arguments)}", flush=True)
    status = cli.main(arguments)
    if status:
        sys.exit(status)


def clear(out: Path) -> None:
    """Makes room in `out`, if it is an earlier demo's. Raises UserError where it holds anything else."""
    marker = out / ".megatrain-demo"
    if (out.exists() and not out.is_dir()) or (out.is_dir() and any(out.iterdir()) and not marker.exists()):
        raise UserError(str(out), found="something that no demo has written", allowed="a new folder, or an earlier demo's", fix="name another one with --out")
    for name in ("input", "run"):
        shutil.rmtree(out / name, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    marker.touch()


def demo(out: Path, steps: int, device: str) -> None:
    """All stages; the result is in `out/run`."""
    start = time.monotonic()
    clear(out)
    stage(1, "a small model in Hugging Face format, and the Python standard library's sources as its corpus")
    model, corpus = out / "input" / "demo-11m", Path(sysconfig.get_paths()["stdlib"])
    parameters = make_model(model, seed=0)
    on_cuda = options.device(argparse.Namespace(device=device)).type == "cuda"
    cap = int(CAP * 16 * parameters) + (CUDA_WORKSPACE_BYTES if on_cuda else 0)
    print(f"{model}: {parameters / 1e6:.1f} M parameters; training state {format_bytes(16 * parameters)}; device memory capped at {format_bytes(cap)}")
    print(f"corpus: {corpus}")

    work = ["--batch", BATCH, "--seq", SEQUENCE, "--accumulation", ACCUMULATION, "--dtype", "bf16" if on_cuda else "fp32", "--loss-chunk", LOSS_CHUNK]
    hardware, plan, run = out / "input" / "hardware.toml", out / "input" / "plan.toml", out / "run"
    stage(2, "calibrate: measure this machine")
    command("calibrate", model, *work, "--device", device, "--out", hardware)
    stage(3, "plan: choose policy, slots, copy size and checkpoint interval for that memory")
    command("plan", model, "--hardware", hardware, "--device-memory", f"{cap}B", *work, "--out", plan)
    stage(4, "train: execute the plan")
    command("train", plan, "--data", corpus, "--steps", steps, "--device", device, "--out", run)
    stage(5, "compare: predicted against measured, as a table, as pictures and as a page for a browser")
    command("compare", run)
    command("report", run)
    stage(6, f"done in {time.monotonic() - start:.0f} s")
    for file in sorted(run.iterdir()):
        print(f"  {file}")


def main() -> int:
    parser = OneLineParser(prog="megatrain demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for the result (default demo)")
    parser.add_argument("--steps", type=options.whole("--steps"), default=STEPS, help=f"optimizer steps (default {STEPS})")
    options.add_device(parser)

    def run() -> int:
        args = parser.parse_args()
        demo(args.out, args.steps, args.device)
        return 0

    return ended("megatrain demo", run)


if __name__ == "__main__":
    sys.exit(main())
