"""Agreement: compares two calibrations of one machine.

Each number in a calibration is a median or a mean. Its spread is the interquartile range of its
repetitions divided by their median. Two numbers agree if the second differs from the first by at
most the sum of both spreads plus 2 %, as a share of the first.

A part of the machine (host, link or device) is noisy if more than 10 % of its numbers disagree. Its
speed then changed between the two calibrations by more than during either of them. Each part is
judged by itself, because few numbers depend on the host: when the cores of a machine were 20 %
faster in the second calibration, only 4 % of all numbers disagreed
(tests/shared/calibrations/noisy-host.toml).

Numbers of bytes are counted and not timed, so they have no spread and may differ by 2 %. Numbers
that are derived from other numbers are not compared.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from megatrain.simulator.hardware.cost_table import CostTable
from megatrain.simulator.hardware.machine import HardwareSpec

# Twice the difference of the median step times of two runs of one plan
# (experiments/results/h200-x2-qwen2.5-7b-peers: 2.776 and 2.750 s).
_RESOLUTION = 0.02
_NOISY = 0.10

_PARTS = {
    "host": (
        "cpu_",
        "accumulate_gradients",
        "norm",
        "update_ratios",
        "host_",
        "thread_",
        "contention.cpu",
        "dispatch_ns.cpu",
        "fixed",
        "step_overhead",
    ),
    "link": (
        "load_",
        "save_",
        "duplex_curve",
        "contention.h2d",
        "contention.d2h",
        "dispatch_ns.h2d",
        "dispatch_ns.d2h",
    ),
}
"""Part of the machine -> prefixes of the names of its numbers. All other numbers, and numbers with
a lane in their name (`KIND@LANE`), belong to the device."""


class RateDifference(NamedTuple):
    """A number on which the two calibrations disagree."""

    name: str
    """The name of the number, a key of `CostTable.spread`."""
    first: float
    """The value in the first calibration."""
    second: float
    """The value in the second calibration."""
    allowed: float
    """The largest change, without its sign, that counts as agreement."""

    @property
    def change(self) -> float:
        """The change relative to the first value, signed."""
        return self.second / self.first - 1


class Agreement(NamedTuple):
    """The result of comparing two calibrations."""

    compared: int
    """The count of numbers that both calibrations have."""
    differences: tuple[RateDifference, ...]
    """The numbers that disagree, largest change first."""
    noisy: tuple[str, ...]
    """The noisy parts of the machine: `host`, `link` or `device`."""


_RATES = ("device_gb_per_s", "host_gb_per_s", "thread_gb_per_s", "cpu_adam_per_s")
_OF_LANES = ("contention", "turns", "dispatch_ns", "step_overhead_ns")
"""Numbers measured with the layers of the calibration's first model. They are comparable only if
both calibrations measured the same layers."""


def agreement(first: HardwareSpec, second: HardwareSpec) -> Agreement:
    """Compares the numbers that both calibrations have. Raises ValueError if one of the machines
    was not measured.
    """
    numbers, others = _numbers(first), _numbers(second)
    shared = sorted(numbers.keys() & others.keys())
    if _layers(first) != _layers(second):
        shared = [name for name in shared if name.partition(".")[0] not in _OF_LANES]
    differences = []
    for name in shared:
        (one, one_spread), (two, two_spread) = numbers[name], others[name]
        allowed = one_spread + two_spread + _RESOLUTION
        if abs(one - two) > allowed * one:
            differences.append(RateDifference(name, one, two, allowed))
    compared, differing = (
        Counter(map(_part, shared)),
        Counter(_part(difference.name) for difference in differences),
    )
    noisy = tuple(part for part in (*_PARTS, "device") if differing[part] > _NOISY * compared[part])
    differences.sort(key=lambda difference: -abs(difference.change))
    return Agreement(len(shared), tuple(differences), noisy)


def _part(name: str) -> str:
    """Returns the part of the machine that a number belongs to."""
    return next(
        (part for part, begins in _PARTS.items() if name.startswith(begins) and "@" not in name),
        "device",
    )


def _layers(hardware: HardwareSpec) -> set[str]:
    """Returns the shapes of the layers that were measured."""
    return set(_costs(hardware).compute.get("forward", {}))


def _numbers(hardware: HardwareSpec) -> dict[str, tuple[float, float]]:
    """Returns name -> (number, spread), with the names of `CostTable.spread`. Zeros are left out,
    because 0 means that the machine does not have this number.
    """
    table = _costs(hardware)
    values: dict[str, float] = {
        f"{kind} {size}": duration
        for kind, points in table.curves.items()
        for size, duration in points
    }
    values |= {
        f"{kind} {shape}": duration
        for kind, shapes in table.compute.items()
        for shape, (_, duration) in shapes.items()
    }
    values |= {f"duplex_curve {size}": rate for size, rate in hardware.duplex_curve}
    values |= {f"peak_tflops.{dtype}": rate for dtype, rate in hardware.peak_tflops.items()} | {
        name: getattr(hardware, name) for name in _RATES
    }
    values |= {
        f"contention.{lane}.{other}": share
        for lane, others in table.contention.items()
        for other, share in others.items()
    }
    values |= {f"dispatch_ns.{lane}": wait for lane, wait in table.dispatch_ns.items()} | {
        "step_overhead_ns": table.step_overhead_ns
    }
    for name, part in (("turns", table.turns), ("fixed", table.fixed)):
        values |= (
            {f"{name}.{field}": getattr(part, field) for field in part.__struct_fields__}
            if part
            else {}
        )
    counted: dict[str, float] = {
        f"activations {shape}": size for shape, (_, size) in table.activations.items()
    }
    for shape, workspace in table.workspace.items():
        counted |= {
            f"workspace.{field} {shape}": getattr(workspace, field)
            for field in workspace.__struct_fields__
        }
    numbers = {
        name: (values[name], spread) for name, spread in table.spread.items() if values.get(name)
    }
    return numbers | {name: (size, 0.0) for name, size in counted.items() if size}


def _costs(hardware: HardwareSpec) -> CostTable:
    if hardware.costs is None:
        raise ValueError(f"{hardware.name} was not measured")
    return hardware.costs
