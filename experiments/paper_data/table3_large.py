"""Trains a model of Table 3's job on a GPU, in two ways: `python -m
megatrain.experiments.paper_data.table3_large PLAN --seed SEED --out FILE`

The model of the plan, with random weights, is trained on sources of Python's standard library. It
is then fine-tuned on the text of Python's help topics, at each learning rate, in two ways: by this
runtime, with the plan's exact state, and with bf16 weights alone and fp32 moments, as in the
published code. Both start from the same bf16 weights, read the same batches, and clip by the global
norm. Bytes are tokens. The last 16 KiB of the help topics are held out.

The seed sets the initial weights and the order of the data. Each seed is a command of its own, so
several GPUs can share the seeds. The held-out text must have at least one batch, so a batch has
fewer than 16,384 tokens.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatrain.experiments.benchmark import commit
from megatrain.experiments.cli import options
from megatrain.experiments.cli.program import run_program
from megatrain.experiments.paper_data.table3 import (
    HELD,
    SETTINGS,
    Masters,
    Plain,
    Run,
    evaluate,
    plain,
    split_text,
)
from megatrain.runtime.data.corpus.corpus import Corpus
from megatrain.runtime.execution.executor import Executor
from megatrain.runtime.files.model_files import Weights, random_weights
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.machine import describe
from megatrain.runtime.optimizer.adamw import round_to_bf16
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import write_json
from megatrain.simulator.schedule.plan import Plan

EXACT, BF16 = "exact", "bf16 weights alone"
_BEFORE_RATE = 3e-4
"""Learning rate of the training before the fine-tuning."""


def own(plan: Plan, weights: Weights, corpus: Corpus, rate: float, device: torch.device) -> Run:
    """Trains with this project's runtime from `weights`, for as many steps as are asked for."""
    with Executor(plan, config_of(plan.model), SETTINGS, device) as executor:
        executor.state.load(weights)

        def masters() -> Masters:
            return {
                layer.name: executor.state.masters(layer) for layer in plan.model.stack.values()
            }

        number = 0
        while True:
            number += 1
            yield executor.step(corpus.step(number), rate=rate, number=number).loss, masters


def measured(
    run: Run, steps: int, every: int, judge: PreTrainedModel, held: Corpus, start: Masters
) -> dict[str, Any]:
    """Trains by iterating over `run`. Returns the loss of each step, the evaluations (step, loss,
    share of correct bytes), the distance of the last weights from `start`, relative to the norm of
    `start`, and the share of the weights that changed.
    """
    losses, evaluations = [], [(0, *evaluate(judge, start, held))]
    for number, (loss, masters) in zip(range(1, steps + 1), run, strict=False):
        losses.append(loss)
        if number % every == 0 or number == steps:
            evaluations.append((number, *evaluate(judge, masters(), held)))
        if number == steps:
            pairs = [
                (tensor, start[layer][name].to(tensor.device))
                for layer, tensors in masters().items()
                for name, tensor in tensors.items()
            ]
            moved = sum(float((last - first).double().square().sum()) for last, first in pairs)
            norm = sum(float(first.double().square().sum()) for _, first in pairs)
            changed = sum(int((last != first).sum()) for last, first in pairs)
            count = sum(first.numel() for _, first in pairs)
    run.close()  # type: ignore[attr-defined]  # a generator, which holds the executor
    return {
        "losses": losses,
        "evaluations": evaluations,
        "moved": (moved / norm) ** 0.5,
        "changed": changed / count,
    }


def rates(text: str) -> list[float]:
    """Returns the learning rates in a text such as `1e-5,1e-6`. This is the `type` of an argument.
    Raises UserError for any other text.
    """
    try:
        found = [float(each) for each in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < rate < 1 for rate in found):
        raise UserError(
            "--rates",
            found=repr(text),
            allowed="RATE,... between 0 and 1",
            fix="write it like --rates 1e-5,1e-6",
        )
    return found


def refuse_other_plans(plan: Plan) -> None:
    """Raises UserError for a plan that cannot be compared with bf16 weights alone."""
    work = plan.workload
    for where, found, only in (
        ("gpus", plan.gpus, 1),
        ("accumulation", work.accumulation, 1),
        ("optimizer", work.optimizer, "adamw"),
        ("state", work.state, "exact"),
        ("gradients", work.gradients, "exact"),
        ("clipping", work.clipping, "global"),
        ("dtype", work.dtype, "bf16"),
    ):
        if found != only:
            raise UserError(
                f"plan: {where}", found=found, allowed=only, fix="make a plan with it for this job"
            )
    if work.tokens >= HELD:
        raise UserError(
            "plan: batch",
            found=f"{work.tokens:,} tokens in a step",
            allowed=f"fewer than {HELD:,}, the tokens that are held out",
            fix="make a plan with a smaller --batch or --seq",
        )


def parser() -> options.OneLineParser:
    """Returns the parser of the program's options."""
    parser = options.OneLineParser(
        prog="python -m megatrain.experiments.paper_data.table3_large", description=__doc__
    )
    whole = options.whole
    parser.add_argument("plan", type=Path, metavar="PLAN", help="plan with exact state")
    parser.add_argument("--seed", type=whole("--seed", 0), default=0, help="default 0")
    parser.add_argument(
        "--rates",
        type=rates,
        default=[1e-5, 1e-6],
        help="learning rates of the fine-tuning (default 1e-5,1e-6)",
    )
    parser.add_argument(
        "--before", type=whole("--before"), default=300, help="steps before it (default 300)"
    )
    parser.add_argument(
        "--steps", type=whole("--steps"), default=240, help="steps of fine-tuning (default 240)"
    )
    parser.add_argument(
        "--every", type=whole("--every"), default=60, help="steps between evaluations (default 60)"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="result, as JSON")
    parser.add_argument("--commit", metavar="HASH", help="commit to record")
    options.add_device(parser)
    return parser


def run(arguments: list[str] | None = None) -> int:
    """Trains, prints a line for each way, writes the result, and returns 0."""
    args: argparse.Namespace = parser().parse_args(arguments)
    device, plan = options.device(args), Plan.load(args.plan)
    refuse_other_plans(plan)
    model, work = plan.model, plan.workload
    library = Path(sysconfig.get_paths()["stdlib"])
    code = b"".join(path.read_bytes() for path in sorted(library.glob("*.py")))
    prose = (library / "pydoc_data" / "topics.py").read_bytes()
    corpora = [
        Corpus(text, work, seed=args.seed, packing="plain") for text in split_text(code, prose)
    ]
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit() or args.commit,
        "machine": describe(device),
        "model": model.name,
        "parameters": model.parameters,
        "batch": work.batch,
        "sequence": work.sequence,
        "seed": args.seed,
        "steps_before": args.before,
        "rate_before": _BEFORE_RATE,
        "text": (
            f"Python {platform.python_version()}'s standard library, then its help topics; sha256"
            f" {hashlib.sha256(code + prose).hexdigest()[:16]}"
        ),
        "runs": [],
    }
    before = own(plan, random_weights(args.seed, device), corpora[0], _BEFORE_RATE, device)
    for number, (loss, masters) in enumerate(before, 1):
        if number == args.before:
            # Fine-tuning starts from bf16 weights, as from a published checkpoint.
            start: Masters = {
                layer: {
                    name: round_to_bf16(tensor).float().to(device)
                    for name, tensor in tensors.items()
                }
                for layer, tensors in masters().items()
            }
            print(f"seed {args.seed}: loss {loss:.4f} after {number} steps", flush=True)
            break
    before.close()  # type: ignore[attr-defined]

    def weights(layer: str, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return start[layer][name].view(shape)

    with device:
        judge = AutoModelForCausalLM.from_config(config_of(model), dtype=torch.bfloat16).eval()
    for rate in args.rates:
        for way in (EXACT, BF16):
            training = (
                own(plan, weights, corpora[1], rate, device)
                if way == EXACT
                else plain(
                    Plain(start, rounded=True, model=model), corpora[1], args.steps + 1, rate
                )
            )
            found = measured(training, args.steps, args.every, judge, corpora[2], start)
            result["runs"].append({"way": way, "rate": rate, **found})
            first, last = found["evaluations"][0], found["evaluations"][-1]
            print(
                f"seed {args.seed}, rate {rate:g}, {way}: held-out loss {first[1]:.4f} ->"
                f" {last[1]:.4f}, moved {found['moved']:.2e}, changed {found['changed']:.1%}",
                flush=True,
            )
            write_json(args.out, result)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Runs the program and returns its exit status."""
    return run_program("table3_large", lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
