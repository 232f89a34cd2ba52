"""Executes a plan: trains a model on text, and leaves a run folder."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from megatrain.experiments import options
from megatrain.simulator.errors import UserError


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, metavar="PLAN", help="a plan written by `megatrain plan`")
    parser.add_argument("--data", type=Path, required=True, help="a text file, or a folder of them; byte-level tokens, packed")
    parser.add_argument("--steps", type=options.whole("--steps"), required=True, help="optimizer steps")
    parser.add_argument("--out", type=Path, required=True, metavar="RUN", help="a new folder for plan, metrics, timeline and model")
    parser.add_argument("--init", choices=("model", "random"), default="model", help="weights of the model's folder (default), or random ones")
    parser.add_argument("--rate", type=options.real("--rate"), default=1e-3, help="learning rate (default 1e-3)")
    parser.add_argument("--warm-up", type=options.whole("--warm-up", 0), default=10, help="steps of linear warm-up (default 10)")
    parser.add_argument("--weight-decay", type=options.real("--weight-decay"), default=0.0, help="decoupled weight decay of every parameter (default 0)")
    parser.add_argument("--max-norm", type=options.real("--max-norm", 1e-6), default=1.0, help="global gradient norm to clip to (default 1.0)")
    parser.add_argument("--seed", type=options.whole("--seed", 0, 2**32 - 1), default=0, help="of the order of the data, and of random weights (default 0)")
    parser.add_argument("--no-export", action="store_true", help="do not write the trained model")
    parser.add_argument("--deterministic", action="store_true", help="only kernels that give the same bits every time; slower with CUDA")
    options.add_device(parser)


def run(args: argparse.Namespace) -> int:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from megatrain.runtime.machine import make_deterministic
    from megatrain.runtime.optimizer import AdamW
    from megatrain.runtime.trainer import Progress as Step
    from megatrain.runtime.trainer import TrainingOptions, train
    from megatrain.simulator.plan import Plan

    chosen = TrainingOptions(
        steps=args.steps, rate=args.rate, warm_up_steps=args.warm_up, seed=args.seed, random_init=args.init == "random",
        export=not args.no_export, settings=AdamW(weight_decay=args.weight_decay, max_norm=args.max_norm),
    )  # fmt: skip
    parameters = Plan.load(args.plan).model.parameters
    if not os.path.exists(args.out):
        options.check_writable(args.out)
    device = options.device(args)
    if args.deterministic:
        make_deterministic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[state]}"), TimeRemainingColumn())
    bars = Progress(*columns)
    loading = bars.add_task("load ", total=parameters, state="")
    training = bars.add_task("train", total=args.steps, state="", start=False)

    def on_load(count: int) -> None:
        bars.start()  # not before the first layer: by then everything that can be refused has been
        bars.advance(loading, count)

    losses: list[float] = []

    def on_step(step: Step) -> None:
        losses.append(step.result.loss)
        if step.number == 1:
            bars.start_task(training)
        bars.update(training, completed=step.number, state=f"loss {step.result.loss:.4f}  {step.tokens_per_second:,.0f} tokens/s")

    try:
        train(args.plan, args.data, args.out, chosen, device, on_step=on_step, on_load=on_load)
    except FloatingPointError as error:
        raise UserError(
            f"training, {args.out}", found=str(error).partition(";")[0], allowed="finite numbers", fix=f"lower --rate {args.rate:g}, or look at the data"
        ) from None
    finally:
        if bars.live.is_started:
            bars.stop()
    few = min(20, -(-len(losses) // 2))
    print(f"loss {sum(losses[:few]) / few:.3f} over the first {few} steps, {sum(losses[-few:]) / few:.3f} over the last {few}")
    print(f"wrote {args.out}; see `megatrain compare {args.out}`")
    return 0
