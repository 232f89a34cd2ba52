"""Simulate one optimizer step of a plan and print its time by lane and by kind of operation."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megatrain.experiments.cli import file_arguments
from megatrain.simulator.base.errors import UserError


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "plan", type=Path, metavar="PLAN", help="a plan written by `megatrain plan`"
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="also write the timeline to a file for https://ui.perfetto.dev",
    )
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="also draw the timeline as a PNG file"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def step_line(seconds: float, makespan_ns: int, overhead_ns: int) -> str:
    """Returns a line with the time of a step and the parts of which it is the sum.

    Args:
        seconds: the predicted time of the step.
        makespan_ns: the part of the schedule's operations, at the host's mean speed.
        overhead_ns: the part of the host outside the schedule (`CostModel.step_overhead_ns`).
    """
    from megatrain.simulator.base.units import format_seconds

    parts = [f"{format_seconds(makespan_ns / 1e9)} for the schedule's operations"]
    if overhead_ns:
        parts.append(
            f"{format_seconds(overhead_ns / 1e9)} for the host before the first and after the last"
            " operation (step_overhead_ns)"
        )
    if (varied_ns := round(seconds * 1e9) - makespan_ns - overhead_ns) > 0:
        parts.append(f"{format_seconds(varied_ns / 1e9)} because the host's speed varies")
    return f"step {format_seconds(seconds)}: {', '.join(parts)}"


def run(args: argparse.Namespace) -> int:
    from megatrain.experiments.cli.verdict.from_options import as_json
    from megatrain.simulator.base.errors import DoesNotFit
    from megatrain.simulator.base.units import format_bytes, format_seconds
    from megatrain.simulator.costs import costs_of
    from megatrain.simulator.engine.discrete_event import makespan_ns, simulate
    from megatrain.simulator.planner.search import assess
    from megatrain.simulator.plots.perfetto import save_trace
    from megatrain.simulator.policies import evaluation, find, verified
    from megatrain.simulator.verdict.verdict import summarize

    if args.trace:
        file_arguments.check_replaceable(args.trace, file_arguments.TRACE_FILE)
    if args.picture:
        file_arguments.check_replaceable(args.picture, file_arguments.PICTURE_FILE)
        if args.picture.suffix.lower() != ".png":
            raise UserError(
                f"--picture {args.picture}",
                found=f"the suffix {args.picture.suffix!r}",
                allowed=".png",
                fix="name it NAME.png",
            )
    plan = file_arguments.plan_of(args.plan)
    hardware = file_arguments.hardware_of(args.plan, plan.hardware)
    with file_arguments.naming(args.plan):
        schedule = verified(plan)
        costs = costs_of(plan, hardware)
    timeline = simulate(schedule, costs)
    if args.trace:
        save_trace(args.trace, [timeline], schedule)
    if args.picture:
        from megatrain.simulator.plots.pictures import timeline_png  # loads matplotlib

        title = f"{plan.model.name} on {hardware.name}, policy {plan.policy}"
        timeline_png(args.picture, [timeline], title, "predicted, from the plan")
    lanes = {lane: timeline.busy_ns(lane) / 1e9 for lane in schedule.lanes}
    kinds: dict[str, tuple[int, float]] = {}
    for span in timeline.spans:
        count, seconds = kinds.get(span.kind, (0, 0.0))
        kinds[span.kind] = (count + 1, seconds + span.duration_ns / 1e9)
    choice = assess(plan, costs)
    evaluation_seconds = (
        None if find(plan.policy).prediction_only else makespan_ns(evaluation(plan), costs) / 1e9
    )
    if args.json:
        report = as_json(summarize(choice, hardware)) | {
            "ops": len(schedule.ops),
            "digest": schedule.digest,
            "lane_busy_seconds": lanes,
            "evaluation_seconds": evaluation_seconds,
        }
        print(
            json.dumps(
                report
                | {
                    "kinds": {
                        kind: {"ops": count, "seconds": seconds}
                        for kind, (count, seconds) in kinds.items()
                    }
                }
            )
        )
        return 0 if choice.feasible else DoesNotFit.status
    several = f", {plan.gpus} GPUs" if plan.gpus > 1 else ""
    several += f" of {plan.hosts} hosts" if plan.hosts > 1 else ""
    print(
        f"{plan.model.name}, policy {plan.policy}{several}, schedule {schedule.digest}:"
        f" {len(schedule.ops)} ops{' on each GPU' if several else ''}"
    )
    print(step_line(choice.step_seconds, timeline.makespan_ns, costs.step_overhead_ns))
    print(
        "\n".join(
            f"  lane {lane:<8} busy {format_seconds(busy):>11} "
            f" {busy * 1e9 / timeline.makespan_ns:6.1%}"
            for lane, busy in lanes.items()
        )
    )
    print(
        "\n".join(
            f"  {kind:<22}{count:>6} ops {format_seconds(seconds):>11}"
            for kind, (count, seconds) in kinds.items()
        )
    )
    if evaluation_seconds is not None:
        print(
            f"evaluation {format_seconds(evaluation_seconds)}: the forward pass over as many tokens"
            " as a step has"
        )
    account = choice.account
    for place, peak, limit in (
        ("device", account.device_peak_bytes, account.device_limit_bytes),
        ("host", account.host_peak_bytes, account.host_limit_bytes),
    ):
        print(
            f"  {place:<6} memory {format_bytes(peak):>12} of {format_bytes(limit)}"
            f"{' for each GPU' if several else ''}{'' if peak <= limit else ': DOES NOT FIT'}"
        )
    if not choice.feasible:
        print(f"  limited by {account.binding}: {account.advice}")
    if args.picture:
        print(f"wrote {args.picture}")
    if args.trace:
        print(f"wrote {args.trace}: open it at https://ui.perfetto.dev")
    return 0 if choice.feasible else DoesNotFit.status
