"""Report whether a model fits a machine, how fast it trains, and what would help.

Without MODEL, it lists the models of the library that fit. Without --hardware, the machine is this
one. The exit status is 0 if the model fits, 3 if it does not, and 2 for a mistake in the command.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from megatrain.experiments.cli import options
from megatrain.experiments.cli.without_garbage_collection import without_garbage_collection
from megatrain.simulator.base.errors import DoesNotFit, UserError

if TYPE_CHECKING:
    from megatrain.simulator.hardware.machine import HardwareSpec
    from megatrain.simulator.model.specs import ModelSpec
    from megatrain.simulator.planner.search import Choice
    from megatrain.simulator.verdict.verdict import Verdict


BATCHES = (32, 16, 8, 4, 2, 1)
"""Micro-batches to try where none is named. A larger one is seldom faster, and needs more
memory."""


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a Hugging Face folder, a config.json, or a name in the library, e.g. qwen2.5-7b"
        " (default: list what fits)",
    )
    options.add_hardware(parser, required=False)
    options.add_policy(parser)
    parser.add_argument(
        "--cores",
        type=options.whole("--cores"),
        help="processor cores of the host (default: as in the hardware file); the speed of the CPU"
        " optimizer is proportional to them",
    )
    options.add_workload(parser, batch=None)
    options.add_step_tokens(parser)
    parser.add_argument(
        "--tokens",
        type=options.count("--tokens"),
        metavar="N",
        help="also report the time and the energy that training on N tokens takes, e.g. 1B",
    )
    parser.add_argument(
        "--gpus",
        type=options.whole("--gpus"),
        default=1,
        metavar="N",
        help="also report a first estimate for N GPUs of one host",
    )
    parser.add_argument(
        "--why",
        action="store_true",
        help="also print the plan and its placement, the runner-up, what one more GiB gains, and"
        " the bounds of the step time",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def policies(named: str) -> list[str]:
    """Returns the names of the policies that `--policy` selects.

    `best` selects the policies that the runtime executes and that can be the fastest. `all` also
    selects policies that serve as baselines, and models of other systems.
    """
    from megatrain.simulator.policies import contenders, names, peers

    return {"best": contenders(), "all": [*names(), *peers()]}.get(named, [named])


def choices(
    args: argparse.Namespace,
    hardware: HardwareSpec,
    source: str,
    hardware_name: str,
    model: ModelSpec | None = None,
) -> list[Choice]:
    """Returns the best plan of each policy that `args.policy` selects, the best plan first.

    With `--tokens-per-step`, the plans are those of the fastest split into micro-batches.

    Args:
        source: the model, as the plan names it.
        hardware_name: the hardware, as the plan names it.
        model: the model. The default is the one that `args.model` names.

    Raises UserError if both `--tokens-per-step` and `--accumulation` are given, or if the machine
    does not have the memory of `--device-memory`.
    """
    from megatrain.simulator.model.specs import ModelSpec
    from megatrain.simulator.planner.search import candidates

    model = model or ModelSpec.load(args.model)
    work, limits = (
        options.workload(args, model),
        {
            "device_limit": options.device_limit(args.device_memory, hardware),
            "host_limit": args.host_memory,
        },
    )
    step_tokens = getattr(args, "tokens_per_step", None)
    if step_tokens is None:
        return candidates(
            model,
            hardware,
            work,
            source=source,
            hardware_name=hardware_name,
            policies=policies(args.policy),
            **limits,
        )
    from megatrain.simulator.planner.batch_splits import best_split

    if work.accumulation > 1:
        raise UserError(
            "--tokens-per-step",
            found="--accumulation as well",
            allowed="one of the two",
            fix="leave --accumulation and --batch out",
        )
    return best_split(
        model,
        hardware,
        work,
        step_tokens,
        source=source,
        hardware_name=hardware_name,
        policies=policies(args.policy),
        **limits,
    )


def as_json(verdict: Verdict) -> dict[str, object]:
    """Returns what `--json` prints: all fields of the verdict, in bytes and seconds."""
    import msgspec

    found: dict[str, object] = msgspec.to_builtins(verdict)
    return found


def with_cores(hardware: HardwareSpec, cores: int | None) -> HardwareSpec:
    """Returns `hardware` with `cores` cores, and CPU optimizer rates scaled in proportion.

    Raises UserError if the hardware was measured with another number of cores.
    """
    import msgspec

    if not cores:
        return hardware
    if hardware.costs is not None and cores != hardware.cores:
        raise UserError(
            "--cores",
            found=cores,
            allowed=f"{hardware.cores}, the number with which {hardware.name} was measured",
            fix="calibrate on the other machine, or leave --cores out",
        )
    share = cores / hardware.cores
    return msgspec.structs.replace(
        hardware,
        cores=cores,
        cpu_update_per_s=hardware.cpu_update_per_s * share,
        cpu_adam_per_s=hardware.cpu_adam_per_s * share,
    )


def with_fitting_batch(
    args: argparse.Namespace, hardware: HardwareSpec, model: ModelSpec
) -> argparse.Namespace:
    """Returns `args` with the largest of the usual micro-batches that fits, or 1 if none does.

    A size for which a calibrated machine has no costs is left out. If it has none for any, the
    largest is taken, so that the search says what is missing.
    """
    from megatrain.simulator.policies import find
    from megatrain.simulator.schedule.plan import Plan
    from megatrain.simulator.verdict.alternatives import fits

    limit = options.device_limit(args.device_memory, hardware) or hardware.device_bytes
    names = [name for name in policies(args.policy) if not find(name).prediction_only]
    sized = [argparse.Namespace(**{**vars(args), "batch": batch}) for batch in BATCHES]
    priced = sized[:1]
    for tried in sized if names else ():
        plan = Plan(
            policy=names[0],
            hardware=hardware.name,
            source=model.name,
            model=model,
            workload=options.workload(tried, model, quiet=True),
            device_limit_bytes=limit,
            host_limit_bytes=args.host_memory or hardware.host_bytes,
        )
        try:
            if fits(plan, hardware, names):
                return tried
        except UserError:
            continue
        priced = [tried]
    return priced[0]


def machine(args: argparse.Namespace) -> HardwareSpec:
    """Returns the machine that `--hardware` names, or this one, with the cores of `--cores`."""
    from megatrain.experiments.cli.verdict.this_machine import this_machine
    from megatrain.simulator.hardware.machine import HardwareSpec

    found = HardwareSpec.load(args.hardware) if args.hardware else this_machine()
    return with_cores(found, args.cores)


def explained(
    args: argparse.Namespace,
    choice: Choice,
    hardware: HardwareSpec,
    *,
    batch_chosen: bool,
    advise: bool = True,
) -> Verdict:
    """Returns the verdict on a choice for the options of `args`.

    Args:
        batch_chosen: whether the micro-batch was chosen because none was named.
        advise: whether to try changes that would help.
    """
    import msgspec

    from megatrain.simulator.verdict.verdict import explain

    verdict = explain(
        choice, hardware, policies(args.policy), gpus=args.gpus, tokens=args.tokens, advise=advise
    )
    stated = args.hardware is None or args.host_memory is not None
    return msgspec.structs.replace(
        verdict,
        batch_chosen=batch_chosen,
        host_memory_assumed=verdict.host_memory_assumed and not stated,
    )


@without_garbage_collection()
def run(args: argparse.Namespace) -> int:
    from megatrain.experiments.cli.verdict import layout, policy_table
    from megatrain.experiments.cli.verdict import text as verdict_text
    from megatrain.experiments.cli.verdict.next_commands import next_commands
    from megatrain.experiments.cli.verdict.what_fits import list_what_fits
    from megatrain.simulator.model.specs import ModelSpec
    from megatrain.simulator.verdict.multi_gpu import check_gpus
    from megatrain.simulator.verdict.verdict import summarize

    model = ModelSpec.load(args.model) if args.model is not None else None
    hardware = machine(args)
    check_gpus(args.gpus, hardware)
    if args.policy == "all" and args.gpus != 1:
        raise UserError(
            "--gpus",
            found=f"{args.gpus} with --policy all",
            allowed="one policy, or best",
            fix="name a policy, or leave --gpus out",
        )
    if model is None:
        return list_what_fits(args, hardware)
    chosen = args.batch is None and args.tokens_per_step is None
    if chosen:
        args = with_fitting_batch(args, hardware, model)
    args.batch = args.batch or 1
    found = choices(args, hardware, args.model, args.hardware or hardware.name)
    if args.policy == "all":
        verdicts = [summarize(choice, hardware, tokens=args.tokens) for choice in found]
        print(
            json.dumps({"policies": [as_json(verdict) for verdict in verdicts]})
            if args.json
            else policy_table.table(verdicts)
        )
        own = [verdict for verdict in verdicts if not verdict.prediction_only]
        return 0 if own[0].feasible else DoesNotFit.status
    verdict = explained(args, found[0], hardware, batch_chosen=chosen)
    print(
        json.dumps(as_json(verdict))
        if args.json
        else verdict_text.text(
            verdict, layout.terminal_width(), why=args.why, commands=next_commands(args, verdict)
        )
    )
    return 0 if verdict.feasible else DoesNotFit.status
