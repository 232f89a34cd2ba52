"""The page's text and tables as HTML. Errors come from the run's error report. Sizes and times have
the same format as in the command's output.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from megatrain.experiments.cli.verdict import reasons as verdict_reasons
from megatrain.experiments.run_report.compared_run import ComparedRun
from megatrain.experiments.run_report.tables import Cell, OpRow, table
from megatrain.experiments.run_report.why import reasons, rivals
from megatrain.simulator.base.files import read_json, read_text
from megatrain.simulator.base.units import format_bytes, format_count, format_seconds
from megatrain.simulator.compare.error_table import format_times, signed_percent, two_decimals
from megatrain.simulator.memory.account import CLASSES, PLACES, WORKSPACE, class_of
from megatrain.simulator.model.metrics import tflops_6n, tokens_per_second
from megatrain.simulator.planner.search import plan_account
from megatrain.simulator.policies import names
from megatrain.simulator.schedule import Buffer

_MACHINE = {
    "device": "device",
    "device_bytes": "device memory",
    "processor": "processor",
    "cores": "cores",
    "host_bytes": "host memory",
    "system": "system",
    "python": "Python",
    "torch": "PyTorch",
    "transformers": "transformers",
    "cuda": "CUDA",
}

_IN_WORDS = ("placement", "chunk_bytes", "weights_ahead", "rebuild_outputs", "exchange_bytes")
"""Knobs that are left out of the plan's table, or have a row with another name."""


def title(run: ComparedRun) -> str:
    """Returns the page's title."""
    return f"{run.plan.model.name}, policy {run.plan.policy}, on {_device(run)}"


def _device(run: ComparedRun) -> str:
    """Returns the name of the device. If there are several, their number comes first, and the
    number of hosts last.
    """
    plan, device = run.plan, run.record.device
    several = f"{plan.gpus} x {device}" if plan.gpus > 1 else device
    return f"{several}, {plan.hosts} hosts" if plan.hosts > 1 else several


def heading(run: ComparedRun) -> str:
    """Returns the page's heading and the main facts of the run."""
    work = run.plan.workload
    micro = f"{work.accumulation} &times; " if work.accumulation > 1 else ""
    facts = [
        f"{format_count(run.plan.model.parameters).replace(' ', '&nbsp;')} parameters",
        f"{micro}{work.batch} &times; {work.sequence:,} tokens per step",
        f"{work.precision}{', compiled' if work.compiled else ''}",
        f"optimizer {escape(work.optimizer)}",
        f"state format {work.state}",
        *(["gradients in 8 bits"] if work.gradients != "exact" else []),
        f"clipping {work.clipping}",
        f"policy {escape(run.plan.policy)}",
        f"{len(run.record.steps):,} steps",
    ]
    return (
        f"<h1>{escape(run.plan.model.name)} <span>on {escape(_device(run))}</span></h1><p"
        f" class=facts>{' &middot; '.join(facts)}</p>"
    )


def figures(run: ComparedRun) -> str:
    """Returns the main numbers, with the measured value large and the predicted one below it."""
    errors, work = run.errors, run.plan.workload
    seconds, predicted, difference = _whole_step(run)
    account = plan_account(run.plan, run.schedule, run.costs)
    tflops = f"{tflops_6n(run.plan.model, work, seconds):,.4g} TFLOPS (6N)"
    parts = [
        *_loss(run),
        (
            "step",
            format_seconds(seconds),
            f"predicted {format_seconds(predicted)}, {signed_percent(difference)}",
            _steady(run),
        ),
        (
            "tokens/s",
            f"{tokens_per_second(work, seconds):,.0f}",
            f"predicted {tokens_per_second(work, predicted):,.0f}",
            tflops,
        ),
    ]
    limits = {"device": run.plan.device_limit_bytes, "host": run.plan.host_limit_bytes}
    measured = {row.what: row for row in errors.memory}
    for place in PLACES:
        peak = measured.get(f"whole {place} peak") or measured[f"{place} pools"]
        error = (
            "as predicted"
            if peak.error == 0
            else f"predicted {format_bytes(peak.predicted_bytes)}, {signed_percent(peak.error)}"
        )
        if place == "device" and peak.what == "device pools":
            whole = format_bytes(account.device_peak_bytes)
            error = f"predicted with activations {whole}, which only a GPU measures"
        parts.append(
            (
                peak.what.removeprefix("whole "),
                format_bytes(peak.measured_bytes),
                error,
                f"limit {format_bytes(limits[place])}",
            )
        )
    return "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}"
        f"<small>{escape(first)}</small><small>{escape(second)}</small></dd></div>"
        for name, value, first, second in parts
    )


def _loss(run: ComparedRun) -> list[tuple[str, str, str, str]]:
    """Returns the loss as an entry of `figures`, or nothing if no step was completed."""
    record = run.record
    if not record.losses:
        return []
    evaluated = ""
    if record.evaluations:
        last = record.evaluations[-1]
        evaluated = f"evaluation {last.loss:.4f} after step {last.step:,}"
    over = f"loss, last {record.smoothing} steps" if record.smoothing else "loss, last step"
    return [(over, f"{record.final_loss:.4f}", f"first {record.losses[0]:.4f}", evaluated)]


def lead(run: ComparedRun) -> str:
    """Returns sentences that say what measured, predicted and limit mean."""
    plan, (*_, difference) = run.plan, _whole_step(run)
    slower = "slower" if difference > 0 else "faster"
    how = f"{100 * abs(difference):.1f} % {slower} than"
    how = how if abs(difference) >= 0.0005 else "the same as"
    return (
        "Large numbers are <em>measured</em> in this run. <em>Predicted</em> is what the simulator"
        f" computes from the plan without running it: a step {how} the measured one. The"
        " <em>limits</em> are the memory that the plan may use:"
        f" {format_bytes(plan.device_limit_bytes)} of the device, and"
        f" {format_bytes(plan.host_limit_bytes)} of host memory, which holds the weights, gradients"
        " and optimizer state that the device does not."
    )


def _whole_step(run: ComparedRun) -> tuple[float, float, float]:
    """Returns the measured and the predicted seconds of a step, and the error of the prediction.

    The measured time is the median of the run's steady steps, as in `train` and in the comparison
    of several runs. If these are not known, it is the time of the one step whose ops are recorded.
    """
    errors = run.errors
    if steps := errors.steps:
        return steps.median_seconds, steps.predicted_seconds, steps.median_error
    return errors.measured_seconds, errors.predicted_seconds, errors.error


def _steady(run: ComparedRun) -> str:
    times = run.record.steady_seconds.values()
    return (
        f"wall time {format_seconds(min(times))} to {format_seconds(max(times))}" if times else ""
    )


def plan(run: ComparedRun) -> str:
    """Returns the chosen plan, the reasons for it, and the best plans of other policies."""
    knobs = run.plan.knobs
    placed = [
        (field, getattr(knobs.placement, field)) for field in knobs.placement.__struct_fields__
    ]
    rows: list[Sequence[Cell]] = [
        ["policy", run.plan.policy],
        ["copies", format_bytes(knobs.chunk_bytes)],
        *(
            [field.replace("_", " "), str(getattr(knobs, field))]
            for field in knobs.__struct_fields__
            if field not in _IN_WORDS and (field, getattr(knobs, field)) != ("micro_batch_group", 1)
        ),
        *(
            [["exchange of gradients", format_bytes(knobs.exchange_bytes)]]
            if knobs.exchange_bytes
            else []
        ),
        *([["outputs of norms and gates", "rebuilt"]] if knobs.rebuild_outputs else []),
        *(
            [
                verdict_reasons.PLACEMENT_LABELS[field]
                .format("")
                .replace("  ", " ")
                .replace(" of ", " ")
                .strip(),
                layers,
            ]
            for field, layers in placed
            if layers
        ),
    ]
    others = rivals(run)
    named = (
        "<p class=note>Layers: <em>e</em> is the embedding, <em>h</em> is the head if it has its"
        " own weights, and numbers are decoder layers.</p>"
    )
    left_out = [name for name in names() if others and name not in [cells[0] for cells in others]]
    slower = (
        "<p class=note>Not searched, because none of their plans can be faster than the first:"
        f" {', '.join(left_out)}.</p>"
        if left_out
        else ""
    )
    letters = named if any(layers for _, layers in placed) else ""
    head = ["policy", "step", "against this plan", "device", "host"]
    return (
        f"<ul class=why>{''.join(f'<li>{escape(reason)}</li>' for reason in reasons(run))}</ul>"
        "<div class=pair>"
        f"<div><h3>The plan</h3>{table(['knob', 'value'], rows, left=(0, 1))}{letters}</div>"
        "<div><h3>Best plan of each policy by today's planner</h3>"
        f"{table(head, others)}{slower}</div></div>"
    )


def errors(run: ComparedRun) -> str:
    """Returns the tables of `megatrain compare`, with ops that can be clicked."""
    found = run.errors
    rows: list[Sequence[Cell]] = [
        [
            "end to end",
            format_seconds(found.predicted_seconds),
            format_seconds(found.measured_seconds),
            two_decimals(found.error),
        ]
    ]
    if found.replayed_seconds is not None:
        replayed = format_seconds(found.replayed_seconds)
        rows += [
            [
                "engine: measured durations, replayed",
                replayed,
                format_seconds(found.measured_seconds),
                two_decimals(found.engine_error),
            ],
            [
                "cost model: errors of all durations",
                format_seconds(found.predicted_seconds),
                replayed,
                two_decimals(found.cost_model_error),
            ],
        ]
    if found.steps:
        name = f"median wall time of {found.steps.count:,} steady steps"
        rows.append(
            [
                name,
                format_seconds(found.steps.predicted_seconds),
                format_seconds(found.steps.median_seconds),
                two_decimals(found.steps.median_error),
            ]
        )
    called = {"compute": "compute busy", "waiting": "no lane busy"}
    parts = [
        [
            called.get(part.name, f"{part.name}, exposed"),
            *format_times(part.predicted_seconds, part.measured_seconds),
            signed_percent(part.of_step),
        ]
        for part in found.parts
    ]
    spread = ["median", "P95 |error|", "worst", "op"]
    kinds = [
        [
            kind.kind,
            f"{kind.count:,}",
            *format_times(kind.predicted_seconds, kind.measured_seconds),
            signed_percent(kind.error),
            signed_percent(kind.of_step),
            *_spread(kind.median_error, kind.p95_abs_error, kind.worst_error, kind.worst_op),
        ]
        for kind in found.kinds
    ]
    lanes = [
        [
            lane.lane,
            f"{lane.count:,}",
            *format_times(lane.predicted_busy_seconds, lane.measured_busy_seconds),
            signed_percent(lane.busy_error),
            format_seconds(lane.measured_stalled_seconds),
            *_spread(lane.median_error, lane.p95_abs_error, lane.worst_error, lane.worst_op),
        ]
        for lane in found.lanes
    ]
    compared, differences = (
        ["predicted", "measured", "error"],
        ["predicted", "measured", "difference"],
    )
    by_kind = ["ops", *compared, "of the step", *spread]
    by_lane = ["ops", *compared, "stalled", *spread]
    weight = (
        "<em>Of the step</em>: how much smaller the step's error would be if these ops alone were"
        " predicted exactly."
    )
    stalled = "<em>Stalled</em>: time in which the lane was idle although its next op was ready."
    add = (
        "The times add up to the step, and the differences to its error. <em>Exposed</em>: that"
        " lane ran while compute did not."
    )
    return (
        "<div class=pair>"
        f"<div><h3>The step</h3>{table(['', *compared], rows)}{_order(run)}</div>"
        f"<div><h3>Parts of the step</h3>{table(['', *differences], parts)}"
        f"<p class=note>{add}</p></div></div>"
        f"<h3>Kinds of op</h3>{table(['kind', *by_kind], kinds, left=(0, 9))}"
        f"<p class=note>{weight}</p>"
        f"<h3>Lanes</h3>{table(['lane', *by_lane], lanes, left=(0, 9))}"
        f"<p class=note>{stalled}</p>"
    )


def _order(run: ComparedRun) -> str:
    found = run.errors
    order = "Every op started after the ops that it waits for had ended."
    if found.violations:
        bad = found.violations[0]
        order = (
            f"{len(found.violations):,} ops started too early. The first is"
            f" {OpRow(bad.op).html()}, which started before {OpRow(bad.waits_for).html()} ended."
        )
    late = found.first_divergence or found.latest
    if late is None:
        return f"<p class=note>{order}</p>"
    by, limit = format_seconds(late.late_ns / 1e9), format_seconds(found.divergence_ns / 1e9)
    if found.first_divergence:
        first = (
            f"First divergence: {OpRow(late.op).html()} started {by} later than the measured"
            " durations explain."
        )
    else:
        first = (
            f"No divergence: {OpRow(late.op).html()} started {by} later than the measured durations"
            f" explain, more than any other op. A divergence is {limit} or more."
        )
    return f"<p class=note>{order} {first}</p>"


def memory(run: ComparedRun) -> str:
    """Returns the table of memory by class, with planned and allocated bytes. PyTorch's own
    allocations are known only as one number.
    """
    measured = read_json(run.folder / "memory.json")
    account = plan_account(run.plan, run.schedule, run.costs)
    dynamic = {buffer.pool for buffer in run.schedule.buffers if buffer.dynamic} | {WORKSPACE}
    pools = {pool: int(size) for pool, size in dict(measured.get("pools", {})).items()}
    blocks = []
    for place in PLACES:
        fixed = {
            pool: size
            for pool, size in _pool_bytes(run.schedule.buffers).items()
            if pool.startswith(f"{place}.")
        }
        rows: list[Sequence[Cell]] = [
            _bytes_row(
                name,
                sum(fixed[pool] for pool in members),
                sum(pools.get(pool, 0) for pool in members),
            )
            for name in CLASSES
            if (members := [pool for pool in fixed if class_of(account.kinds[pool]) == name])
        ]
        if place == "device":
            grown = sum(size for pool, size in account.pools.items() if pool in dynamic)
            peak = measured.get("device_peak_bytes")
            rows += [
                _bytes_row(
                    "activations and workspace of running ops",
                    grown,
                    None if peak is None else peak - measured["device_pool_bytes"],
                ),
                _bytes_row("whole device", account.device_peak_bytes, peak),
            ]
        elif rows:
            rows.append(_bytes_row("all pools", sum(fixed.values()), measured["host_pool_bytes"]))
        if rows:
            blocks.append(
                f"<div><h3>{place.capitalize()}</h3>"
                f"{table(['class', 'predicted', 'measured', 'error'], rows, total=True)}</div>"
            )
    return f"<div class=pair>{''.join(blocks)}</div>"


def _pool_bytes(buffers: Iterable[Buffer]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for buffer in buffers:
        if not buffer.dynamic:
            sizes[buffer.pool] = sizes.get(buffer.pool, 0) + buffer.allocated
    return sizes


def _bytes_row(name: str, predicted: int, measured: int | None) -> list[Cell]:
    if measured is None:
        return [name, format_bytes(predicted), "not measured", ""]
    error = (
        "equal"
        if predicted == measured
        else ""
        if not measured
        else f"{100 * (predicted / measured - 1):+.2f} %"
    )
    return [name, format_bytes(predicted), format_bytes(measured), error]


def machine(run: ComparedRun) -> str:
    """Returns the machine of the run, the source of its costs, and the commands to repeat it."""
    found = read_json(run.folder / "environment.json")
    rows: list[Sequence[Cell]] = [
        *(
            [name, format_bytes(int(found[key])) if key.endswith("_bytes") else str(found[key])]
            for key, name in _MACHINE.items()
            if found.get(key) is not None
        ),
        ["costs", run.hardware.source or run.hardware.name],
    ]
    config = run.folder / "config.toml"
    train = (
        "megatrain train plan.toml --config config.toml --out RUN"
        if config.is_file()
        else "megatrain train plan.toml --data DATA --steps N --out RUN"
    )
    if run.plan.gpus > 1:
        from megatrain.runtime.ranks import launcher  # slow

        train = f"{launcher(run.plan)} -m {train}"
    commands = "\n".join([f"{train}", "megatrain compare RUN", "megatrain report RUN"])
    files = "".join(
        f"<details><summary>{name}</summary>"
        f"<pre>{escape(read_text(run.folder / name))}</pre></details>"
        for name in ("plan.toml", "config.toml")
        if (run.folder / name).is_file()
    )
    return (
        "<div class=pair>"
        f"<div><h3>Machine</h3>{table(['', ''], rows, left=(0, 1))}</div>"
        "<div><h3>Commands to repeat the run from this folder's files</h3>"
        f"<pre class=commands>{escape(commands)}</pre>{files}</div></div>"
    )


def _spread(median: float | None, p95: float | None, worst: float | None, op: str) -> list[Cell]:
    return [
        signed_percent(median),
        signed_percent(p95).removeprefix("+"),
        signed_percent(worst),
        OpRow(op) if op else "",
    ]
