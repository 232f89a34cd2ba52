"""Report: a verdict as text, a fact a line. It computes nothing: every number is a field of the verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain.simulator.plan import Placement
from megatrain.simulator.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from megatrain.simulator.advice import Suggestion
    from megatrain.simulator.plan import Knobs
    from megatrain.simulator.verdict import Verdict

_LETTERS = {"weights": "w", "gradients": "g", "moments": "m", "activations": "a", "workspace": "x", "staging": "s"}
_WIDTH = 40
_WHERE = {"stored": " kept", "attention": " kept", "parked": " on the host", "host_updated": " on the host"}
"""what a placement means, where not `on the device`"""


def text(verdict: Verdict) -> str:
    """One plan in full: does it fit, how fast, what fills the memory, what would help."""
    lines = [_heading(verdict), _decision(verdict)]
    lines += _speed(verdict) if verdict.feasible else [f"{verdict.binding} binds: {verdict.reason}"]
    lines += [f"documents: {verdict.documents}"] if verdict.documents else []
    lines += memory(verdict)
    if verdict.longest_context is not None:
        batch = f"a micro-batch of {verdict.largest_batch:,} x {verdict.workload.sequence}" if verdict.largest_batch else f"none of {verdict.workload.sequence}"
        most = f"most that fits: a context of {verdict.longest_context:,} tokens (batch 1), {batch}"
        lines.append(most if verdict.longest_context else "no micro-batch fits, however small")
    lines += _rivals(verdict)
    if verdict.advice:
        lines.append("would make it run faster, about:" if verdict.feasible else "would help:")
        lines += [f"    {_suggestion(entry)}" for entry in verdict.advice]
    if verdict.feasible:
        lines += _several(verdict) + _training(verdict)
    return "\n".join([*lines, _costs(verdict)])


def _heading(verdict: Verdict) -> str:
    work = verdict.workload
    active = f", {format_count(verdict.active_parameters)} active" if verdict.active_parameters != verdict.parameters else ""
    size = f"{format_count(verdict.parameters)}{'' if ' ' in format_count(verdict.parameters) else ' '} parameters{active}".replace("  ", " ")
    return f"{verdict.model} ({size}) on {verdict.hardware}, {work.accumulation} x {work.batch} x {work.sequence} tokens, {work.dtype}"


def _decision(verdict: Verdict) -> str:
    knobs = "another system, prediction only" if verdict.prediction_only else _knobs(verdict)
    return f"{'fits' if verdict.feasible else 'DOES NOT FIT'} with policy {verdict.policy}: {knobs}"


def _knobs(verdict: Verdict) -> str:
    knobs = verdict.knobs
    if not verdict.streams:
        placement = knobs.get("placement")
        kept = [f"{name} of {layers} kept" for name in ("stored", "attention") if (layers := getattr(placement, name, ""))]
        advised = [] if verdict.unified or not verdict.feasible else ["do not stream, all of it stays on the device"]
        return ", ".join([*advised, *kept, f"checkpoint_interval {knobs['checkpoint_interval']}", "nothing is copied"])
    parts = [f"{name} {value}" for name, value in knobs.items() if name not in ("chunk_bytes", "placement") and (value or name != "weights_ahead")]
    placement = knobs.get("placement", Placement())
    placed = [(name, getattr(placement, name)) for name in Placement.__struct_fields__]
    parts += [f"{name} of {layers}{_WHERE.get(name, ' on the device')}" for name, layers in placed if layers]
    if "chunk_bytes" in knobs:
        parts.append(f"copies of {format_bytes(int(str(knobs['chunk_bytes'])))}")
    return ", ".join(parts)


def _speed(verdict: Verdict) -> list[str]:
    active = f" of all, {verdict.tflops_6n_active:.4g} of active parameters" if verdict.active_parameters != verdict.parameters else ""
    utilisation = "" if verdict.mfu is None else f", MFU {verdict.mfu:.1%}"
    exposed = {lane: seconds for lane, seconds in verdict.exposed_seconds.items() if seconds >= verdict.step_seconds / 1000}
    waits = ", ".join(f"{lane} {format_seconds(seconds)}" for lane, seconds in sorted(exposed.items(), key=lambda item: -item[1]))
    return [
        f"step {format_seconds(verdict.step_seconds)}, {verdict.tokens_per_second:,.0f} tokens/s, {verdict.tflops_6n:.4g} TFLOPS (6N){active}{utilisation}",
        f"{verdict.binding} binds: the lane has the most work, {format_seconds(verdict.lane_seconds[verdict.binding])}; "
        f"no order of these ops beats {format_seconds(verdict.lower_bound_seconds)}, for {verdict.lower_bound_lane}",
        *([f"compute stands still while these run: {waits}"] if waits else ["nothing is exposed: compute always runs"] if verdict.exposed_seconds else []),
        *([f"other lanes slow compute by {format_seconds(verdict.slowed_seconds)}"] if verdict.slowed_seconds >= verdict.step_seconds / 1000 else []),
    ]


def _rivals(verdict: Verdict) -> list[str]:
    """What came second, and what more memory would buy."""
    lines, second = [], verdict.runner_up
    if second is not None and verdict.feasible:
        slower = second.step_seconds / verdict.step_seconds - 1
        least, other = ("at least ", "") if second.at_least else ("", f": {_changes(second.knobs, verdict)}")
        lines.append(f"runner-up: policy {second.policy}, {least}{format_seconds(second.step_seconds)}, {slower:.1%} slower{other}")
    return lines + margins(verdict)


def margins(verdict: Verdict) -> list[str]:
    """What one more GiB would buy, a place a line."""
    lines = []
    for margin in verdict.one_more_gib:
        bought = f"{margin.gain:+.1%}, {margin.tokens_per_second:,.0f} tokens/s: {_changes(margin.knobs, verdict)}" if margin.knobs else "buys nothing"
        lines.append(f"one more GiB of {margin.place} memory: {bought}")
    return lines


def _changes(knobs: Knobs | None, verdict: Verdict) -> str:
    """Where `knobs` differ from the verdict's."""
    if knobs is None:
        return ""
    here: Placement = verdict.knobs.get("placement", Placement())  # type: ignore[assignment]
    changed = [name for name in knobs.__struct_fields__ if name in verdict.knobs and name != "placement" and getattr(knobs, name) != verdict.knobs[name]]
    parts = [f"{name} {format_bytes(knobs.chunk_bytes) if name == 'chunk_bytes' else getattr(knobs, name)}" for name in changed]
    placed = [name for name in here.__struct_fields__ if getattr(knobs.placement, name) != getattr(here, name)]
    parts += [f"{name} of {getattr(knobs.placement, name) or 'none'}{_WHERE.get(name, ' on the device')}" for name in placed]
    return ", ".join(parts) or "the same knobs"


def memory(verdict: Verdict) -> list[str]:
    """What each place holds, by class of data, against its limit."""
    lines = []
    for place, peak, limit in (
        ("device", verdict.device_peak_bytes, verdict.device_limit_bytes), ("host", verdict.host_peak_bytes, verdict.host_limit_bytes),
    ):  # fmt: skip
        if verdict.unified and place == "host" and not peak:
            continue
        sizes = verdict.classes[place]
        note = ": one memory for CPU and GPU, nothing is copied" if verdict.unified else ""
        lines.append(f"{'memory' if verdict.unified else place:<7}[{_bar(sizes, max(peak, limit))}] {format_bytes(peak)} of {format_bytes(limit)}{note}")
        lines += [f"    {_LETTERS[name]} {name:<14}{format_bytes(size):>12}" for name, size in sizes.items() if size >= peak / 1000]
    return lines


def _bar(sizes: dict[str, int], whole: int) -> str:
    """A letter of the class for every 40th of `whole` that it takes.

    >>> _bar({"weights": 25, "moments": 50}, 100)
    'wwwwwwwwwwmmmmmmmmmmmmmmmmmmmm..........'
    """
    bar, total = "", 0
    for name, size in sizes.items():
        total += size
        bar += _LETTERS[name] * (min(round(_WIDTH * total / whole), _WIDTH) - len(bar))
    return bar + "." * (_WIDTH - len(bar))


def _suggestion(entry: Suggestion) -> str:
    name = f"{entry.change} (the runtime cannot do it yet)" if entry.would else entry.change
    if entry.gain is not None and entry.tokens_per_second is not None:
        return f"{name}: {entry.gain:+.0%}, {entry.tokens_per_second:,.0f} tokens/s"
    saved = f"saves {format_bytes(entry.bytes_saved)}" if entry.bytes_saved > 0 else ""
    state = "fits" if entry.fits else f"still lacks {format_bytes(entry.bytes_missing)}"
    return f"{name}: {', '.join(filter(None, (saved, state)))}"


def _several(verdict: Verdict) -> list[str]:
    several = verdict.several
    if several is None:
        return []
    fits = "" if several.feasible else f", DOES NOT FIT: {format_bytes(several.host_peak_bytes)} of host memory"
    return [
        f"{several.gpus} GPUs: {several.tokens_per_second:,.0f} tokens/s, {several.speedup:.1f} times one, step {format_seconds(several.step_seconds)}, "
        f"links at {several.gb_per_s:.1f} GB/s each, {several.gb_per_s_both:.1f} both ways{fits}",
        f"    {several.note}",
    ]


def _training(verdict: Verdict) -> list[str]:
    training = verdict.training
    if training is None:
        return []
    energy = (
        "power not stated" if training.energy_kwh is None else f"{training.energy_kwh:,.1f} kWh at {training.watts:.0f} W{' a GPU' if verdict.several else ''}"
    )
    return [f"{format_count(training.tokens)} tokens: {training.days:,.2f} days, {energy}".replace(" G tokens", " B tokens")]


def _costs(verdict: Verdict) -> str:
    source = f"measured {verdict.calibrated}" if verdict.calibrated else "not measured: from datasheet rates"
    if verdict.feasible and verdict.step_seconds_low is not None and verdict.step_seconds_high is not None:
        source += f", so a step may take {format_seconds(verdict.step_seconds_low)} to {format_seconds(verdict.step_seconds_high)}"
    outside = "outside what was measured" if verdict.calibrated else "beyond the copies that were measured"
    flagged = ", ".join(f"{kind} ({count:,} ops)" if count else kind for kind, count in verdict.extrapolated.items())
    return f"costs: {source}" + (f"; {outside}: {flagged}" if flagged else "")


def table(found: list[Verdict]) -> str:
    """Every policy, a line each; other systems marked; out of memory (OOM) with what is lacking."""
    days = any(verdict.training for verdict in found)
    lines = [f"{'policy':<15} {'step':>11} {'tokens/s':>10}{'days':>10}" if days else f"{'policy':<15} {'step':>11} {'tokens/s':>10}"]
    lines[0] += f" {'device':>11} {'host':>11}  binds, or lacks"
    for verdict in found:
        note = " (another system, prediction only)" if verdict.prediction_only else ""
        memory = f"{format_bytes(verdict.device_peak_bytes):>11} {format_bytes(verdict.host_peak_bytes):>11}"
        speed = f"{format_seconds(verdict.step_seconds):>11} {verdict.tokens_per_second:>10,.0f}" if verdict.feasible else f"{'OOM':>22}"
        if verdict.training:
            speed += f"{verdict.training.days:>10,.2f}" if verdict.feasible else " " * 10
        lines.append(f"{verdict.policy:<15} {speed} {memory}  {verdict.binding}{note}" + ("" if verdict.feasible else f"; {verdict.reason}"))
    return "\n".join(lines)


def limits(verdict: Verdict) -> str:
    """What the plan needs and may use, in each place."""
    return (
        f"{format_bytes(verdict.device_limit_bytes)} of device memory (the nearest plan needs {format_bytes(verdict.device_peak_bytes)}) "
        f"and {format_bytes(verdict.host_limit_bytes)} of host memory (it needs {format_bytes(verdict.host_peak_bytes)})"
    )
