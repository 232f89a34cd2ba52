"""Formats a verdict as text, with one fact per line.

Nothing is computed here: every number is a field of the verdict.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from megatrain.simulator.base.units import format_bytes, format_count, format_seconds
from megatrain.simulator.model.optimizer import ADAMW
from megatrain.simulator.schedule.plan import Placement

if TYPE_CHECKING:
    from megatrain.simulator.schedule.plan import Knobs
    from megatrain.simulator.verdict.advice import Suggestion
    from megatrain.simulator.verdict.verdict import Verdict

_LETTERS = {
    "weights": "w",
    "gradients": "g",
    "moments": "m",
    "activations": "a",
    "workspace": "x",
    "staging": "s",
}
_WIDTH = 40
PLACEMENT_LABELS = {
    "weights": "weights of {} on the device",
    "master_low": "low halves of {} on the device",
    "moments": "moments of {} on the device",
    "gradients": "gradients of {} on the device",
    "saved_activations": "activations of {} saved",
    "offloaded_inputs": "inputs of {} offloaded",
    "saved_attention": "attention of {} saved",
    "host_updated": "updates of {} on the host",
}
"""Field of a placement -> text that describes it, with `{}` for the layers."""


def text(verdict: Verdict) -> str:
    """Returns the whole report of one plan.

    Its parts are whether the plan fits, its speed, the use of memory, and changes that would help.
    """
    lines = [_heading(verdict), _decision(verdict)]
    lines += _speed(verdict) if verdict.feasible else [_shortage(verdict)]
    lines += [f"documents: {verdict.documents}"] if verdict.documents else []
    lines += memory(verdict)
    if verdict.longest_context is not None:
        batch = (
            f"a micro-batch of {verdict.largest_batch:,} x {verdict.workload.sequence}"
            if verdict.largest_batch
            else f"no micro-batch of {verdict.workload.sequence}"
        )
        context = f"a context of {verdict.longest_context:,} tokens (batch 1)"
        lines.append(
            f"largest that fits: {context}, {batch}"
            if verdict.longest_context
            else "no micro-batch fits, not even the smallest"
        )
    lines += _rivals(verdict)
    if verdict.advice:
        lines.append("would make it faster, about:" if verdict.feasible else "would help:")
        lines += [f"    {_suggestion(entry)}" for entry in verdict.advice]
    if verdict.feasible:
        lines += _several(verdict) + _training(verdict)
    return "\n".join([*lines, _costs(verdict)])


def _heading(verdict: Verdict) -> str:
    """Returns the line on model, machine and workload."""
    work = verdict.workload
    active = (
        f", {format_count(verdict.active_parameters)} active"
        if verdict.active_parameters != verdict.parameters
        else ""
    )
    count = format_count(verdict.parameters)
    size = f"{count}{'' if ' ' in count else ' '} parameters{active}".replace("  ", " ")
    return (
        f"{verdict.model} ({size}) on {verdict.hardware}, {work.accumulation} x {work.batch} x"
        f" {work.sequence} tokens, {work.dtype}"
        + ("" if work.optimizer == ADAMW else f", optimizer {work.optimizer}")
    )


def _shortage(verdict: Verdict) -> str:
    """Returns which pool of memory is too small, and by how much."""
    return f"limited by {verdict.binding}: {verdict.reason}"


def _decision(verdict: Verdict) -> str:
    knobs = "another system, prediction only" if verdict.prediction_only else _knobs(verdict)
    return f"{'fits' if verdict.feasible else 'DOES NOT FIT'} with policy {verdict.policy}: {knobs}"


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
                f"checkpoint_interval {knobs['checkpoint_interval']}",
                "nothing is copied",
            ]
        )
    parts = [
        f"{name} {value}"
        for name, value in knobs.items()
        if name not in ("chunk_bytes", "placement") and (value or name != "weights_ahead")
    ]
    placement = knobs.get("placement", Placement())
    if isinstance(placement, Placement):
        parts += _placed(placement, PLACEMENT_LABELS)
    if "chunk_bytes" in knobs:
        parts.append(f"copies of {format_bytes(int(str(knobs['chunk_bytes'])))}")
    return ", ".join(parts)


def _placed(placement: Placement, fields: Iterable[str]) -> list[str]:
    """Returns the labels of those `fields` that contain layers."""
    return [
        PLACEMENT_LABELS[field].format(layers)
        for field in fields
        if (layers := getattr(placement, field))
    ]


def _speed(verdict: Verdict) -> list[str]:
    """Returns the lines on step time, bottleneck and idle time of compute."""
    active = (
        f" of all, {verdict.tflops_6n_active:.4g} of active parameters"
        if verdict.active_parameters != verdict.parameters
        else ""
    )
    utilisation = "" if verdict.mfu is None else f", MFU {verdict.mfu:.1%}"
    exposed = {
        lane: seconds
        for lane, seconds in verdict.exposed_seconds.items()
        if seconds >= verdict.step_seconds / 1000
    }
    waits = ", ".join(
        f"{lane} {format_seconds(seconds)}"
        for lane, seconds in sorted(exposed.items(), key=lambda item: -item[1])
    )
    return [
        (
            f"step {format_seconds(verdict.step_seconds)}, {verdict.tokens_per_second:,.0f}"
            f" tokens/s, {verdict.tflops_6n:.4g} TFLOPS (6N){active}{utilisation}"
        ),
        (
            f"limited by {verdict.binding}: this lane has the most work,"
            f" {format_seconds(verdict.lane_seconds[verdict.binding])}; lower bound for any order"
            f" of these operations: {format_seconds(verdict.lower_bound_seconds)}"
            f" ({verdict.lower_bound_lane})"
        ),
        *(
            [f"compute is idle while these run: {waits}"]
            if waits
            else ["nothing is exposed: compute is never idle"]
            if verdict.exposed_seconds
            else []
        ),
        *(
            [f"other lanes slow compute by {format_seconds(verdict.slowed_seconds)}"]
            if verdict.slowed_seconds >= verdict.step_seconds / 1000
            else []
        ),
    ]


def _rivals(verdict: Verdict) -> list[str]:
    """Returns lines on the second-best plan and on the gain from more memory."""
    lines, second = [], verdict.runner_up
    if second is not None and verdict.feasible:
        slower = second.step_seconds / verdict.step_seconds - 1
        least, other = (
            ("at least ", "") if second.at_least else ("", f": {_changes(second.knobs, verdict)}")
        )
        lines.append(
            f"runner-up: policy {second.policy}, {least}{format_seconds(second.step_seconds)},"
            f" {slower:.1%} slower{other}"
        )
    return lines + margins(verdict)


def margins(verdict: Verdict) -> list[str]:
    """Returns one line each for the gain from one more GiB of device memory and of host memory."""
    lines = []
    for margin in verdict.one_more_gib:
        bought = (
            f"{margin.gain:+.1%}, {margin.tokens_per_second:,.0f} tokens/s:"
            f" {_changes(margin.knobs, verdict)}"
            if margin.knobs
            else "no gain"
        )
        lines.append(f"one more GiB of {margin.place} memory: {bought}")
    return lines


def _changes(knobs: Knobs | None, verdict: Verdict) -> str:
    """Returns the differences between `knobs` and those of the verdict."""
    if knobs is None:
        return ""
    here: Placement = verdict.knobs.get("placement", Placement())  # type: ignore[assignment]
    changed = [
        name
        for name in knobs.__struct_fields__
        if name in verdict.knobs
        and name != "placement"
        and getattr(knobs, name) != verdict.knobs[name]
    ]
    parts = [
        f"{name}"
        f" {format_bytes(knobs.chunk_bytes) if name == 'chunk_bytes' else getattr(knobs, name)}"
        for name in changed
    ]
    placed = [
        name
        for name in here.__struct_fields__
        if getattr(knobs.placement, name) != getattr(here, name)
    ]
    parts += [
        PLACEMENT_LABELS[name].format(getattr(knobs.placement, name) or "none") for name in placed
    ]
    return ", ".join(parts) or "the same knobs"


def memory(verdict: Verdict) -> list[str]:
    """Returns lines on the memory of device and host: bytes by class of data, and the limit."""
    lines = []
    for place, peak, limit in (
        ("device", verdict.device_peak_bytes, verdict.device_limit_bytes),
        ("host", verdict.host_peak_bytes, verdict.host_limit_bytes),
    ):
        if verdict.unified and place == "host" and not peak:
            continue
        sizes = verdict.classes[place]
        note = ": one memory for CPU and GPU, nothing is copied" if verdict.unified else ""
        lines.append(
            f"{'memory' if verdict.unified else place:<7}[{_bar(sizes, max(peak, limit))}]"
            f" {format_bytes(peak)} of {format_bytes(limit)}{note}"
        )
        lines += [
            f"    {_LETTERS[name]} {name:<14}{format_bytes(size):>12}"
            for name, size in sizes.items()
            if size >= peak / 1000
        ]
    return lines


def _bar(sizes: dict[str, int], whole: int) -> str:
    """Returns a bar of 40 characters, with one letter per 40th of `whole` that a class takes.

    >>> _bar({"weights": 25, "moments": 50}, 100)
    'wwwwwwwwwwmmmmmmmmmmmmmmmmmmmm..........'
    """
    bar, total = "", 0
    for name, size in sizes.items():
        total += size
        bar += _LETTERS[name] * (min(round(_WIDTH * total / whole), _WIDTH) - len(bar))
    return bar + "." * (_WIDTH - len(bar))


def _suggestion(entry: Suggestion) -> str:
    """Returns a line on one change and its gain or the memory that it saves."""
    name = f"{entry.change} (not in the runtime yet)" if entry.unsupported else entry.change
    if entry.gain is not None and entry.tokens_per_second is not None:
        return f"{name}: {entry.gain:+.0%}, {entry.tokens_per_second:,.0f} tokens/s"
    saved = f"saves {format_bytes(entry.bytes_saved)}" if entry.bytes_saved > 0 else ""
    state = "fits" if entry.fits else f"still lacks {format_bytes(entry.bytes_missing)}"
    return f"{name}: {', '.join(filter(None, (saved, state)))}"


def _several(verdict: Verdict) -> list[str]:
    """Returns the lines on several GPUs, if the verdict has them."""
    several = verdict.multi_gpu
    if several is None:
        return []
    fits = (
        ""
        if several.feasible
        else f", DOES NOT FIT: {format_bytes(several.host_peak_bytes)} of host memory"
    )
    return [
        (
            f"{several.gpus} GPUs: {several.tokens_per_second:,.0f} tokens/s, {several.speedup:.1f}"
            f" times one GPU, step {format_seconds(several.step_seconds)}, links at"
            f" {several.gb_per_s:.1f} GB/s each, {several.gb_per_s_both:.1f} in both directions at"
            f" once{fits}"
        ),
        f"    {several.note}",
    ]


def _training(verdict: Verdict) -> list[str]:
    """Returns the line on days and energy of training, if the verdict has them."""
    training = verdict.training
    if training is None:
        return []
    energy = (
        "power not stated"
        if training.energy_kwh is None
        else (
            f"{training.energy_kwh:,.1f} kWh at {training.watts:.0f}"
            f" W{' per GPU' if verdict.multi_gpu else ''}"
        )
    )
    return [
        f"{format_count(training.tokens)} tokens: {training.days:,.2f} days, {energy}".replace(
            " G tokens", " B tokens"
        )
    ]


def _costs(verdict: Verdict) -> str:
    """Returns the line on the source of the durations and their uncertainty."""
    source = (
        f"measured {verdict.calibrated}"
        if verdict.calibrated
        else "from datasheet rates, not measured"
    )
    if (
        verdict.feasible
        and verdict.step_seconds_low is not None
        and verdict.step_seconds_high is not None
    ):
        source += (
            f", so a step may take {format_seconds(verdict.step_seconds_low)} to"
            f" {format_seconds(verdict.step_seconds_high)}"
        )
    outside = (
        "outside the measured range"
        if verdict.calibrated
        else "outside the measured range of copies"
    )
    flagged = ", ".join(
        f"{kind} ({count:,} ops)" if count else kind for kind, count in verdict.extrapolated.items()
    )
    return f"costs: {source}" + (f"; {outside}: {flagged}" if flagged else "")


def table(found: list[Verdict]) -> str:
    """Returns a table with one line per policy.

    Other systems are marked as prediction only. A plan that does not fit is marked OOM (out of
    memory), with the memory that it lacks.
    """
    days = any(verdict.training for verdict in found)
    lines = [
        (
            f"{'policy':<15} {'step':>11} {'tokens/s':>10}{'days':>10}"
            if days
            else f"{'policy':<15} {'step':>11} {'tokens/s':>10}"
        )
    ]
    lines[0] += f" {'device':>11} {'host':>11}  limited by"
    for verdict in found:
        note = " (another system, prediction only)" if verdict.prediction_only else ""
        memory = (
            f"{format_bytes(verdict.device_peak_bytes):>11}"
            f" {format_bytes(verdict.host_peak_bytes):>11}"
        )
        speed = (
            f"{format_seconds(verdict.step_seconds):>11} {verdict.tokens_per_second:>10,.0f}"
            if verdict.feasible
            else f"{'OOM':>22}"
        )
        if verdict.training:
            speed += f"{verdict.training.days:>10,.2f}" if verdict.feasible else " " * 10
        lines.append(
            f"{verdict.policy:<15} {speed} {memory}  {verdict.binding}{note}"
            + ("" if verdict.feasible else f"; {verdict.reason}")
        )
    return "\n".join(lines)


def limits(verdict: Verdict) -> str:
    """Returns the memory limits and the memory that the plan needs, as one phrase for an error."""
    return (
        f"{format_bytes(verdict.device_limit_bytes)} of device memory (the nearest plan needs"
        f" {format_bytes(verdict.device_peak_bytes)}) and {format_bytes(verdict.host_limit_bytes)}"
        f" of host memory (it needs {format_bytes(verdict.host_peak_bytes)})"
    )
