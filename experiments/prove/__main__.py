"""Calibrates once, then executes plans that were not calibrated on: `python -m megatrain.experiments.prove --out DIR`.

DIR gets `hardware.toml`, `plans.json` with every prediction, `rows.jsonl` with a line for each visit of a case, `timelines.jsonl` with its middle step, and
`summary.json`. Each case is visited twice, minutes apart: how far the visits of one plan lie apart is what a machine allows to be foretold. Run again it goes on
where it was: a calibration that is there is taken as it is, and so are plans and rows. `python -m megatrain.experiments.prove.show DIR` makes tables and a
picture of it.
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

from megatrain.experiments import options
from megatrain.experiments.hardware_file import write_hardware
from megatrain.experiments.prove.measure import case_seconds, executed, load_libraries, planned
from megatrain.experiments.prove.rows import Row, by_case, read_visits
from megatrain.experiments.prove.suites import Case, Suite, refuse_grid, suite
from megatrain.experiments.prove.summary import format_summary, summarize
from megatrain.experiments.row_file import append_row
from megatrain.experiments.script import ended
from megatrain.runtime.calibrate import Subject, calibrate
from megatrain.runtime.layers.templates import config_of
from megatrain.runtime.memory.kept_memory import KeptMemory
from megatrain.simulator.assessment import Choice
from megatrain.simulator.errors import UserError
from megatrain.simulator.files import convert, read_json, write_json
from megatrain.simulator.hardware import HardwareSpec
from megatrain.simulator.memory import PROCESS
from megatrain.simulator.units import format_bytes, format_seconds

HARDWARE, PLANS, ROWS, TIMELINES, SUMMARY = "hardware.toml", "plans.json", "rows.jsonl", "timelines.jsonl", "summary.json"


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """A case by its name, and its plan."""

    name: str
    choice: Choice


def parser() -> options.OneLineParser:
    made = options.OneLineParser(prog="python -m megatrain.experiments.prove", description=__doc__)
    made.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder for calibration, plans, rows and summary")
    made.add_argument("--suite", default="h200", metavar="NAME", help="which cases: h200 (default), or tiny, to try the script on a CPU")
    made.add_argument("--cases", nargs="+", metavar="TEXT", help="only cases whose name contains one of these")
    made.add_argument("--seconds", type=options.real("--seconds"), metavar="N", help="start no case that would end later than so many seconds from now")
    made.add_argument("--visits", type=options.whole("--visits"), default=2, metavar="N", help="execute all cases, then all again, so often (default 2)")
    made.add_argument("--plan-only", action="store_true", help="calibrate and plan, execute nothing")
    options.add_device(made)
    return made


def measured_machine(chosen: Suite, folder: Path, device: torch.device) -> HardwareSpec:
    """The calibration in the folder, or a new one."""
    path = folder / HARDWARE
    if path.exists():
        return HardwareSpec.load(str(path))
    first, *others = (Subject(model, config_of(model)) for model in chosen.models.values())
    began = time.monotonic()
    hardware = calibrate(
        "proved", first.model, chosen.base, first.config, device, grid=chosen.points(), others=others, host_bytes=chosen.host_bytes,
        device_bytes=chosen.device_bytes, progress=lambda what: print(f"{time.monotonic() - began:6.1f} s  calibrating: {what}", flush=True),
    )  # fmt: skip
    write_hardware(path, hardware, "python -m megatrain.experiments.prove")
    print(f"{time.monotonic() - began:6.1f} s  wrote {path}", flush=True)
    return hardware


def plans(chosen: Suite, cases: Sequence[Case], folder: Path, hardware: HardwareSpec) -> dict[str, Choice]:
    """By case; those that are in the folder, and the others made now."""
    path = folder / PLANS
    found = {entry.name: entry.choice for entry in convert(read_json(path), list[Planned], str(path))} if path.exists() else {}
    began, missing = time.monotonic(), [case for case in cases if case.name not in found]
    for case in missing:
        if choice := planned(chosen, case, hardware, HARDWARE):
            found[case.name] = choice
    if missing:
        write_json(path, [Planned(name=name, choice=choice) for name, choice in found.items()])
        print(f"{time.monotonic() - began:6.1f} s  planned {len(missing)} cases", flush=True)
    return {case.name: found[case.name] for case in cases if case.name in found}


def announce(cases: Sequence[Case], choices: dict[str, Choice], rows: Sequence[Row], visits: int) -> None:
    """What will run, and how long it will take by its own prediction."""
    width, total = max(len(case.name) for case in cases), 0.0
    for case in cases:
        choice = choices.get(case.name)
        if choice is None:
            print(f"{case.name:<{width}}  left out: it does not fit, or changes nothing")
            continue
        seconds = case_seconds(choice) * max(visits - _visits(rows, case, choice), 0)
        total += seconds
        account = choice.account
        memory = f"device {format_bytes(account.device_peak_bytes):>10}  host {format_bytes(account.host_peak_bytes):>10}"
        print(f"{case.name:<{width}}  step {format_seconds(choice.step_seconds):>9}  {memory}  {f'{seconds:5.1f} s' if seconds else 'done'}")
    print(f"{total:.0f} s in all", flush=True)


def run(args: argparse.Namespace) -> int:
    deadline = time.monotonic() + args.seconds if args.seconds else float("inf")
    chosen, device, folder = suite(args.suite), options.device(args), args.out
    cases = [case for case in chosen.cases if not args.cases or any(text in case.name for text in args.cases)]
    if not cases:
        raise UserError("--cases", found=" ".join(args.cases), allowed=f"a part of a name such as {chosen.cases[0].name}", fix="leave it out for all")
    refuse_grid(chosen, cases)
    options.check_writable(folder / ROWS)
    folder.mkdir(parents=True, exist_ok=True)
    hardware = measured_machine(chosen, folder, device)
    refuse_grid(chosen, cases, hardware.costs)
    choices = plans(chosen, cases, folder, hardware)
    rows = read_visits(folder / ROWS)
    announce(cases, choices, rows, args.visits)
    if args.plan_only:
        return 0
    _execute([case for case in cases if case.name in choices], choices, rows, args, hardware, device, deadline)
    return tell(folder, [row for row in by_case(rows) if row.name in {case.name for case in cases}])


def _execute(
    cases: Sequence[Case], choices: dict[str, Choice], rows: list[Row], args: argparse.Namespace, hardware: HardwareSpec, device: torch.device, deadline: float
) -> None:  # fmt: skip
    """All cases once, then all again, as often as is asked for; each visit's row goes into the folder, and onto `rows`. What failed waits for the next command."""
    waiting = [choices[case.name].account for case in cases if _visits(rows, case, choices[case.name]) < args.visits]
    if not waiting:
        return
    memory, later = KeptMemory(registered=device.type == "cuda"), set[str]()
    try:
        if most := max(account.host_peak_bytes - account.pools.get(PROCESS, 0) for account in waiting):
            memory.reserve(most)
        load_libraries(next(iter(suite("tiny").models.values())), device)
        for visit, case in itertools.product(range(args.visits), cases):
            choice = choices[case.name]
            if case.name in later or _visits(rows, case, choice) > visit:
                continue
            if twin := _twin(case, choice, rows):
                row = msgspec.structs.replace(twin, name=case.name, policy=case.policy, variant=case.variant, same_as=twin.name)
            else:
                seconds = case_seconds(choice)
                if time.monotonic() + seconds > deadline:
                    print(f"{case.name}: left for the next run, {seconds:.0f} s would be too long", flush=True)
                    later.add(case.name)
                    continue
                began = time.monotonic()
                row, timeline = executed(case, choice, hardware, device, memory)
                if timeline:  # before its row: a case that is done has one
                    append_row(args.out / TIMELINES, timeline)
                told = row.failure or f"predicted {format_seconds(choice.step_seconds)}, measured {format_seconds(row.step_seconds or 0)}"
                print(f"{case.name}: {told}; {time.monotonic() - began:.1f} of {seconds:.1f} s", flush=True)
                if row.failure:
                    later.add(case.name)
            append_row(args.out / ROWS, row)
            rows.append(row)
    finally:
        memory.free()


def _visits(rows: Iterable[Row], case: Case, choice: Choice) -> int:
    """How often this plan of the case was measured; of one that is another case's plan there is nothing to measure."""
    row = next((row for row in by_case(rows) if row.name == case.name and row.plan == choice.plan), None)
    return 0 if row is None else sys.maxsize if row.same_as else len(row.visits)


def _twin(case: Case, choice: Choice, rows: Iterable[Row]) -> Row | None:
    """Another case's visit with the same plan, that was measured."""
    return next((row for row in rows if row.name != case.name and row.plan == choice.plan and not row.failure and not row.same_as), None)


def tell(folder: Path, rows: list[Row]) -> int:
    summary = summarize(rows)
    write_json(folder / SUMMARY, summary)
    print("\n" + format_summary(rows, summary))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where it ran, whatever the errors are; 2 for a mistake of the user."""
    return ended("prove", lambda: run(parser().parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
