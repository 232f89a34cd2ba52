"""Formats the reasons for a verdict, which `check --why` prints below it.

The reasons are the plan's knobs and placement, the lanes, the bounds, the runner-up, the gain from
one more GiB, and the source of the durations. Every number is a field of the verdict.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from megatrain.experiments.cli.verdict import layout
from megatrain.simulator.base.units import format_bytes, format_seconds
from megatrain.simulator.schedule.plan import Placement

if TYPE_CHECKING:
    from megatrain.simulator.schedule.plan import Knobs
    from megatrain.simulator.verdict.verdict import Verdict

PLACEMENT_LABELS = {
    "weights": "weights of {} on the device",
    "master_low": "low halves of {} on the device",
    "moments": "moments of {} on the device",
    "gradients": "gradients of {} on the device",
    "saved_activations": "activations of {} saved",
    "offloaded_inputs": "inputs of {} offloaded",
    "saved_attention": "attention of {} saved",
    "offloaded_attention": "attention of {} offloaded",
    "host_updated": "updates of {} on the host",
}
"""Field of a placement -> text that describes it, with `{}` for the layers."""

_REBUILDING = ("outputs of norms and gates saved", "outputs of norms and gates rebuilt")
"""Texts for the values 0 and 1 of `rebuild_outputs`."""


def without_cuda(verdict: Verdict) -> str:
    """Returns the note on a machine that the runtime cannot train on."""
    return f"this is a prediction only: `megatrain train` cannot use the GPU of {verdict.machine}"


def reasons(verdict: Verdict, width: int) -> list[str]:
    """Returns the lines of `check --why`, wrapped at `width` columns."""
    logits = f"logits of {verdict.workload.loss_chunk:,} tokens at a time"
    plan = (
        "another system, prediction only"
        if verdict.prediction_only
        else f"{_knobs(verdict)}, {logits}"
    )
    lines = layout.labelled("Plan", f"policy {verdict.policy}: {plan}", width)
    if verdict.feasible:
        lines += layout.labelled("Lanes", _lanes(verdict), width)
        lines += layout.labelled("Bound", _bound(verdict), width)
    else:
        lines += layout.labelled("Limit", f"{verdict.binding}: {verdict.reason}", width)
    lines += layout.labelled("Rates", _rates(verdict), width)
    if second := _runner_up(verdict):
        lines += layout.labelled("Second", second, width)
    for label, line in zip(("1 GiB", ""), marginal_gains(verdict), strict=False):
        lines += layout.labelled(label, line, width)
    for entry in verdict.advice:
        if entry.compressed and entry.gain is not None:
            what = f"{entry.change} at least {entry.gain:+.0%}: {entry.note}"
            lines += layout.labelled("State", what, width)
    return lines + layout.labelled("Costs", _costs(verdict), width)


def _lanes(verdict: Verdict) -> str:
    """Returns the seconds of work on each lane, and how long compute is idle while it runs."""
    work = ", ".join(
        f"{lane} {format_seconds(seconds)}"
        for lane, seconds in sorted(verdict.lane_seconds.items(), key=lambda item: -item[1])
    )
    waits = ", ".join(
        f"{lane} {format_seconds(seconds)}"
        for lane, seconds in sorted(verdict.exposed_seconds.items(), key=lambda item: -item[1])
        if seconds >= verdict.step_seconds / 1000
    )
    slowed = (
        f"; other lanes slow compute by {format_seconds(verdict.slowed_seconds)}"
        if verdict.slowed_seconds >= verdict.step_seconds / 1000
        else ""
    )
    idle = f"compute is idle while these run: {waits}" if waits else "compute is never idle"
    return f"work of a step: {work}; {idle}{slowed}"


def _bound(verdict: Verdict) -> str:
    """Returns the lane with the most work, and the lower bound of the step time."""
    return (
        f"{verdict.binding} has the most work of all lanes; no order of these operations takes less"
        f" than {format_seconds(verdict.lower_bound_seconds)}"
        f" ({verdict.lower_bound_lane})"
    )


def _rates(verdict: Verdict) -> str:
    """Returns the TFLOPS, and their shares of the GPU's peak and of the measured rate."""
    active = (
        f" of all parameters, {verdict.tflops_6n_active:.4g} of the active ones"
        if verdict.active_parameters != verdict.parameters
        else ""
    )
    shares = [
        f"{share:.1%} of {whole}"
        for share, whole in (
            (verdict.mfu, "the datasheet's peak (MFU)"),
            (verdict.matmul_rate_share, "the measured matrix-product rate"),
        )
        if share is not None
    ]
    return ", ".join([f"{verdict.tflops_6n:.4g} TFLOPS (6N){active}", *shares])


def _runner_up(verdict: Verdict) -> str:
    """Returns the second-best plan, or an empty string if there is none."""
    second = verdict.runner_up
    if second is None or not verdict.feasible:
        return ""
    slower = second.step_seconds / verdict.step_seconds - 1
    least, other = (
        ("at least ", "") if second.at_least else ("", f": {_changes(second.knobs, verdict)}")
    )
    return (
        f"policy {second.policy}, {least}{format_seconds(second.step_seconds)},"
        f" {slower:.1%} slower{other}"
    )


def _knobs(verdict: Verdict) -> str:
    """Returns the knobs and the placement of the plan as one phrase."""
    knobs = verdict.knobs
    if not verdict.streams:
        placement = knobs.get("placement")
        kept = (
            _placed(placement, ("saved_activations", "saved_attention"))
            if isinstance(placement, Placement)
            else []
        )
        advised = (
            []
            if verdict.unified or not verdict.feasible
            else ["do not stream, everything stays on the device"]
        )
        return ", ".join(
            [
                *advised,
                *kept,
                *([_REBUILDING[1]] if knobs.get("rebuild_outputs") else []),
                f"checkpoint_interval {knobs['checkpoint_interval']}",
                "nothing is copied",
            ]
        )
    parts = [
        f"{name} {value}"
        for name, value in knobs.items()
        if name not in ("chunk_bytes", "rebuild_outputs", "exchange_bytes", "placement")
        and (name, value) not in (("weights_ahead", 0), ("micro_batch_group", 1))
    ]
    parts += [_REBUILDING[1]] if knobs.get("rebuild_outputs") else []
    placement = knobs.get("placement", Placement())
    if isinstance(placement, Placement):
        parts += _placed(placement, PLACEMENT_LABELS)
    if "chunk_bytes" in knobs:
        parts.append(f"copies of {format_bytes(int(str(knobs['chunk_bytes'])))}")
    if room := knobs.get("exchange_bytes"):
        parts.append(f"{format_bytes(int(str(room)))} for the exchange of gradients")
    return ", ".join(parts)


def _placed(placement: Placement, fields: Iterable[str]) -> list[str]:
    """Returns the labels of the `fields` of `placement` that contain layers."""
    return [
        PLACEMENT_LABELS[field].format(layers)
        for field in fields
        if (layers := getattr(placement, field))
    ]


def marginal_gains(verdict: Verdict) -> list[str]:
    """Returns one line each for the gain from one more GiB of device memory and of host memory."""
    lines = []
    for margin in verdict.one_more_gib:
        gain = (
            f"{margin.gain:+.1%}, {margin.tokens_per_second:,.0f} tokens/s:"
            f" {_changes(margin.knobs, verdict)}, with the same policy"
            if margin.knobs
            else "no gain"
        )
        lines.append(f"one more GiB of {margin.place} memory: {gain}")
    return lines


def _changes(knobs: Knobs | None, verdict: Verdict) -> str:
    """Returns the values of `knobs` that differ from the knobs of the verdict."""
    if knobs is None:
        return ""
    own: Placement = verdict.knobs.get("placement", Placement())  # type: ignore[assignment]
    changed = {
        name: value
        for name in knobs.__struct_fields__
        if name in verdict.knobs
        and name != "placement"
        and (value := getattr(knobs, name)) != verdict.knobs[name]
    }
    parts = [
        f"{name} {format_bytes(value) if name.endswith('_bytes') else value}"
        for name, value in changed.items()
        if name != "rebuild_outputs"
    ]
    parts += [_REBUILDING[knobs.rebuild_outputs]] if "rebuild_outputs" in changed else []
    placed = [
        name
        for name in own.__struct_fields__
        if getattr(knobs.placement, name) != getattr(own, name)
    ]
    parts += [
        PLACEMENT_LABELS[name].format(layers)
        if (layers := getattr(knobs.placement, name))
        else f"no {PLACEMENT_LABELS[name].replace(' of {}', '')}"
        for name in placed
    ]
    return ", ".join(parts) or "the same knobs"


def rates_source(verdict: Verdict) -> str:
    """Returns the source of the machine's rates: of one GPU and, for a plan for several GPUs, of
    several. For a calibrated machine, it also says if there is no range because this number of GPUs
    was not measured together, or because several hosts were not measured.
    """
    if verdict.cost_model:
        return f"by the cost model {verdict.cost_model}"
    known = verdict.gpus_measured
    several = f"{known} GPUs together {verdict.gpus_measured_date}" if known else ""
    if verdict.calibrated:
        source = f"measured {verdict.calibrated}"
        if verdict.hosts == 1 and verdict.gpus in (1, known):
            return f"{source}, and {several}" if several else source
        measured = f", and {several}" if several else " on one GPU"
        where = f" on {verdict.hosts} hosts" if verdict.hosts > 1 else ""
        return f"{source}{measured}, so the range for {verdict.gpus}{where} is not known"
    several = f"; {several.replace('together', 'measured together')}" if several else ""
    if verdict.measured_by_others:
        return f"measured {verdict.measured_by_others}, by a file of others{several}"
    return f"from datasheets{several}" if several else "from datasheets, not measured"


def _costs(verdict: Verdict) -> str:
    """Returns the source of the durations, and the kinds of operations that were extrapolated."""
    source = rates_source(verdict)
    if verdict.step_seconds_low is not None and verdict.step_seconds_high is not None:
        source += (
            f"; a step may take {format_seconds(verdict.step_seconds_low)} to"
            f" {format_seconds(verdict.step_seconds_high)}"
        )
    flagged = ", ".join(
        f"{kind} ({count:,} ops)" if count else kind for kind, count in verdict.extrapolated.items()
    )
    where = "" if verdict.calibrated else " of copies"
    return source + (f"; outside the measured range{where}: {flagged}" if flagged else "")
