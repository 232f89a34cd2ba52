"""Agreement: whether a second calibration of a machine says what the first one said, within the spreads that both state.

A number is a median or a mean, and its spread the interquartile range of its repeats over their median. Two agree where they differ by no more than both
spreads and a fiftieth; a part of the machine is noisy where more than a tenth of its numbers do not: then its speed changed between the two, by more than
within either. Of each part by itself, for few of the numbers are the host's: the cores of an H200's machine were 20 % faster ten minutes later, which 4 % of
all numbers told (experiments/results/h200-prove/runs/seventh). Bytes are counted, not timed: they have no spread, and may differ by the
fiftieth alone. Numbers that are derived from others are not compared.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from megatrain.simulator.hardware import CostTable, HardwareSpec

_RESOLUTION = 0.02  # twice by what the medians of one plan's step differed in two runs (experiments/results/h200-x2-qwen2.5-7b-peers: 2.776 and 2.750 s)
_NOISY = 0.10


_PARTS = {
    "host": ("cpu_", "accumulate_gradients", "norm", "ratios", "host_", "thread_", "contention.cpu", "dispatch_ns.cpu", "fixed", "step_overhead"),
    "link": ("load_", "save_", "duplex_curve", "contention.h2d", "contention.d2h", "dispatch_ns.h2d", "dispatch_ns.d2h"),
}
"""what names of its numbers begin with; the others, and what ran on a lane of the device, are the device's"""


class Difference(NamedTuple):
    """A number that the two calibrations do not agree on."""

    name: str
    """as in `CostTable.spread`"""
    first: float
    second: float
    allowed: float
    """relative"""

    @property
    def change(self) -> float:
        """Relative to the first, signed."""
        return self.second / self.first - 1


class Agreement(NamedTuple):
    """Of two calibrations."""

    compared: int
    differences: tuple[Difference, ...]
    """largest change first"""
    noisy: tuple[str, ...]
    """parts of the machine: the host, the link, the device"""


_RATES = ("device_gb_per_s", "host_gb_per_s", "thread_gb_per_s", "cpu_adam_per_s")
_OF_LANES = ("contention", "turns", "dispatch_ns", "step_overhead_ns")
"""measured with the layers of the first model: comparable where the same layers were measured"""


def agreement(first: HardwareSpec, second: HardwareSpec) -> Agreement:
    """Over the numbers that both have, with their spreads. Neither may be a datasheet's."""
    known, other = _numbers(first), _numbers(second)
    shared = sorted(known.keys() & other.keys())
    if _layers(first) != _layers(second):
        shared = [name for name in shared if name.partition(".")[0] not in _OF_LANES]
    found = []
    for name in shared:
        (one, spread), (two, again) = known[name], other[name]
        allowed = spread + again + _RESOLUTION
        if abs(one - two) > allowed * min(one, two):
            found.append(Difference(name, one, two, allowed))
    parts, moved = Counter(map(_part, shared)), Counter(_part(difference.name) for difference in found)
    noisy = tuple(part for part in (*_PARTS, "device") if moved[part] > _NOISY * parts[part])
    return Agreement(len(shared), tuple(sorted(found, key=lambda difference: -abs(difference.change))), noisy)


def _part(name: str) -> str:
    """Whose number it is."""
    return next((part for part, begins in _PARTS.items() if name.startswith(begins) and "@" not in name), "device")


def _layers(hardware: HardwareSpec) -> set[str]:
    """Shapes of the layers that were measured."""
    return set(_costs(hardware).compute.get("forward", {}))


def _numbers(hardware: HardwareSpec) -> dict[str, tuple[float, float]]:
    """(number, spread) by the name that it has in `CostTable.spread`; zeros left out: what does not exist on this machine."""
    table = _costs(hardware)
    values: dict[str, float] = {f"{kind} {size}": duration for kind, points in table.curves.items() for size, duration in points}
    values |= {f"{kind} {shape}": duration for kind, shapes in table.compute.items() for shape, (_, duration) in shapes.items()}
    values |= {f"duplex_curve {size}": rate for size, rate in hardware.duplex_curve}
    values |= {f"peak_tflops.{dtype}": rate for dtype, rate in hardware.peak_tflops.items()} | {name: getattr(hardware, name) for name in _RATES}
    values |= {f"contention.{lane}.{other}": share for lane, others in table.contention.items() for other, share in others.items()}
    values |= {f"dispatch_ns.{lane}": wait for lane, wait in table.dispatch_ns.items()} | {"step_overhead_ns": table.step_overhead_ns}
    for name, part in (("turns", table.turns), ("fixed", table.fixed)):
        values |= {f"{name}.{field}": getattr(part, field) for field in part.__struct_fields__} if part else {}
    counted: dict[str, float] = {f"activations {shape}": size for shape, (_, size) in table.activations.items()}
    for shape, workspace in table.workspace.items():
        counted |= {f"workspace.{field} {shape}": getattr(workspace, field) for field in workspace.__struct_fields__}
    numbers = {name: (values[name], spread) for name, spread in table.spread.items() if values.get(name)}
    return numbers | {name: (size, 0.0) for name, size in counted.items() if size}


def _costs(hardware: HardwareSpec) -> CostTable:
    if hardware.costs is None:
        raise ValueError(f"{hardware.name} was not measured")
    return hardware.costs
