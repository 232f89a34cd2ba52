"""Times optimizer steps of megatrain and of other systems on this machine, one after the other.

    python -m megatrain.experiments.benchmark MODEL

Weights and tokens are random. A step is timed by the wall clock and includes clipping and the
update. `ours` executes the plan. `ceiling` executes only the compute operations of the plan; no
schedule of its copies and updates can be faster. `zero3` is DeepSpeed ZeRO-3 with all state in host
memory, and `fsdp2` is PyTorch FSDP2 with CPU offload.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from megatrain.experiments.cli import file_arguments, options
from megatrain.experiments.cli.program import run_program
from megatrain.experiments.cli.verdict import from_options
from megatrain.experiments.cli.verdict import text as verdict_text
from megatrain.runtime.warm_up import WARM_UP_STEPS
from megatrain.simulator.base.errors import DoesNotFit, UserError
from megatrain.simulator.base.files import write_json
from megatrain.simulator.base.units import format_bytes, format_seconds
from megatrain.simulator.compare.error_table import align
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model import metrics
from megatrain.simulator.model.optimizer import ADAMW
from megatrain.simulator.model.state_format import EXACT
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.policies import executable
from megatrain.simulator.schedule.plan import Plan
from megatrain.simulator.verdict.verdict import summarize

OWN = ("ours", "ceiling")
SYSTEMS = (*OWN, "zero3", "fsdp2")


def systems(text: str) -> list[str]:
    """Returns the names in a text such as `ours,ceiling`, in their order, each once. It is the
    argparse type of `--systems`. Raises UserError for an unknown or missing name.
    """
    names = list(dict.fromkeys(filter(None, text.replace(" ", "").split(","))))
    unknown = [name for name in names if name not in SYSTEMS]
    if unknown or not names:
        raise UserError(
            "--systems",
            found=repr(",".join(unknown)),
            allowed=", ".join(SYSTEMS),
            fix="write it like --systems ours,ceiling",
        )
    return names


def _add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options from which the plan for a model is made."""
    parser.add_argument(
        "--hardware",
        metavar="H",
        help=(
            "machine to plan for: a TOML file written by `megatrain calibrate`, or a name in the"
            " library (default h200)"
        ),
    )
    options.add_limits(parser)
    options.add_policy(parser)
    options.add_workload(parser, any_state=False)


def _plan_actions() -> list[argparse.Action]:
    """Returns the options from which the plan for a model is made."""
    planning = options.OneLineParser(add_help=False)
    _add_plan_options(planning)
    names = {action.dest for action in planning._actions}
    return [action for action in parser()._actions if action.dest in names]


def parser() -> options.OneLineParser:
    """Returns the parser for the options of the benchmark."""
    parser = options.OneLineParser(
        prog="python -m megatrain.experiments.benchmark", description=__doc__
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a Hugging Face folder, a config.json, or a name in the library, e.g. qwen2.5-7b",
    )
    parser.add_argument(
        "--plan", type=Path, metavar="PLAN", help="time this plan instead of the best for MODEL"
    )
    _add_plan_options(parser)
    parser.set_defaults(documents=False)  # random tokens contain no documents
    parser.add_argument(
        "--systems",
        type=systems,
        default=list(OWN),
        metavar="NAMES",
        help=f"systems to time, of {', '.join(SYSTEMS)} (default {','.join(OWN)})",
    )
    steps = options.whole("--steps", WARM_UP_STEPS + 1)
    parser.add_argument(
        "--steps",
        type=steps,
        default=7,
        help=f"steps of each system; the first {WARM_UP_STEPS} are not counted (default 7)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write the result as JSON; the file is updated after each system",
    )
    parser.add_argument(
        "--timeline",
        type=Path,
        metavar="FILE",
        help="write the timeline of the last step of `ours` as JSON",
    )
    parser.add_argument(
        "--commit", metavar="HASH", help="commit to record if the code is not in a git repository"
    )
    options.add_device(parser)
    return parser


def make_plan(args: argparse.Namespace) -> tuple[Plan, HardwareSpec]:
    """Returns the plan to time and the machine that it was made for.

    Raises UserError if the options contradict each other, or if `ours` or `ceiling` is timed and no
    plan fits or the runtime cannot execute the plan.
    """
    if (args.model is None) == (args.plan is None):
        found = "neither" if args.model is None else "both"
        raise UserError(
            "MODEL, --plan",
            found=found,
            allowed="one of them",
            fix="name a model to plan for, or a plan",
        )
    if args.plan is not None:
        if given := options.given(_plan_actions(), args):
            raise UserError(
                "--plan",
                found=f"{', '.join(given)} as well",
                allowed="the plan's own settings",
                fix="leave these out, or name a MODEL instead",
            )
        plan = Plan.load(args.plan)
        hardware = file_arguments.hardware_of(args.plan, plan.hardware)
    else:
        name = args.hardware or "h200"
        args.policy = "best" if args.policy == "all" else args.policy
        hardware = HardwareSpec.load(name)
        best = from_options.choices(args, hardware, args.model, name)[0]
        plan = best.plan
        if not best.feasible and not set(OWN).isdisjoint(args.systems):
            raise DoesNotFit(
                args.model,
                found="no plan that fits",
                allowed=verdict_text.limits(summarize(best, hardware)),
                fix=best.account.advice,
            )
    if not set(OWN).isdisjoint(args.systems):
        executable(plan)
    others = [system for system in args.systems if system not in OWN]
    if others:
        _refuse_for_others(plan.workload, ", ".join(others))
    return plan, hardware


def _with_path(plan: Plan, file: Path | None) -> Plan:
    """Returns `plan` with the path of its hardware file as seen from the current folder, where the
    processes of the systems look for it. `file` is the file of the plan if it was read from one.
    """
    there = file.parent / plan.hardware if file else Path(plan.hardware)
    return msgspec.structs.replace(plan, hardware=str(there)) if there.is_file() else plan


def _refuse_for_others(work: Workload, systems: str) -> None:
    """Raises UserError for an option of `work` that the other `systems` do not have."""
    for where, found, usual, fix in (
        ("state", work.state, EXACT, "leave out --state"),
        ("gradients", work.gradients, "exact", "leave out --gradients"),
        ("--dtype", "fp8" if work.fp8 else "bf16", "bf16", "use --dtype bf16"),
        ("--token-piece", work.token_piece or "no pieces", "no pieces", "leave out --token-piece"),
        ("--head-groups", str(work.groups), "1", "leave out --head-groups"),
        ("optimizer", work.optimizer, ADAMW, "leave out --optimizer"),
    ):
        if found != usual:
            raise UserError(
                where,
                found=f"{found}, with {systems}",
                allowed=f"{usual}, which other systems use",
                fix=f"{fix}, or name only {', '.join(OWN)} in --systems",
            )


def time_system(
    system: str, plan_path: Path, steps: int, device: str, *timeline: str
) -> dict[str, Any]:
    """Times one system in its own process and returns the result of `benchmarks/child.py`, which
    writes the timeline of the last step to `timeline` if it is given. If the process ends without a
    result, `failure` says so.
    """
    words = [
        sys.executable,
        "-m",
        "megatrain.experiments.benchmarks.child",
        system,
        str(plan_path),
        str(steps),
        device,
        *timeline,
    ]
    process = subprocess.run(words, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, check=False)
    try:
        result: dict[str, Any] = json.loads(process.stdout)
    except ValueError:
        return {
            "system": system,
            "failure": f"its process ended with status {process.returncode} and without a result",
            "steps": [],
        }
    return result


def summary(found: dict[str, Any], plan: Plan, hardware: HardwareSpec) -> dict[str, Any]:
    """Returns the result `found` of a system with the speed of its steps after warm-up: seconds,
    tokens per second, TFLOPS by the 6N rule, and MFU.

    The entry `machine` is left out, because it is the same for all systems.
    """
    record = {key: value for key, value in found.items() if key != "machine"}
    seconds = [step["seconds"] for step in found["steps"][WARM_UP_STEPS:]]
    if found["failure"] or not seconds:
        return record
    median = statistics.median(seconds)
    peak = hardware.datasheet_tflops(plan.workload.dtype)
    return record | {
        "step_seconds_median": median,
        "step_seconds_least": min(seconds),
        "step_seconds_most": max(seconds),
        "steady_steps": len(seconds),
        "tokens_per_second": metrics.tokens_per_second(plan.workload, median),
        "tflops_6n": metrics.tflops_6n(plan.model, plan.workload, median),
        "mfu": metrics.mfu(plan.model, plan.workload, median, peak) if peak else None,
    }


def with_ratios(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the records with `times_ours`, their step time divided by ours, if ours was timed."""
    ours = next(
        (
            record["step_seconds_median"]
            for record in records
            if record["system"] == "ours" and "step_seconds_median" in record
        ),
        None,
    )
    return [
        (
            record | {"times_ours": record["step_seconds_median"] / ours}
            if ours and "step_seconds_median" in record
            else record
        )
        for record in records
    ]


def table(records: list[dict[str, Any]]) -> str:
    """Returns a table with one line per system, and the reason for each system that failed."""
    head = (
        "system",
        "step",
        "least .. most",
        "tokens/s",
        "TFLOPS 6N",
        "MFU",
        "device peak",
        "host peak",
        "x ours",
    )
    rows = [head]
    for record in records:
        if "step_seconds_median" not in record:
            continue
        least, most = (
            format_seconds(record[f"step_seconds_{which}"]) for which in ("least", "most")
        )
        peaks = [
            (
                "-"
                if record[f"{place}_peak_bytes"] is None
                else format_bytes(record[f"{place}_peak_bytes"])
            )
            for place in ("device", "host")
        ]
        mfu, ratio = (
            "-" if record.get(key) is None else f"{record[key]:{form}}"
            for key, form in (("mfu", ".1%"), ("times_ours", ".2f"))
        )
        speed = (f"{record['tokens_per_second']:,.0f}", f"{record['tflops_6n']:.4g}")
        rows.append(
            (
                record["system"],
                format_seconds(record["step_seconds_median"]),
                f"{least} .. {most}",
                *speed,
                mfu,
                *peaks,
                ratio,
            )
        )
    width = max(len(row[0]) for row in rows)
    lines = align(rows)
    lines += [
        f"{record['system'].ljust(width)}  {record['failure']}"
        for record in records
        if record["failure"]
    ]
    return "\n".join(
        lines
        + [f"{record['system']}: {record['notes']}" for record in records if record.get("notes")]
    )


def commit() -> str | None:
    """Returns the commit of the repository that contains this file, or None without a repository.

    A `+` is appended if tracked files were changed.
    """
    here = ["git", "-C", str(Path(__file__).resolve().parent)]
    try:
        head = subprocess.run(
            [*here, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            [*here, "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changed else "")


def run(args: argparse.Namespace) -> int:
    """Times the systems, prints a table, and returns the exit status."""
    for path in filter(None, (args.out, args.timeline)):
        file_arguments.check_writable(path)
    if args.timeline and "ours" not in args.systems:
        raise UserError(
            "--timeline",
            found=f"--systems {','.join(args.systems)}",
            allowed="systems with `ours`, whose timeline is written",
            fix="leave out --timeline, or add ours to --systems",
        )
    plan, hardware = make_plan(args)
    work, prediction = plan.workload, plan.prediction
    arguments = {
        key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()
    }
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit() or args.commit,
        "machine": {},
        "arguments": arguments,
        "model": plan.model.name,
        "parameters": plan.model.parameters,
        "tokens_per_step": work.step_tokens,
        "warm_up_steps": WARM_UP_STEPS,
        "plan": {
            "policy": plan.policy,
            "digest": plan.digest,
            "hardware": plan.hardware,
            "workload": work,
            "knobs": plan.knobs,
            "prediction": prediction,
        },
    }
    print(
        f"{plan.model.name}, {work.accumulation} x {work.batch} x {work.sequence} tokens,"
        f" {args.steps} steps each, {WARM_UP_STEPS} of them warm-up",
        end="",
    )
    print(
        (
            f"; predicted for {hardware.name}: {format_seconds(prediction.step_seconds)}"
            if prediction
            else ""
        ),
        flush=True,
    )
    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.toml"
        _with_path(plan, args.plan).save(path)
        for system in args.systems:
            timeline = [str(args.timeline)] if args.timeline and system == "ours" else []
            found = time_system(system, path, args.steps, args.device, *timeline)
            result["machine"] = found.get("machine") or result["machine"]
            records = with_ratios([*records, summary(found, plan, hardware)])
            if args.out:
                write_json(args.out, result | {"systems": records})
    print(table(records))
    if args.out:
        print(f"wrote {args.out}")
    failed = {record["system"] for record in records if record["failure"]}
    return 1 if failed & set(OWN) or len(failed) == len(records) else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark and returns its exit status.

    The status is 1 if `ours` or `ceiling` failed or if all systems failed, 2 for a mistake of the
    user, and 0 otherwise.
    """
    return run_program("benchmark", lambda: run(parser().parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
