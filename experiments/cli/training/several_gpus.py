"""The ranks of `megatrain train` with a plan for several GPUs.

A rank is a process that torchrun starts, one for each GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.experiments.cli import options
from megatrain.runtime.training.config import Config
from megatrain.simulator.base.errors import UserError

if TYPE_CHECKING:
    from megatrain.runtime.ranks import Ranks


@contextlib.contextmanager
def ranks_of(
    args: argparse.Namespace, plan_file: Path | None, config: Config
) -> Iterator[Ranks | None]:
    """Joins the ranks of a plan for several GPUs, and yields them.

    Yields None for one GPU, and for a plan that cannot be read, which the caller reports later.

    Args:
        args: the options of the command.
        plan_file: the plan's file, or None for a model without a plan.
        config: the settings of the run, which must be the same on all ranks.

    Raises UserError if the number of ranks is not that of the plan, if the ranks cannot be joined,
    or if an option is for one GPU only.
    """
    started = 1
    if "WORLD_SIZE" in os.environ:
        from megatrain.runtime.ranks import started_ranks  # slow

        started = started_ranks()
    from megatrain.simulator.schedule.plan import Plan

    if plan_file is None:
        if started > 1:
            raise UserError(
                "train",
                found=f"a model to plan, on {started} ranks",
                allowed="a plan for several GPUs, or one process",
                fix=f"make it first, with `megatrain plan MODEL --gpus {started} --out PLAN`",
            )
        yield None
        return
    plan = None
    with contextlib.suppress(UserError):
        plan = Plan.load(plan_file)
    if plan is None or plan.gpus == started == 1:
        yield None
        return
    if args.adapt:
        raise UserError(
            "--adapt",
            found=f"a plan for {plan.gpus} GPUs",
            allowed="a plan for one GPU",
            fix="leave it out",
        )

    from megatrain.runtime.ranks import joined

    chosen = {
        "--from-step": args.from_step,
        "--from-scratch": args.from_scratch,
        "whether to resume": bool(args.resume),
    }
    with joined(plan, options.device(args), config, chosen) as ranks:
        yield ranks
