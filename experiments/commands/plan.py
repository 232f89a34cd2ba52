"""Choose the fastest plan for a model on a machine, and write it to a file.

A plan has the policy, the placement, the number of slots, the size of copies and the checkpoint
interval. A plan for a model folder is refused if `megatrain train` would refuse it. A plan for a
config.json or a name in the library may be for prediction only. --from changes a written plan as
--set says, and predicts it again.
"""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.experiments.cli import file_arguments, options
from megatrain.experiments.cli.verdict import from_options, layout, policy_table
from megatrain.experiments.cli.verdict import text as verdict_text
from megatrain.experiments.cli.without_garbage_collection import without_garbage_collection
from megatrain.simulator.base.errors import DoesNotFit, UserError
from megatrain.simulator.base.units import counted, exact_size, format_seconds

if TYPE_CHECKING:
    from megatrain.simulator.hardware.machine import HardwareSpec
    from megatrain.simulator.planner.search import Choice
    from megatrain.simulator.schedule.plan import Plan


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a Hugging Face folder, a config.json, or a name in the library, e.g. qwen2.5-7b",
    )
    options.add_hardware(parser, "required unless --from is given")
    options.add_policy(parser)
    options.add_workload(
        parser,
        batch=None,
        batch_help=f"{options.PLANNED_BATCH}; with --gpus, the largest up to"
        f" {options.PLANNED_BATCH} that fits",
        loss_chunk=None,
        dtype=None,
    )
    options.add_step_tokens(parser)
    options.add_document_length(parser)
    parser.add_argument(
        "--gpus",
        type=options.whole("--gpus"),
        default=1,
        metavar="N",
        help="plan for N GPUs; --batch, --accumulation and --tokens-per-step are for each GPU, so"
        " a step has N times as many tokens",
    )
    options.add_hosts(parser)
    parser.add_argument(
        "--from",
        dest="source_plan",
        type=Path,
        metavar="PLAN",
        help="change this plan instead of choosing one for MODEL and --hardware",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="with --from: change a knob, a placement, the policy, a field of the workload, the"
        " number of GPUs or hosts, the network, or a memory limit, e.g. checkpoint_interval=1,"
        " weights=e,0-11, hosts=2, network=50 or device_memory=40GiB; `megatrain sweep --help`"
        " lists the names",
    )
    parser.add_argument(
        "--why",
        action="store_true",
        help="also print the placement, the runner-up and the bounds of the step time",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="PLAN",
        help="the plan file to write, e.g. plan.toml; an earlier plan there is replaced",
    )


@without_garbage_collection()
def run(args: argparse.Namespace) -> int:
    from megatrain.runtime.layers.supported import refuse_unsupported
    from megatrain.simulator.policies import find, verified
    from megatrain.simulator.verdict.verdict import explain, summarize

    if args.policy == "all":
        args.policy = "best"
    _refuse_contradictions(args)
    file_arguments.check_replaceable(args.out, file_arguments.PLAN_FILE)
    choices, hardware = _changed(args) if args.source_plan else _chosen(args)
    best, names = choices[0], from_options.policies(args.policy)
    kernel_chosen = args.attention is None and not args.source_plan
    verdicts = [summarize(choice, hardware, kernel_chosen=kernel_chosen) for choice in choices]
    verdict = verdicts[0]
    work = best.plan.workload
    # `explain` also tries plans that are not possible with several GPUs or with sum groups.
    if best.plan.gpus == 1 and work.sum_group in (1, work.accumulation):
        verdict = explain(
            best,
            hardware,
            names,
            advise=not args.source_plan,  # with --from, the user does not want another plan
            marginal=args.why,
            chunk_chosen=args.loss_chunk is None and not args.source_plan,
            kernel_chosen=kernel_chosen,
        )
    width = layout.terminal_width()
    about_machine = options.machine_notes(hardware, best.plan.model)
    report = verdict_text.text(verdict, width, why=args.why, about_machine=about_machine)
    if len(choices) > 1:
        report += "\n\nThe best plan of each policy:\n" + policy_table.table(verdicts, width)
    if not best.feasible:
        print(report)
        raise DoesNotFit(
            str(args.out),
            found="no plan that fits; nothing was written",
            allowed=verdict_text.limits(verdicts[0]),
            fix=verdict_text.remedy(verdict),
        )
    folder = args.out.parent / best.plan.source
    trainable = folder.is_dir() and not find(best.plan.policy).prediction_only
    if trainable:
        _refuse_untrainable(best.plan, folder)
    verified(best.plan)
    # The plan is written before the report is printed, because `| head` may close the output.
    best.plan.save(args.out)
    print(report)
    if not trainable:
        try:
            refuse_unsupported(best.plan.model, best.plan.workload)
        except UserError as error:
            print(f"\nfor prediction only, `megatrain train` will refuse this plan: {error}")
    print(
        f"\nwrote {shlex.quote(str(args.out))}: policy {best.plan.policy}, schedule"
        f" {best.plan.digest}"
    )
    return 0


def _refuse_untrainable(plan: Plan, folder: Path) -> None:
    """Raises UserError if `megatrain train` would refuse `plan` on every device.

    If the folder has weights, they are those to begin with. Their files are opened as `train` opens
    them, which reads two matrices that config.json ties, and no other values.

    Imports torch and transformers, which takes some seconds.
    """
    from megatrain.runtime.layers.supported import refuse_multimodal, refuse_unsupported

    # These checks come first, because they need no torch.
    refuse_multimodal(folder, plan.model)
    refuse_unsupported(plan.model, plan.workload)
    from megatrain.runtime.execution.preflight import preflight
    from megatrain.runtime.files.model_files import folder_weights
    from megatrain.runtime.optimizer.settings import AdamW
    from megatrain.runtime.training.opening import exported_config

    preflight(plan, AdamW(), None)
    exported_config(folder, plan.model, init="model")
    if any(folder.glob("*.safetensors")):
        with folder_weights(folder):
            pass


def _refuse_contradictions(args: argparse.Namespace) -> None:
    """Raises UserError unless either MODEL and `--hardware` are given, or `--from`."""
    if args.source_plan is None:
        missing = [
            name
            for name, value in (("MODEL", args.model), ("--hardware", args.hardware))
            if not value
        ]
        if missing or args.set:
            raise UserError(
                "plan",
                found=f"no {', '.join(missing)}" if missing else "--set without --from",
                allowed="megatrain plan MODEL --hardware H --out PLAN, or megatrain plan --from"
                " PLAN --set KEY=VALUE --out PLAN",
                fix="see `megatrain plan --help`",
            )
        return
    parser = options.OneLineParser(prog="megatrain plan")
    describe(parser)
    default = parser.parse_args(["--out", "PLAN"])
    for action in parser._actions:
        if action.dest in ("help", "source_plan", "set", "out"):
            continue
        if getattr(args, action.dest) != getattr(default, action.dest):
            name = (*action.option_strings, action.metavar)[0]
            value = getattr(args, action.dest)
            lacks_set = name == "MODEL" and "=" in value  # as in --set KEY=VALUE KEY=VALUE
            raise UserError(
                "plan --from",
                found=f"{value} without --set" if lacks_set else f"{name} as well",
                allowed="--set and --out",
                fix=f"write --set {value}"
                if lacks_set
                else f"leave {name} out, and change the plan with --set KEY=VALUE",
            )


def _chosen(args: argparse.Namespace) -> tuple[list[Choice], HardwareSpec]:
    """Returns the best plan of each policy for the model and the machine of the options, the best
    plan first, and the machine.
    """
    import msgspec

    from megatrain.simulator.hardware.machine import HardwareSpec, hardware_name
    from megatrain.simulator.model.specs import ModelSpec, model_file
    from megatrain.simulator.planner.search import plans_of
    from megatrain.simulator.planner.shared_step import shared_step
    from megatrain.simulator.verdict.multi_gpu import check_gpus

    options.refuse_network_of_one_host(args)
    hardware = HardwareSpec.load(args.hardware).with_network(args.network)
    args = options.with_dtype(args, hardware)
    if os.path.exists(args.model):
        source = file_arguments.relative(Path(args.model), args.out.parent)
    else:  # a name on the hub is kept, because its weights are there
        source = args.model if "/" in args.model else model_file(args.model).stem
    named = (
        file_arguments.relative(Path(args.hardware), args.out.parent)
        if os.path.exists(args.hardware)
        else hardware_name(args.hardware)
    )
    model = ModelSpec.load(args.model)
    check_gpus(args.gpus, hardware, args.hosts)
    if args.gpus > 1:
        args.policy = "overlapped" if args.policy == "best" else args.policy
    if args.gpus == 1 or args.tokens_per_step is not None:
        args = options.replaced(args, batch=args.batch or options.PLANNED_BATCH)
    args = from_options.with_fitting_state(args, hardware, model, share=args.gpus > 1)
    args, _ = from_options.with_fitting_workload(args, hardware, model)
    if args.gpus == 1:
        return from_options.choices(args, hardware, source, named), hardware
    if args.tokens_per_step is None:
        (plan,) = plans_of(
            model,
            hardware,
            options.workload(args, model),
            source=source,
            hardware_name=named,
            device_limit=options.device_limit(args.device_memory, hardware),
            host_limit=options.host_limit(args.host_memory, hardware),
            policies=from_options.policies(args.policy),
        )
    else:
        one = from_options.choices(args, hardware, source, named)[0]
        work = from_options.shared_workload(args, one, hardware, model)
        plan = msgspec.structs.replace(one.plan, workload=work)
    return [shared_step(plan, hardware, args.gpus, args.hosts)], hardware


def _changed(args: argparse.Namespace) -> tuple[list[Choice], HardwareSpec]:
    """Returns the plan of `--from` as `--set` changes it, predicted again, and its machine. Prints
    the new and the former step time.
    """
    import msgspec

    from megatrain.experiments.sweep.grid import axis, changed
    from megatrain.simulator.costs import costs_of
    from megatrain.simulator.planner.search import assess

    values: dict[str, Any] = {}
    for name, value in options.assignments(args.set, "KEY=VALUE", "checkpoint_interval=1"):
        if name in ("gpus", "hosts"):
            values[name] = options.whole(f"--set {name}")(value)
            continue
        if name == "network":
            values[name] = options.real("--set network", 0.001)(value)
            continue
        others = ("gpus", "hosts", "network")
        key, (values[key],) = axis(name, [value], "--set", others=others, verb="plan")
    plan = file_arguments.plan_of(args.source_plan)
    hardware = file_arguments.hardware_of(args.source_plan, plan.hardware)
    folder, before = args.source_plan.parent, plan
    moved = {
        field: file_arguments.relative(folder / name, args.out.parent)
        for field, name in (("hardware", plan.hardware), ("source", plan.source))
        if os.path.exists(folder / name)
    }
    plan = msgspec.structs.replace(changed(plan, values), **moved)
    where = "--set device_memory"
    if "device_memory" not in values:
        where = f"{args.source_plan}: device_limit_bytes"
    fix = f"write --set device_memory={exact_size(hardware.device_bytes)}, or less"
    limit = options.device_limit(plan.device_limit_bytes, hardware, where, fix)
    host_limit = _host_limit(before, plan, hardware, given="host_memory" in values)
    plan = msgspec.structs.replace(plan, device_limit_bytes=limit, host_limit_bytes=host_limit)
    with file_arguments.naming(args.source_plan):
        _refuse_unread(plan, values)
        choice = assess(plan, costs_of(plan, hardware))
    args.policy = plan.policy
    if before.prediction is not None:
        seconds = before.prediction.step_seconds
        print(
            f"step {_timed(plan, choice.step_seconds, before)}; it was"
            f" {_timed(before, seconds, plan)} in {args.source_plan}"
        )
    return [choice], hardware


def _host_limit(before: Plan, plan: Plan, hardware: HardwareSpec, *, given: bool) -> int:
    """Returns the host memory in bytes that each rank of `plan` may use.

    The ranks of a host divide its memory, except on machines whose GPUs have host memory of their
    own. If `given`, the limit of `plan` is the memory to divide. Otherwise it is the memory that
    the ranks of the plan `before` divide.
    """
    from megatrain.simulator.costs.several_gpus import sharing_host_memory

    ranks = sharing_host_memory(hardware, plan.gpus_per_host)
    if given:
        return plan.host_limit_bytes // ranks
    former = sharing_host_memory(hardware, before.gpus_per_host)
    return before.host_limit_bytes * former // ranks


def _timed(plan: Plan, seconds: float, other: Plan) -> str:
    """Returns the step time of `plan` as text.

    If `other` has another number of tokens per step, the text also has the tokens and the
    throughput. If it has another number of GPUs or hosts, the text also has these.
    """
    from megatrain.simulator.model.metrics import tokens_per_second

    work, text = plan.workload, format_seconds(seconds)
    if work.step_tokens != other.workload.step_tokens:
        speed = layout.speed(tokens_per_second(work, seconds))
        text += f" of {work.step_tokens:,} tokens, {speed} tokens/s"
    places = [(each.gpus, each.hosts) for each in (plan, other)]
    if places[0] == places[1]:
        return text
    of_hosts = f" of {counted(plan.hosts, 'host')}" if plan.hosts != other.hosts else ""
    return f"{text} on {counted(plan.gpus, 'GPU')}{of_hosts}"


def _refuse_unread(plan: Plan, values: dict[str, Any]) -> None:
    """Raises UserError if `values` has a knob or a placement that the plan's policy ignores."""
    from megatrain.simulator.policies import find
    from megatrain.simulator.schedule.plan import Knobs

    policy = find(plan.policy)
    read = (
        *(name for name in policy.knobs if plan.gpus > 1 or name != "exchange_bytes"),
        *(f"placement.{name}" for name in policy.placements),
    )
    for name in values:
        if (name in Knobs.__struct_fields__ or name.startswith("placement.")) and name not in read:
            raise UserError(
                f"--set {name}",
                found=f"a knob that policy {plan.policy} does not read"
                + (" with one GPU" if name == "exchange_bytes" and name in policy.knobs else ""),
                allowed=", ".join(read) or "no knob",
                fix="leave it out, or set another policy too",
            )
