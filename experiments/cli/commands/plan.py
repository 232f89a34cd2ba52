"""Choose the fastest plan for a model on a machine, and write it to a file.

A plan has the policy, the placement, the number of slots, the size of copies and the checkpoint
interval. A plan for a model folder is refused if `megatrain train` would refuse it. A plan for a
config.json or a name in the library may be for prediction only.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.experiments.cli import options, verdict_text
from megatrain.experiments.cli.commands import check
from megatrain.experiments.cli.without_garbage_collection import without_garbage_collection
from megatrain.simulator.base.errors import UserError

if TYPE_CHECKING:
    from megatrain.simulator.schedule.plan import Plan


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a Hugging Face folder, a config.json, or a name in the library, e.g. qwen2.5-7b",
    )
    options.add_hardware(parser)
    options.add_policy(parser)
    options.add_workload(parser)
    options.add_step_tokens(parser)
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="PLAN",
        help="the plan file to write, e.g. plan.toml",
    )


@without_garbage_collection()
def run(args: argparse.Namespace) -> int:
    from megatrain.runtime.layers.supported import refuse_unsupported
    from megatrain.simulator.hardware.machine import HardwareSpec
    from megatrain.simulator.policies import is_prediction_only
    from megatrain.simulator.verdict.verdict import explain, summarize

    if args.policy == "all":
        args.policy = "best"
    options.check_writable(args.out)
    hardware = HardwareSpec.load(args.hardware)
    source = (
        options.relative(Path(args.model), args.out.parent)
        if os.path.exists(args.model)
        else args.model
    )
    named = (
        options.relative(Path(args.hardware), args.out.parent)
        if os.path.exists(args.hardware)
        else args.hardware
    )
    found = check.choices(args, hardware, source, named)
    verdicts, best = [summarize(choice, hardware) for choice in found], found[0]
    print(verdict_text.text(explain(best, hardware, check.policies(args.policy))))
    if len(found) > 1:
        print("\nthe best plan of each policy:\n" + verdict_text.table(verdicts))
    if not best.feasible:
        raise UserError(
            str(args.out),
            found="no plan that fits; nothing was written",
            allowed=verdict_text.limits(verdicts[0]),
            fix=best.account.advice,
        )
    trained = os.path.isdir(args.model) and not is_prediction_only(best.plan.policy)
    if trained:
        _refuse_untrainable(best.plan, Path(args.model))
    best.plan.save(args.out)
    if not trained:
        try:
            refuse_unsupported(best.plan.model, best.plan.workload)
        except UserError as error:
            print(f"\nfor prediction only, `megatrain train` will refuse this plan: {error}")
    print(f"\nwrote {args.out}: policy {best.plan.policy}, schedule {best.plan.digest}")
    return 0


def _refuse_untrainable(plan: Plan, folder: Path) -> None:
    """Raises UserError if `megatrain train` would refuse `plan`, whatever the device and settings.

    Imports torch and transformers, which takes some seconds.
    """
    from megatrain.runtime.layers.supported import refuse_multimodal, refuse_unsupported

    # These need no torch, so that their refusals come at once.
    refuse_multimodal(folder, plan.model)
    refuse_unsupported(plan.model, plan.workload)
    from megatrain.runtime.execution.preflight import preflight
    from megatrain.runtime.optimizer.settings import AdamW
    from megatrain.runtime.training.opening import exported_config

    preflight(plan, AdamW(), None)
    exported_config(folder, plan.model, init="model")
