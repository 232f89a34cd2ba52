"""Draws the memory that a step uses in each place over time, with the limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.patches import Patch

from megatrain.simulator.base.units import format_bytes
from megatrain.simulator.plots import canvas
from megatrain.simulator.plots.pictures import DATA_COLOURS, time_unit
from megatrain.simulator.schedule.buffer import Buffer

_NAMES: dict[str, str] = {
    "master_low": "low halves of masters",
    "moments": "moments of the optimizer",
    "hidden": "inputs and outputs of layers",
    "activations": "activations of running layers",
    "saved_activations": "activations, saved",
    "attention": "attention outputs, saved",
    "tokens": "tokens and labels",
    "norms": "gradient norms",
    "row_sums": "sums of squares of gradients",
    "moving_norms": "moving norms",
    "clips": "clipping factors",
    "ratio_sums": "sums for the size of an update",
    "workspace": "workspace of running operations",
}
"""Class of data -> its name in the legend. The name of any other class is the class itself."""
_OFFLOADED = {"hidden": "layer inputs, offloaded", "attention": "attention outputs, offloaded"}
"""Class of data in host memory -> its name in the legend, if it differs from `_NAMES`."""
_SLOTS = {"weights": "weights, streamed", "gradients": "gradients of running layers"}
"""Class of data in slots on the device -> its name in the legend, if it differs from `_NAMES`."""
_OTHER = "other"
_OTHER_COLOUR = "#dfe3e7"
_LEGEND_INCHES = 0.193  # height of a legend's line in 9 point type


def memory_png(
    path: Path,
    usage: Mapping[str, Sequence[tuple[int, int]]],
    device_limit_bytes: int,
    host_limit_bytes: int,
    title: str,
    fixed: Mapping[str, int] | None = None,
    subtitle: str = "",
    step_ns: int = 0,
    kinds: Mapping[str, Buffer] | None = None,
) -> None:
    """Draws the bytes of each pool over a step as stacked areas, with the limits of memory.

    The device is in the upper panel, and the host in the lower one.

    Args:
        path: The PNG file to write.
        usage: Pool, such as `device.weights`, -> (time in ns, bytes held from then on), ascending.
        device_limit_bytes: Limit of device memory.
        host_limit_bytes: Limit of host memory.
        title: Title of the picture.
        fixed: Pool -> bytes, for pools whose bytes do not change, such as `device.workspace`.
        subtitle: Text below the title.
        step_ns: End of the step, if it is later than the last change.
        kinds: Pool -> one of its buffers, which decides the name, the order and the colour. A pool
            that is not in `kinds` has its own name and comes last.

    Raises ValueError if no pool holds anything over time, and UserError if `path` cannot be
    written.
    """
    steps = {**{pool: [(0, size)] for pool, size in (fixed or {}).items()}, **usage}
    most = {pool: max((held for _, held in points), default=0) for pool, points in steps.items()}
    limits = {"device": device_limit_bytes, "host": host_limit_bytes}
    places = [
        place
        for place in limits
        if any(most[pool] for pool in steps if pool.startswith(f"{place}."))
    ]
    end_ns = max([step_ns, *(time for points in steps.values() for time, _ in points)])
    if not places or not end_ns:
        raise ValueError(f"{path.name}: nothing to draw; no pool holds anything over time")
    scale, unit = time_unit(end_ns)
    top, bottom, gap = 0.98 if subtitle else 0.72, 0.62, 0.62
    stacks = {
        place: {pool: points for pool, points in steps.items() if pool.startswith(f"{place}.")}
        for place in places
    }
    # A panel is high enough for a legend that names every pool.
    heights = {
        place: max(2.75, _LEGEND_INCHES * (len(pools) + 1)) for place, pools in stacks.items()
    }
    with matplotlib.rc_context(canvas.STYLE):
        figure = canvas.new_figure(
            top + bottom + sum(heights.values()) + gap * (len(places) - 1), title, subtitle
        )
        base = bottom
        for place in reversed(places):
            axes = canvas.add_axes(figure, base, heights[place], 3.45)
            axes.set_xlim(0, end_ns * scale)
            if base == bottom:
                axes.set_xlabel(f"time from the start of the step ({unit})")
            _stack(axes, place, stacks[place], limits[place], end_ns, scale, kinds or {})
            base += heights[place] + gap
        canvas.save(figure, path)


def _stack(
    axes: Axes,
    place: str,
    pools: Mapping[str, Sequence[tuple[int, int]]],
    limit: int,
    end_ns: int,
    scale: float,
    kinds: Mapping[str, Buffer],
) -> None:
    """Draws the pools of one place as stacked areas, with heading, limit and legend.

    Pools with the same name in the legend are one area. From bottom to top, areas have the order of
    `DATA_COLOURS`, but streamed weights are next to staging buffers.
    """
    times = sorted({0, end_ns, *(time for points in pools.values() for time, _ in points)})
    held: dict[str, np.ndarray[Any, np.dtype[np.int64]]] = {}
    colour_of: dict[str, str] = {}
    above_state: set[str] = set()
    for pool, points in pools.items():
        kind = kinds.get(pool)
        name = held_name(kind) if kind else pool.partition(".")[2].replace("_", " ")
        held[name] = held.get(name, 0) + _held_at(points, times)
        colour_of[name] = ""
        if kind:
            colour_of[name] = "staging" if kind.staging or kind.chunk else kind.data
            if kind.data == "weights" and _is_slot(kind):
                above_state.add(name)
    peak = int(np.sum(list(held.values()), axis=0).max())
    small = [name for name, values in held.items() if values.max() < 0.004 * peak]
    if len(small) > 1:
        other = f"other, {len(small)} kinds"
        held[other] = np.sum([held.pop(name) for name in small], axis=0)
        colour_of[other] = _OTHER
    most = {name: int(values.max()) for name, values in held.items()}
    ranks = {data: rank for rank, data in enumerate((*DATA_COLOURS, "", _OTHER))}

    def rank(name: str) -> tuple[int, bool, int]:
        streamed = name in above_state
        kind = "staging" if streamed else colour_of[name] if colour_of[name] in ranks else ""
        return ranks[kind], not streamed, -most[name]

    order = sorted(held, key=rank)
    colours = _colours({name: colour_of[name] for name in order})
    factor, unit = next(
        (
            (size, name)
            for size, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"))
            if peak >= 2 * size
        ),
        (2**10, "KiB"),
    )
    below, x, steady = np.zeros(len(times)), np.array(times) * scale, True
    for name in order:
        above = below + held[name] / factor
        axes.fill_between(x, below, above, step="post", color=colours[name], linewidth=0, zorder=2)
        steady = steady and not np.ptp(held[name])
        if steady and most[name] > 0.01 * peak:
            axes.plot(x, above, color="white", linewidth=0.6, zorder=3)
        below = above
    near, over = limit <= 2.2 * peak, peak > limit
    axes.set_ylim(0, max(1.12 * peak, 1.12 * limit if near else 0) / factor)
    if near:
        axes.axhline(
            limit / factor,
            color=canvas.ALARM if over else canvas.INK,
            linewidth=1.2,
            linestyle=(0, (5, 3)),
            zorder=4,
        )
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5}
        axes.annotate(
            "limit",
            (0, limit / factor),
            (5, 5),
            textcoords="offset points",
            fontsize=8.5,
            color=canvas.ALARM if over else canvas.INK,
            bbox=box,
            zorder=5,
        )
    text = f"most held {format_bytes(peak)} of {format_bytes(limit)}" + (
        ": does not fit" if over else "" if near else " (limit above the axis)"
    )
    canvas.add_heading(axes, place, text, canvas.ALARM if over else canvas.INK)
    axes.set_ylabel(unit)
    canvas.make_plain(axes)
    handles = [
        Patch(facecolor=colours[name], label=f"{name}   {format_bytes(most[name])}")
        for name in reversed(order)
    ]
    corner, heading = (1.015, 1.02), "what is held, and its largest size"
    axes.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=corner,
        title=heading,
        alignment="left",
        title_fontsize=8.5,
        **canvas.SWATCHES,
    )


def held_name(buffer: Buffer) -> str:
    """Returns the name, in the legend, of the data that `buffer` holds.

    >>> held_name(Buffer(id="device.slots:0", bytes=8, data="weights", dtype="bf16"))
    'weights, streamed'
    """
    if buffer.chunk:
        return "chunks that are copied"
    if buffer.staging:
        return f"{buffer.data}, staging"
    special = _OFFLOADED if buffer.place == "host" else _SLOTS if _is_slot(buffer) else {}
    return special.get(buffer.data) or _NAMES.get(buffer.data, buffer.data)


def _is_slot(buffer: Buffer) -> bool:
    """Returns whether the buffer is a slot, which layers take turns in."""
    return not (buffer.persistent or buffer.dynamic)


def _held_at(
    points: Sequence[tuple[int, int]], times: Sequence[int]
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Returns the bytes held at each of `times`, as an int64 array of the same length."""
    starts, values = (
        np.array([time for time, _ in points], dtype=np.int64),
        np.array([0, *(held for _, held in points)], dtype=np.int64),
    )
    return values[np.searchsorted(starts, np.array(times, dtype=np.int64), side="right")]


def _colours(data: Mapping[str, str]) -> dict[str, str]:
    """Returns the colour of each area. `data` is name of an area -> class of data that it holds.

    If several areas hold the same class, each is darker than the one before.
    """
    colours: dict[str, str] = {}
    for name in sorted(data, key=len):
        chosen = DATA_COLOURS.get(data[name], _OTHER_COLOUR)
        while chosen in colours.values() and chosen != _OTHER_COLOUR:
            red, green, blue = (0.68 * part for part in to_rgb(chosen))
            chosen = to_hex((red, green, blue))
        colours[name] = chosen
    return colours
