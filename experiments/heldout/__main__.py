"""Calibrates a machine once, then executes plans that the calibration did not measure: `python -m
megatrain.experiments.heldout --out DIR`.

It writes `hardware.toml`, `plans.json` with every prediction, `rows.jsonl` with one line for each
repetition of a case, `timelines.jsonl` with the middle step of each case, and `summary.json` to
DIR. The repetitions of a case are minutes apart. No prediction can be more exact than their spread.
A second run with the same DIR continues the first one: it reuses the calibration, plans and rows in
DIR. `python -m megatrain.experiments.heldout.show DIR` makes tables and a picture of the results.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import torch

from megatrain.experiments.cli import file_arguments, options
from megatrain.experiments.cli.program import run_program
from megatrain.experiments.files.hardware_file import write_hardware
from megatrain.experiments.files.row_file import append_row
from megatrain.experiments.heldout.measure import case_seconds, executed, load_libraries, plan_case
from megatrain.experiments.heldout.rows import HeldoutRow, by_case, read_repetitions
from megatrain.experiments.heldout.suites import HeldoutCase, Suite, refuse_grid, suite
from megatrain.experiments.heldout.summary import summarize_errors
from megatrain.experiments.heldout.table import markdown
from megatrain.runtime.calibration.calibrate import Subject, calibrate
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.memory.reusable_pinned_pool import ReusablePinnedPool
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import convert, read_json, write_json
from megatrain.simulator.base.units import format_bytes, format_seconds
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.memory.account import PROCESS, TUNING
from megatrain.simulator.planner.assessment import Choice

HARDWARE, PLANS, ROWS, TIMELINES, SUMMARY = (
    "hardware.toml",
    "plans.json",
    "rows.jsonl",
    "timelines.jsonl",
    "summary.json",
)


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """A case and its plan, as stored in `plans.json`."""

    name: str
    """The case's name."""
    choice: Choice
    """The plan and its prediction."""


def parser() -> options.OneLineParser:
    """Returns the parser for the options."""
    parser = options.OneLineParser(
        prog="python -m megatrain.experiments.heldout", description=__doc__
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="the folder for calibration, plans, rows and summary",
    )
    parser.add_argument(
        "--suite",
        default="h200",
        metavar="NAME",
        help=(
            "the suite of cases: h200 (default); default-set, calibrated as without a model;"
            " compiled, with compiled layers; choices, the planner's choice against plans that are"
            " nearly as fast; families, predicted from the library's rates; figures, places of two"
            " figures with the whole 7B model, predicted in the same way; or tiny to try the script"
            " on a CPU"
        ),
    )
    parser.add_argument(
        "--cases", nargs="+", metavar="TEXT", help="only cases whose name contains one of these"
    )
    parser.add_argument(
        "--seconds",
        type=options.real("--seconds"),
        metavar="N",
        help="start only cases that will end within N seconds from now",
    )
    parser.add_argument(
        "--repetitions",
        type=options.whole("--repetitions"),
        default=2,
        metavar="N",
        help="how often each case is executed (default 2); all cases run once before any repeats",
    )
    parser.add_argument(
        "--plan-only", action="store_true", help="calibrate and plan, but execute nothing"
    )
    options.add_device(parser)
    return parser


def measured_machine(chosen: Suite, folder: Path, device: torch.device) -> HardwareSpec:
    """Returns the machine to predict for: the calibration stored in the folder, or the library's
    machine if the suite names one, or a new calibration, which is then stored in the folder.
    """
    path = folder / HARDWARE
    if path.exists():
        return HardwareSpec.load(str(path))
    if chosen.library:
        return HardwareSpec.load(chosen.library)
    first, *others = (Subject(model, config_of(model)) for model in chosen.measured().values())
    began = time.monotonic()
    hardware = calibrate(
        "proved",
        first.model,
        chosen.base,
        first.config,
        device,
        grid=chosen.points(),
        others=others,
        host_bytes=chosen.host_bytes,
        device_bytes=chosen.device_bytes,
        progress=lambda what: print(
            f"{time.monotonic() - began:6.1f} s  calibrating: {what}", flush=True
        ),
    )
    write_hardware(path, hardware, "python -m megatrain.experiments.heldout")
    print(f"{time.monotonic() - began:6.1f} s  wrote {path}", flush=True)
    return hardware


def plans(
    chosen: Suite, cases: Sequence[HeldoutCase], folder: Path, hardware: HardwareSpec
) -> dict[str, Choice]:
    """Returns case -> plan. Plans in the folder are reused, and missing ones are made and stored.
    A case is left out if it does not fit or if its variant changes nothing.
    """
    path = folder / PLANS
    choices = (
        {entry.name: entry.choice for entry in convert(read_json(path), list[Planned], str(path))}
        if path.exists()
        else {}
    )
    began, missing = time.monotonic(), [case for case in cases if case.name not in choices]
    for case in missing:
        if choice := plan_case(chosen, case, hardware, chosen.library or HARDWARE):
            choices[case.name] = choice
    if missing:
        write_json(path, [Planned(name=name, choice=choice) for name, choice in choices.items()])
        print(f"{time.monotonic() - began:6.1f} s  planned {len(missing)} cases", flush=True)
    return {case.name: choices[case.name] for case in cases if case.name in choices}


def announce(
    cases: Sequence[HeldoutCase],
    choices: dict[str, Choice],
    rows: Sequence[HeldoutRow],
    repetitions: int,
) -> None:
    """Prints the predicted step, memory and run time of each case, and the total run time."""
    width, total = max(len(case.name) for case in cases), 0.0
    for case in cases:
        choice = choices.get(case.name)
        if choice is None:
            print(
                f"{case.name:<{width}}  left out: it does not fit, or its variant changes nothing"
            )
            continue
        seconds = case_seconds(choice) * max(repetitions - _repetitions(rows, case, choice), 0)
        total += seconds
        account = choice.account
        memory = (
            f"device {format_bytes(account.device_peak_bytes):>10}  host"
            f" {format_bytes(account.host_peak_bytes):>10}"
        )
        print(
            f"{case.name:<{width}}  step {format_seconds(choice.step_seconds):>9}  {memory} "
            f" {f'{seconds:5.1f} s' if seconds else 'done'}"
        )
    print(f"{total:.0f} s in total", flush=True)


def run(args: argparse.Namespace) -> int:
    """Calibrates, plans, executes and reports, and returns the exit status. Raises UserError if no
    case has a text of `--cases` in its name, or if a case is a point of the calibration's grid.
    """
    deadline = time.monotonic() + args.seconds if args.seconds else float("inf")
    chosen, device, folder = suite(args.suite), options.device(args), args.out
    cases = [
        case
        for case in chosen.cases
        if not args.cases or any(text in case.name for text in args.cases)
    ]
    if not cases:
        raise UserError(
            "--cases",
            found=" ".join(args.cases),
            allowed=f"a part of a name such as {chosen.cases[0].name}",
            fix="leave the option out to run all cases",
        )
    refuse_grid(chosen, cases)
    file_arguments.check_writable(folder / ROWS)
    folder.mkdir(parents=True, exist_ok=True)
    hardware = measured_machine(chosen, folder, device)
    refuse_grid(chosen, cases, hardware.costs)
    choices = plans(chosen, cases, folder, hardware)
    rows = read_repetitions(folder / ROWS)
    announce(cases, choices, rows, args.repetitions)
    if args.plan_only:
        return 0
    _execute(
        [case for case in cases if case.name in choices],
        choices,
        rows,
        args,
        hardware,
        device,
        deadline,
    )
    return report(
        folder, [row for row in by_case(rows) if row.name in {case.name for case in cases}]
    )


def _execute(
    cases: Sequence[HeldoutCase],
    choices: dict[str, Choice],
    rows: list[HeldoutRow],
    args: argparse.Namespace,
    hardware: HardwareSpec,
    device: torch.device,
    deadline: float,
) -> None:
    """Executes all cases once, and then again until each case has `args.repetitions` repetitions.
    Appends each row to the file in the folder and to `rows`. A case that failed, or that would end
    after `deadline` (of `time.monotonic`), is left for the next run.
    """
    waiting = [
        choices[case.name].account
        for case in cases
        if _repetitions(rows, case, choices[case.name]) < args.repetitions
    ]
    if not waiting:
        return
    memory, later = ReusablePinnedPool(registered=device.type == "cuda"), set[str]()
    try:
        if most := max(
            account.host_peak_bytes - account.pools.get(PROCESS, 0) - account.pools.get(TUNING, 0)
            for account in waiting
        ):
            memory.reserve(most)
        load_libraries(next(iter(suite("tiny").models.values())), device)
        for repetition, case in itertools.product(range(args.repetitions), cases):
            choice = choices[case.name]
            if case.name in later or _repetitions(rows, case, choice) > repetition:
                continue
            if twin := _twin(case, choice, rows):
                row = msgspec.structs.replace(
                    twin,
                    name=case.name,
                    policy=case.policy,
                    variant=case.variant,
                    same_as=twin.name,
                )
            else:
                seconds = case_seconds(choice)
                if time.monotonic() + seconds > deadline:
                    print(
                        f"{case.name}: left for the next run, {seconds:.0f} s exceed --seconds",
                        flush=True,
                    )
                    later.add(case.name)
                    continue
                began = time.monotonic()
                row, timeline = executed(case, choice, hardware, device, memory)
                if timeline:  # written before the row, so that every measured case has one
                    append_row(args.out / TIMELINES, timeline)
                outcome = row.failure or (
                    f"predicted {format_seconds(choice.step_seconds)}, "
                    f"measured {format_seconds(row.step_seconds or 0)}"
                )
                print(
                    f"{case.name}: {outcome}; {time.monotonic() - began:.1f} of {seconds:.1f} s",
                    flush=True,
                )
                if row.failure:
                    later.add(case.name)
            append_row(args.out / ROWS, row)
            rows.append(row)
    finally:
        memory.free()


def _repetitions(rows: Iterable[HeldoutRow], case: HeldoutCase, choice: Choice) -> int:
    """Returns how often this plan of the case was measured. A plan that is measured as another
    case's plan needs no measurement, so its count is `sys.maxsize`.
    """
    row = next(
        (row for row in by_case(rows) if row.name == case.name and row.plan == choice.plan), None
    )
    return 0 if row is None else sys.maxsize if row.same_as else len(row.repetitions)


def _twin(case: HeldoutCase, choice: Choice, rows: Iterable[HeldoutRow]) -> HeldoutRow | None:
    """Returns a measured row of another case with the same plan, if there is one."""
    return next(
        (
            row
            for row in rows
            if row.name != case.name
            and row.plan == choice.plan
            and not row.failure
            and not row.same_as
        ),
        None,
    )


def report(folder: Path, rows: list[HeldoutRow]) -> int:
    """Writes the summary of the rows, prints their tables, and returns the exit status 0."""
    write_json(folder / SUMMARY, summarize_errors(rows))
    print("\n" + markdown(rows))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if the experiment ran, whatever the errors of the predictions are, and 2 for a
    mistake of the user.
    """
    return run_program("heldout", lambda: run(parser().parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
