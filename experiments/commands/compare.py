"""Predicted against measured, op by op: what a run's plan foretold and what happened."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from megatrain.experiments import options
from megatrain.simulator.errors import UserError


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a folder written by `megatrain train`")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output, and nothing else")


def run(args: argparse.Namespace) -> int:
    import msgspec

    from megatrain.experiments import pictures
    from megatrain.simulator.compare import compare, format_report
    from megatrain.simulator.costs import Replayed, cost_model
    from megatrain.simulator.engine import simulate
    from megatrain.simulator.evaluator import evaluate
    from megatrain.simulator.files import write_json
    from megatrain.simulator.plan import Plan
    from megatrain.simulator.policies import verified
    from megatrain.simulator.timeline import Timeline
    from megatrain.simulator.trace import save_trace

    folder: Path = args.run
    if not os.path.isfile(folder / "measured.json"):
        raise UserError(
            str(folder),
            found="no measured.json" if os.path.isdir(folder) else "no such folder",
            allowed="a folder that `megatrain train` has finished",
            fix="check the path, or train to the end",
        )
    plan = Plan.load(folder / "plan.toml")
    schedule = verified(plan)
    costs = cost_model(options.hardware_of(folder / "plan.toml", plan.hardware), plan.model, plan.workload)
    predicted, measured = simulate(schedule, costs), Timeline.load(folder / "measured.json")
    try:
        report = compare(predicted, measured, schedule, replayed=evaluate(schedule, Replayed(measured)))
    except ValueError as error:
        raise UserError(str(folder / "measured.json"), found=str(error), allowed=f"a timeline of schedule {schedule.digest}", fix="train again") from None
    record, memory = pictures.read_record(folder), pictures.memory_rows(folder, plan, schedule, costs)  # before anything is written
    predicted.save(folder / "predicted.json")
    write_json(folder / "comparison.json", report)
    save_trace(folder / "trace.json", [predicted, measured], schedule)
    pictures.draw_run(folder, record, plan, schedule, predicted, measured, costs)
    if args.json:
        print(json.dumps(msgspec.to_builtins(report) | {"memory": memory}))
        return 0
    print(format_report(report).rstrip())
    print("\n" + pictures.format_memory(memory))
    print(f"\nwrote comparison.json, trace.json (open it at https://ui.perfetto.dev), timeline.png, memory.png and loss.png into {folder}")
    return 0
