"""Executes a plan: trains a model on text, and leaves a run folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatrain.experiments import options


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, metavar="PLAN", help="a plan written by `megatrain plan`")
    parser.add_argument("--data", type=Path, required=True, help="a text file, or a folder of them; byte-level tokens, packed")
    parser.add_argument("--steps", type=options.whole("--steps"), required=True, help="optimizer steps")
    parser.add_argument("--out", type=Path, required=True, metavar="RUN", help="a new folder for plan, metrics, timeline and model")
    parser.add_argument("--init", choices=("model", "random"), default="model", help="weights of the model's folder (default), or random ones")
    parser.add_argument("--rate", type=options.real("--rate"), default=1e-3, help="learning rate (default 1e-3)")
    parser.add_argument("--warm-up", type=options.whole("--warm-up", 0), default=10, help="steps of linear warm-up (default 10)")
    parser.add_argument("--weight-decay", type=options.real("--weight-decay"), default=0.0, help="decoupled weight decay of every parameter (default 0)")
    parser.add_argument("--max-norm", type=options.real("--max-norm"), default=1.0, help="global gradient norm to clip to (default 1.0)")
    parser.add_argument("--seed", type=options.whole("--seed", 0), default=0, help="of the order of the data, and of random weights (default 0)")
    parser.add_argument("--no-export", action="store_true", help="do not write the trained model")
    options.add_device(parser)


def run(args: argparse.Namespace) -> int:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from megatrain.runtime.optimizer import AdamW
    from megatrain.runtime.trainer import Progress as Step
    from megatrain.runtime.trainer import TrainingOptions, train
    from megatrain.simulator.plan import Plan

    chosen = TrainingOptions(
        steps=args.steps, rate=args.rate, warm_up_steps=args.warm_up, seed=args.seed, random_init=args.init == "random",
        export=not args.no_export, settings=AdamW(weight_decay=args.weight_decay, max_norm=args.max_norm),
    )  # fmt: skip
    device = options.device(args)
    parameters = Plan.load(args.plan).model.parameters
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[state]}"), TimeRemainingColumn())
    with Progress(*columns) as bars:
        loading = bars.add_task("load ", total=parameters, state="")
        training = bars.add_task("train", total=args.steps, state="", start=False)

        def on_step(step: Step) -> None:
            if step.number == 1:
                bars.start_task(training)
            bars.update(training, completed=step.number, state=f"loss {step.result.loss:.4f}  {step.tokens_per_second:,.0f} tokens/s")

        train(args.plan, args.data, args.out, chosen, device, on_step=on_step, on_load=lambda count: bars.advance(loading, count))
    print(f"wrote {args.out}; see `megatrain compare {args.out}`")
    return 0
