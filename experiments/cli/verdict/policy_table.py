"""Formats the verdicts of several policies as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain.experiments.cli.verdict import layout

if TYPE_CHECKING:
    from megatrain.simulator.verdict.verdict import Verdict


def table(found: list[Verdict]) -> str:
    """Returns a table with one line per policy, of at most 80 columns.

    Other systems are marked with a star. A plan that does not fit is marked OOM (out of memory),
    with the memory that it lacks.
    """
    hours = 9 if any(verdict.training for verdict in found) else 0
    head = f"{'policy':<17}{'step':>8}{'tokens/s':>10}{'hours' if hours else '':>{hours}}"
    lines = [f"{head}{'VRAM':>10}{'RAM':>10}  limited by"]
    for verdict in found:
        name = f"{verdict.policy}{' *' if verdict.prediction_only else ''}"
        speed = (
            f"{layout.seconds(verdict.step_seconds):>8}{layout.speed(verdict.tokens_per_second):>10}"
            if verdict.feasible
            else f"{'OOM':>18}"
        )
        time = f"{verdict.training.hours:,.1f}" if verdict.training else ""
        peaks = (verdict.device_peak_bytes, verdict.host_peak_bytes)
        memory = "".join(f"{layout.size(peak):>10}" for peak in peaks)
        limit = verdict.binding if verdict.feasible else lacking(verdict)
        lines.append(f"{name:<17}{speed}{time:>{hours}}{memory}  {limit}")
    if any(verdict.prediction_only for verdict in found):
        lines.append("* another system, for prediction only")
    return "\n".join(lines)


def lacking(verdict: Verdict) -> str:
    """Returns which memory the plan lacks."""
    excess = {
        "VRAM": verdict.device_peak_bytes - verdict.device_limit_bytes,
        "RAM": verdict.host_peak_bytes - verdict.host_limit_bytes,
    }
    name, size = max(excess.items(), key=lambda item: item[1])
    return f"{layout.size(size)} {name}"
