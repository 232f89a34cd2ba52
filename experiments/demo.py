"""Runs the whole project on a small model: calibrate, plan, train and compare.

    python -m megatrain.experiments.demo --out demo

Each stage is a `megatrain` command, which is printed before it runs. GPU memory is capped below
what the model needs, so weights, gradients and optimizer state are streamed. On a machine without
CUDA, a capped pool in RAM is used instead of GPU memory.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import sysconfig
import time
from pathlib import Path

from megatrain.experiments.cli import main as cli
from megatrain.experiments.cli import options
from megatrain.experiments.cli.options import OneLineParser
from megatrain.experiments.cli.program import run_program
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.units import format_bytes

BATCH, SEQUENCE, ACCUMULATION, LOSS_CHUNK = 2, 128, 1, 128
CAP = 0.2
"""Device memory as a share of the bytes of weights, gradients and optimizer state."""
CUDA_WORKSPACE_BYTES = 112 * 2**20
"""Additional device memory with CUDA. cuBLAS allocates 32 MiB for each thread that multiplies
matrices, which is more than all slots of this small model."""
STEPS = 300


def make_model(folder: Path, seed: int) -> int:
    """Writes a small Qwen2 model with random weights as a Hugging Face folder.

    Returns its number of parameters.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    config = Qwen2Config(
        hidden_size=256,
        intermediate_size=896,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=320,
        tie_word_embeddings=False,
        max_position_embeddings=1024,
        use_cache=False,
        bos_token_id=256,
        eos_token_id=256,
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def stage(number: int, title: str) -> None:
    """Prints the heading of a stage."""
    print(f"\n=== {number}. {title}", flush=True)


def command(*words: object) -> None:
    """Prints and runs one `megatrain` command. If it fails, the demo exits with its status."""
    arguments = [str(word) for word in words]
    print(f"$ megatrain {shlex.join(arguments)}", flush=True)
    status = cli.main(arguments)
    if status:
        sys.exit(status)


def clear(out: Path) -> None:
    """Creates the folder `out`, or removes the results of an earlier demo from it.

    Raises UserError if `out` is a file, or a folder with files that no demo has written.
    """
    marker = out / ".megatrain-demo"
    if (out.exists() and not out.is_dir()) or (
        out.is_dir() and any(out.iterdir()) and not marker.exists()
    ):
        raise UserError(
            str(out),
            found="files that no demo has written",
            allowed="a new folder, or one of an earlier demo",
            fix="choose another folder with --out",
        )
    for name in ("input", "run"):
        shutil.rmtree(out / name, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    marker.touch()


def demo(out: Path, steps: int, device: str) -> None:
    """Runs all stages. The result is in `out/run`."""
    start = time.monotonic()
    clear(out)
    stage(
        1,
        "make a small model in Hugging Face format; its training data are the sources of Python's"
        " standard library",
    )
    model, corpus = out / "input" / "demo-11m", Path(sysconfig.get_paths()["stdlib"])
    parameters = make_model(model, seed=0)
    on_cuda = options.device(argparse.Namespace(device=device)).type == "cuda"
    cap = int(CAP * 16 * parameters) + (CUDA_WORKSPACE_BYTES if on_cuda else 0)
    print(
        f"{model}: {parameters / 1e6:.1f} M parameters; training state"
        f" {format_bytes(16 * parameters)}; device memory capped at {format_bytes(cap)}"
    )
    print(f"corpus: {corpus}")

    work = [
        "--batch",
        BATCH,
        "--seq",
        SEQUENCE,
        "--accumulation",
        ACCUMULATION,
        "--dtype",
        "bf16" if on_cuda else "fp32",
        "--loss-chunk",
        LOSS_CHUNK,
    ]
    hardware, plan, run = out / "input" / "hardware.toml", out / "input" / "plan.toml", out / "run"
    stage(2, "calibrate: measure this machine")
    command("calibrate", model, *work, "--device", device, "--out", hardware)
    stage(3, "plan: choose policy, slots, copy size and checkpoint interval for the capped memory")
    command(
        "plan", model, "--hardware", hardware, "--device-memory", f"{cap}B", *work, "--out", plan
    )
    stage(4, "train: execute the plan")
    random = ("--init", "random", "--lr", "1e-3")
    command(
        *("train", plan, "--data", corpus, "--steps", steps, *random),
        *("--device", device, "--out", run),
    )
    stage(5, "compare: predicted and measured, as a table, as pictures and as an HTML page")
    command("compare", run)
    command("report", run)
    stage(6, f"done in {time.monotonic() - start:.0f} s")
    for file in sorted(run.iterdir()):
        print(f"  {file}")


def main() -> int:
    """Parses the options, runs the demo, and returns the exit status."""
    parser = OneLineParser(prog="megatrain demo", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("demo"), help="folder for the result (default demo)"
    )
    parser.add_argument(
        "--steps",
        type=options.whole("--steps"),
        default=STEPS,
        help=f"optimizer steps (default {STEPS})",
    )
    options.add_device(parser)

    def run() -> int:
        args = parser.parse_args()
        demo(args.out, args.steps, args.device)
        return 0

    return run_program("megatrain demo", run)


if __name__ == "__main__":
    sys.exit(main())
