"""Formats the verdicts of several policies as a table."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatrain.experiments.cli.verdict import layout
from megatrain.experiments.cli.verdict.reasons import without_cuda

if TYPE_CHECKING:
    from megatrain.simulator.verdict.verdict import Verdict


_SIZES = {"policy": 17, "step": 8, "tokens/s": 10, "hours": 9, "VRAM": 10, "RAM": 10}
_LIMIT = "most work"
_DROPPED = (_LIMIT, "step", "RAM", "VRAM")
"""Columns that are left out on a narrow terminal, in this order."""


def table(verdicts: list[Verdict], width: int = 80, *, names: Sequence[str] = ()) -> str:
    """Returns a table with one line per verdict, at most `width` characters wide.

    Other systems are marked with a star. A plan that does not fit is marked OOM (out of memory),
    with the memory that it lacks. A narrow table has fewer columns. A line below the table lists
    the policies of `names` that have no verdict.
    """
    rows = [_cells(verdict) for verdict in verdicts]
    sizes = {**_SIZES, _LIMIT: 2 + max(len(row[_LIMIT]) for row in [{_LIMIT: _LIMIT}, *rows])}
    if not any(verdict.training for verdict in verdicts):
        del sizes["hours"]
    shown = layout.shown_columns(sizes, width, _DROPPED)

    def line(row: dict[str, str]) -> str:
        cells = [row["policy"].ljust(sizes["policy"])]
        cells += [row[name].rjust(sizes[name]) for name in shown if name not in ("policy", _LIMIT)]
        return "".join([*cells, *([f"  {row[_LIMIT]}"] if _LIMIT in shown else [])])

    lines = [line({name: name for name in sizes}), *map(line, rows)]
    lines += layout.left_out(sizes, shown, width)
    if any(verdict.prediction_only for verdict in verdicts):
        lines.append("* another system, for prediction only")
    if verdicts and not verdicts[0].cuda:
        lines += textwrap.wrap(without_cuda(verdicts[0]), width)
    missing = [name for name in names if name not in [verdict.policy for verdict in verdicts]]
    if missing:
        why = "`megatrain check --policy NAME` says why"
        lines += textwrap.wrap(f"not with these options: {', '.join(missing)}; {why}", width)
    return "\n".join(lines)


def _cells(verdict: Verdict) -> dict[str, str]:
    """Returns the cells of a policy's line, by column."""
    fits = verdict.feasible
    return {
        "policy": f"{verdict.policy}{' *' if verdict.prediction_only else ''}",
        "step": layout.seconds(verdict.step_seconds) if fits else "",
        "tokens/s": layout.speed(verdict.tokens_per_second) if fits else "OOM",
        "hours": f"{verdict.training.hours:,.1f}" if verdict.training else "",
        "VRAM": layout.size(verdict.device_peak_bytes),
        "RAM": layout.size(verdict.host_peak_bytes),
        _LIMIT: verdict.binding if fits else lacking(verdict),
    }


def lacking(verdict: Verdict) -> str:
    """Returns the memory that the plan lacks most, such as `3.5 GiB VRAM`."""
    excess = {
        "VRAM": verdict.device_peak_bytes - verdict.device_limit_bytes,
        "RAM": verdict.host_peak_bytes - verdict.host_limit_bytes,
    }
    name, size = max(excess.items(), key=lambda item: item[1])
    return f"{layout.size(size)} {name}"
