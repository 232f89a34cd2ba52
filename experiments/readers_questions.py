"""Prints readers' questions with the answers of `megatrain check`, as Markdown.

    python -m megatrain.experiments.readers_questions

Each answer is a command and its output without its last part, `Next`. `docs/answers.md` is this
output below an introduction. "The largest model" is the model of the library with the most
parameters that fits with micro-batches of one sequence of 1,024 tokens.
"""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

from megatrain.experiments.cli import main as cli
from megatrain.experiments.cli.program import run_without_options
from megatrain.simulator.base.units import parse_bytes
from megatrain.simulator.costs import cost_model
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model import specs
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.capacity import largest_batch, least_memory_plans
from megatrain.simulator.planner.loss_chunk import least_chunks
from megatrain.simulator.policies import contenders
from megatrain.simulator.schedule.plan import Plan

_ONE = "--batch 1 --seq 1024"
QUESTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "How long does 120B take on one H200 with 1.5 TB of host memory, and on eight?",
        (
            "gpt-oss-120b --hardware h200 --host-memory 1.5TiB --batch 64 --tokens 1B --gpus 8",
            "qwen2.5-72b --hardware h200 --host-memory 1.5TiB --batch 64 --tokens 1B --gpus 8",
        ),
    ),
    (
        "The largest model on an RTX 3080 of 10 GB with 64 GB of host memory?",
        (f"LARGEST --hardware rtx3080-10gb --host-memory 64GiB {_ONE}",),
    ),
    ("On an RTX 3090 with 251 GB?", (f"LARGEST --hardware rtx3090 --host-memory 251GB {_ONE}",)),
    ("On a Ryzen AI Max 395 with 128 GB?", (f"LARGEST --hardware ryzen-ai-max-395-128gb {_ONE}",)),
    (
        "On a Mac?",
        (f"LARGEST --hardware apple-m4-max {_ONE}", f"LARGEST --hardware apple-m3-ultra {_ONE}"),
    ),
    (
        "7B with 512k tokens of context, on a GH200 and on an H200?",
        tuple(
            f"qwen2.5-7b --hardware {name} --batch 1 --seq 524288" for name in ("gh200-96", "h200")
        ),
    ),
    ("14B on an H200 with 128 GB of host memory?", ("qwen2.5-14b --hardware h200",)),
)
"""Pairs of a question and the arguments of `megatrain check` that answer it. LARGEST stands for
the model that `largest` returns."""


def largest(words: list[str]) -> str:
    """Returns the name of the library's largest model that fits with the options `words`, or
    `none`. The words are --hardware, --batch, --seq and perhaps --host-memory, each with a value.
    """
    options = dict(zip(words[::2], words[1::2], strict=True))
    hardware, work = (
        HardwareSpec.load(options["--hardware"]),
        Workload(batch=int(options["--batch"]), sequence=int(options["--seq"])),
    )
    host = (
        parse_bytes(options["--host-memory"]) if "--host-memory" in options else hardware.host_bytes
    )
    models = [
        ModelSpec.load(file.stem)
        for file in (Path(specs.__file__).parents[1] / "library" / "models").glob("*.json")
    ]
    for model in sorted(models, key=lambda model: -model.parameters):
        names = ["resident"] if hardware.unified else contenders()
        plan = Plan(
            policy=names[0],
            hardware=hardware.name,
            source=model.name,
            model=model,
            workload=work,
            device_limit_bytes=hardware.device_bytes,
            host_limit_bytes=host,
        )
        footprints = list(least_memory_plans(plan, cost_model(hardware, model, work), names))
        if largest_batch(footprints, *least_chunks(work, hardware)):
            return model.name
    return "none"


def answer(words: list[str]) -> list[str]:
    """Returns the lines of the output of `megatrain check WORDS`, without the part `Next`."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        cli.main(["check", *words])
    return out.getvalue().partition("\n\nNext ")[0].rstrip().splitlines()


def main() -> int:
    """Prints every question with its answer, and returns the exit status."""
    for question, commands in QUESTIONS:
        print(f"## {question}\n\n```")
        for index, command in enumerate(commands, start=1):
            last = index == len(commands)
            words = command.split()
            if words[0] == "LARGEST":
                words[0] = largest(words[1:])
            print(f"$ megatrain check {' '.join(words)}")
            print("\n".join(answer(words)) + ("" if last else "\n"))
        print("```\n")
    return 0


if __name__ == "__main__":
    sys.exit(
        run_without_options("python -m megatrain.experiments.readers_questions", __doc__, main)
    )
