"""Simulate or execute every plan of a grid, and compare their time and memory.

Each point of the grid is planned: its knobs and its placement are the fastest that fit. A grid that
names a knob or a placement is not planned: the knobs that it does not name have their default
values. The result is a table, a figure of step time against device memory with its Pareto front,
and all rows as JSON lines and as CSV.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from megatrain.experiments.cli import file_arguments, options
from megatrain.experiments.cli.verdict import from_options
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.units import counted, exact_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from megatrain.experiments.sweep.grid import Axes
    from megatrain.experiments.sweep.running import SweepEntry
    from megatrain.experiments.sweep.store import SweepRow
    from megatrain.simulator.hardware.machine import HardwareSpec
    from megatrain.simulator.model.specs import ModelSpec
    from megatrain.simulator.model.workload import Kernel, Workload
    from megatrain.simulator.schedule.plan import Plan

_EXECUTED_STEPS = 5


def describe(parser: argparse.ArgumentParser) -> None:
    from megatrain.experiments.sweep import grid

    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a Hugging Face folder, a config.json, or a name in the library, e.g. qwen2.5-14b",
    )
    options.add_hardware(parser)
    options.add_policy(parser)
    parser.add_argument(
        "--over",
        action="append",
        nargs="+",
        default=[],
        metavar=("AXIS", "VALUE"),
        help=(
            "an axis of the grid and its values; repeat for each axis, e.g. --over weight_slots 1 2"
            " 4 --over chunk_bytes 16MiB 64MiB --over placement.weights '' e,0-11. The axes are"
            f" {grid.in_words()}. The value null leaves a field of the workload unset"
        ),
    )
    parser.add_argument(
        "--grid",
        type=Path,
        metavar="FILE",
        help=(
            "TOML file with grids: [[grid]], and under it lines like weight_slots = [1, 2]. --over"
            " adds its axes to each grid"
        ),
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder for rows.jsonl, rows.csv and the figure; plans that have a row there are"
        " skipped",
    )
    parser.add_argument(
        "--default-knobs",
        action="store_true",
        help="do not plan the points: knobs that are not swept have their default values, and"
        " nothing is placed on the device",
    )
    parser.add_argument(
        "--jobs",
        type=options.whole("--jobs"),
        metavar="N",
        help="number of processes that simulate (default: one for each core)",
    )
    parser.add_argument(
        "--execute",
        action="store_true",
        help="execute the plans on this machine with random tokens instead of simulating them",
    )
    steps = options.whole("--steps", 3)
    parser.add_argument(
        "--steps",
        type=steps,
        default=_EXECUTED_STEPS,
        help=(
            "with --execute, steps of each plan; the first 2 are not counted"
            f" (default {_EXECUTED_STEPS})"
        ),
    )
    options.add_device(parser)
    options.add_workload(parser, dtype=None, any_state=False)


def _without_effect(args: argparse.Namespace) -> list[str]:
    """Returns the options that no point uses, because each grid has the axis of the same name. An
    option with its default value is left out.
    """
    from megatrain.experiments.sweep.grid import ALIASES, LIMITS

    parser = options.OneLineParser()
    describe(parser)
    option_of = {axis: option for option, axis in ALIASES.items()}
    found = []
    for axis in sorted(set.intersection(*map(set, grids_of(args)))):
        name = option_of.get(axis, axis)
        value = getattr(args, name, None)
        if value is not None and value != parser.get_default(name):
            shown = exact_size(value) if axis in LIMITS else value
            found.append(f"--{name.replace('_', '-')}" + ("" if value is True else f" {shown}"))
    return found


def grids_of(args: argparse.Namespace) -> list[Axes]:
    """Returns the grids of `--grid`, each with the axes of `--over` added.

    Raises UserError if `--over` names an axis twice.
    """
    from megatrain.experiments.sweep.grid import axis, read_grids

    given: Axes = {}
    for name, *values in args.over:
        key, chosen = axis(name, values, "--over")
        if key in given:
            raise UserError(
                "--over",
                found=f"{key} twice",
                allowed="each axis once",
                fix="give all of its values in one --over",
            )
        given[key] = chosen
    return [{**grid, **given} for grid in (read_grids(args.grid) if args.grid else [{}])]


def entries_of(args: argparse.Namespace) -> tuple[list[SweepEntry], list[SweepRow]]:
    """Returns an entry for each point of the sweep: a plan, and whether its knobs are to be chosen.
    Also returns the rows of the points whose values exclude each other.

    Raises UserError for an unknown policy or model, or a value that its axis does not allow.
    """
    from megatrain.experiments.sweep.grid import KNOBS, combinations
    from megatrain.experiments.sweep.running import SweepEntry
    from megatrain.experiments.sweep.store import Keys, SweepRow, sources_digest
    from megatrain.simulator import policies
    from megatrain.simulator.hardware.machine import HardwareSpec, hardware_name
    from megatrain.simulator.model import optimizer
    from megatrain.simulator.model.specs import ModelSpec
    from megatrain.simulator.schedule.plan import Plan

    hardware = HardwareSpec.load(args.hardware)
    grids = [
        grid if "policy" in grid else {"policy": tuple(from_options.policies(args.policy)), **grid}
        for grid in grids_of(args)
    ]
    for name in [name for grid in grids for name in grid["policy"]]:
        policies.find(name)
    model = ModelSpec.load(args.model)
    args = options.with_dtype(args, hardware, quiet=all("dtype" in grid for grid in grids))
    base = Plan(
        policy=policies.names()[0],
        hardware=hardware_name(args.hardware),
        source=args.model,
        model=model,
        workload=options.workload(args, model),
        device_limit_bytes=args.device_memory or hardware.device_bytes,
        host_limit_bytes=args.host_memory or hardware.host_bytes,
    )
    usual = (base.workload.optimizer,)
    for name in dict.fromkeys(name for grid in grids for name in grid.get("optimizer", usual)):
        optimizer.find(name)
    executed = ["executed", args.steps, args.device] if args.execute else []
    keys = Keys(base, hardware, sources_digest(), executed)
    planned = [grid for grid in grids if not (args.default_knobs or KNOBS & grid.keys())]
    given = [grid for grid in grids if grid not in planned]
    points: list[tuple[Plan, bool]] = []
    impossible: list[SweepRow] = []
    for group, chosen in ((planned, True), (given, False)):
        for plan in combinations(base, group):
            if isinstance(plan, Plan):
                points.append((plan, chosen))
                continue
            impossible.append(
                SweepRow(
                    key=keys.of(plan, planned=chosen),
                    model=model.name,
                    hardware=hardware.name,
                    planned=chosen,
                    decided_by="refused",
                    **plan._asdict(),
                )
            )
    if not (args.attention or any("attention" in grid for grid in grids)):
        kernels: dict[Workload, Kernel | None] = {}
        device = options.device(args) if args.execute else None
        points = [
            (_with_kernel(plan, hardware, device, kernels), chosen) for plan, chosen in points
        ]
    entries = [SweepEntry(plan, keys.of(plan, planned=chosen), chosen) for plan, chosen in points]
    return entries, impossible


def _with_kernel(
    plan: Plan,
    hardware: HardwareSpec,
    device: torch.device | None,
    known: dict[Workload, Kernel | None],
) -> Plan:
    """Returns `plan` with the attention kernel that `check` chooses, or without one if `device`,
    which executes the plan, does not have it. `known` stores the choices.
    """
    from megatrain.simulator.planner.attention_kernel import with_attention_kernel

    row = msgspec.structs.replace(plan.workload, batch=1)  # the choice does not depend on the batch
    if row not in known:
        chosen = with_attention_kernel(plan.model, hardware, row)
        known[row] = chosen.attention if _has_kernel(device, plan.model, chosen) else None
    work = msgspec.structs.replace(plan.workload, attention=known[row])
    return msgspec.structs.replace(plan, workload=work)


def _has_kernel(device: torch.device | None, model: ModelSpec, work: Workload) -> bool:
    """Returns whether `device` can run the attention kernel of `work`. None stands for any."""
    if device is None:
        return True
    from megatrain.runtime.layers.attention import kernel_of

    try:
        kernel_of(model, work, device)
    except UserError:
        return False
    return True


def _what_was_planned(entries: Sequence[SweepEntry], impossible: int) -> str:
    """Returns the first lines of the output: how the plans got their knobs, and the number of
    points that are `impossible`.
    """
    planned = sum(entry.planned for entry in entries)
    given = len(entries) - planned
    lines = {
        f"planned {planned:,} points: knobs and placement are the fastest that fit": planned,
        f"took {given:,} plans as given: knobs that are not swept have their default values": given,
        f"refused {counted(impossible, 'point')} whose values exclude each other": impossible,
    }
    return "\n".join(line for line, count in lines.items() if count)


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from megatrain.experiments.sweep import running
    from megatrain.experiments.sweep.flat import ROWS, outdated, write_csv
    from megatrain.experiments.sweep.store import Store
    from megatrain.experiments.sweep.table import point, same_results, table
    from megatrain.runtime.host import cores
    from megatrain.simulator.hardware.machine import HardwareSpec

    (entries, impossible), hardware = entries_of(args), HardwareSpec.load(args.hardware)
    axes = list(dict.fromkeys(name for grid in grids_of(args) for name in grid))
    keys = [*(entry.key for entry in entries), *(row.key for row in impossible)]
    numbers = {key: number for number, key in enumerate(keys, 1)}
    store_path, csv_path = args.out / ROWS, args.out / "rows.csv"
    file_arguments.check_writable(store_path)
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    begun = time.perf_counter()
    with (
        Store(store_path) as store,
        Progress(*columns, console=console, disable=not console.is_terminal) as bars,
    ):
        todo = [entry for entry in entries if entry.key not in store.rows]
        refused = [row for row in impossible if row.key not in store.rows]
        done = len(keys) - len(todo) - len(refused)
        name = "execute" if args.execute else "simulate"
        bar = bars.add_task(name, total=len(keys), completed=done)

        def advance(rows: list[SweepRow]) -> None:
            bars.advance(bar, len(rows))

        def begin(row: SweepRow) -> None:
            _progress(f"plan {numbers[row.key]:,} of {len(keys):,}: {point(row, axes)}")

        def end(rows: list[SweepRow]) -> None:
            advance(rows)
            for row in rows:
                if row.decided_by == "refused":
                    _progress(f"no result: {row.reason}")
                elif row.decided_by == "memory":
                    _progress(f"not run: it does not fit, limited by {row.binding}")

        store.add(refused)
        advance(refused)
        try:
            if args.execute:
                running.execute(
                    todo, hardware, store, end, before=begin, steps=args.steps, device=args.device
                )
            else:
                running.simulate(todo, hardware, store, advance, jobs=args.jobs or cores())
        except KeyboardInterrupt as error:
            kept = f"{sum(key in store.rows for key in keys):,} of {counted(len(keys), 'plan')}"
            error.add_note(f"interrupted; {store_path} keeps {kept}; the same command continues")
            raise
        rows = [store.rows[key] for key in keys]
        left_out = outdated(store.rows.values(), rows)
        if outdated(rows, store.rows.values()):
            store.add(rows)  # because the last rows of a store decide which rows are current
        write_csv(csv_path, store.rows.values())
    print(_what_was_planned(entries, len(impossible)))
    for name in same_results(rows, axes):
        print(f"{name} has no effect: plans that differ only in it have the same time and memory")
    for option in _without_effect(args):
        print(f"{option} has no effect, because an axis gives each point its own value")
    if left_out:
        print(
            f"left {counted(len(left_out), 'earlier row')} out of {csv_path.name}: made with"
            f" another simulator, or another version of {args.hardware}; {store_path.name} keeps"
            " them"
        )
    print(table(rows, axes))
    seconds = time.perf_counter() - begun
    print(
        f"\n{len(keys) - done:,} plans in {seconds:.1f} s, {done:,} had been done before;"
        f" wrote {store_path} and {csv_path}"
    )
    if any(row.timed for row in rows):
        from megatrain.experiments.sweep.picture import draw

        title = f"{len(rows):,} plans of {rows[0].model} on {hardware.name}"
        caption = (
            f"{sum(row.timed for row in rows):,} fit;"
            f" {'executed' if args.execute else 'predicted'}, {time.strftime('%Y-%m-%d')}"
        )
        pictures = draw(rows, args.out / "sweep", title, caption)
        print("wrote " + " and ".join(map(str, pictures)))
    return 1 if all(row.decided_by == "refused" for row in rows) else 0
