"""Write a checkpoint as a Hugging Face folder: config, tokenizer, generation config, safetensors. No GPU, and hardly any memory.

From a run's folder the newest checkpoint that is as it was written; `AutoModelForCausalLM.from_pretrained` loads what comes out.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatrain.experiments import options


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a folder written by `megatrain train`, or one of its checkpoints")
    parser.add_argument("--out", type=Path, required=True, metavar="MODEL", help="a folder that does not exist")
    parser.add_argument("--from-step", type=options.whole("--from-step"), metavar="N", help="this checkpoint of the run, not the newest")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), help="fp32 are the masters (default: as the run's config says, else what it computes in)")
    parser.add_argument("--model", metavar="SOURCE", help="config, tokenizer and generation config from this folder or hub name, not from the plan's")


def run(args: argparse.Namespace) -> int:
    from megatrain.runtime.training.exporting import export_run

    done = export_run(args.run, args.out, step=args.from_step, dtype=args.dtype, model=args.model, on_note=print)
    print(f"wrote {args.out}: the weights after step {done.step}, {done.parameters:,} parameters in {done.dtype}")
    return 0
