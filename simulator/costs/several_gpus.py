"""How fast each GPU copies if several GPUs of a host copy at the same time.

The host's DRAM limits the rate of all links together to T GB/s. With N GPUs:

    rate of one GPU with one direction busy:        min(link, T / N)
    rate of each direction with both busy:          min(link, T / 2N)

T is the DRAM rate that the host's cores reach, divided by the DRAM traffic per copied byte. A host
for several GPUs is assumed to sustain 175 GB/s, which four H200 in one host reached (2026-11-21),
but at most N times the T of the machine with one GPU. It never has less than that T. With
NVLink-C2C, each GPU has its own host memory, so there is no limit.

If N GPUs were measured together (`HardwareSpec.several`), their rates are used as they are. If only
another number was measured, T is the highest rate that all its links reached. If its links reached
the rate of one GPU, T may be higher, so it is at least the T above.
"""

from __future__ import annotations

from typing import NamedTuple

from megatrain.simulator.costs.calibrated import Calibrated
from megatrain.simulator.costs.contention import link_gb_per_s
from megatrain.simulator.costs.interpolation import interpolate
from megatrain.simulator.costs.protocol import CostModel
from megatrain.simulator.costs.scaled import ScaledCosts
from megatrain.simulator.hardware.cost_table import COPY_KINDS, EXCHANGE_KINDS
from megatrain.simulator.hardware.limits import Curve
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.hardware.several_gpus import SeveralGpus
from megatrain.simulator.schedule import Op

DMA_GB_PER_S = 175.0
"""Rate of all copies of four H200 in one host with 64 cores, both directions together. Measured on
2026-11-21."""
_SATURATED = 0.95
"""Links that keep a smaller share of the rate of one GPU are limited by what they share."""
_OTHER = {"h2d": "d2h", "d2h": "h2d"}


class LinkShare(NamedTuple):
    """The rates of each GPU's link while all GPUs copy."""

    alone: float
    """GB/s with one direction busy, of the slower direction."""
    together: float
    """GB/s of each direction with both busy, of the slower direction."""
    slower: dict[str, float]
    """Direction, `h2d` or `d2h` -> factor on the time of its copies, relative to one GPU."""
    both_slower: dict[str, float]
    """Direction -> additional factor while both directions are busy."""


class OneOfSeveral(ScaledCosts):
    """The cost model `costs` of one GPU, for each of several GPUs that share the links of a host.

    All durations count as extrapolated, unless this number of GPUs was measured together.
    """

    def __init__(self, costs: CostModel, links: LinkShare, measured: SeveralGpus | None) -> None:
        """Makes the cost model.

        Args:
            costs: The cost model of one GPU, with the collectives of several.
            links: The rates of the links.
            measured: The measurement of this number of GPUs, if there is one.
        """
        super().__init__(costs, lambda op: op, links.slower, links.both_slower)
        self._measured = measured

    @property
    def calibration(self) -> Calibrated | None:
        """The durations and spreads of one GPU, or None unless they and this number of GPUs were
        measured, both with spreads.
        """
        one = self.costs
        known = self._measured is not None and self._measured.spread
        return one if known and isinstance(one, Calibrated) and one.table.spread else None

    def extrapolated(self, op: Op) -> bool:
        return self._measured is None or self.costs.extrapolated(op)

    def spread(self, op: Op) -> float:
        """Returns the spread of the duration of `op`: of the measurement of several GPUs for a
        collective, the larger one of both measurements for a copy, and otherwise of one GPU.

        `calibration` must not be None.
        """
        calibration, measured = self.calibration, self._measured
        assert calibration is not None
        assert measured is not None
        together = measured.spread_of(op.kind, op.lane)
        if op.kind in EXCHANGE_KINDS:
            return together
        one = calibration.spread(op)
        return max(one, together) if op.kind in COPY_KINDS else one


def has_own_memory(hardware: HardwareSpec) -> bool:
    """Returns whether each GPU has host memory of its own."""
    return "C2C" in hardware.link


def sharing_host_memory(hardware: HardwareSpec | None, gpus_per_host: int) -> int:
    """Returns how many ranks share the host memory of one of them, on hosts with `gpus_per_host`
    GPUs. Without `hardware`, the GPUs of a host share its memory.
    """
    return 1 if hardware is not None and has_own_memory(hardware) else gpus_per_host


def link_share(hardware: HardwareSpec, gpus: int) -> LinkShare:
    """Returns the rates of each link while `gpus` GPUs of one host copy. `hardware` is the machine
    with one GPU.
    """
    measured = hardware.measured_together(gpus)
    if measured and measured.gpus == gpus:
        return _as_measured(hardware, measured)
    one, both = (
        min(hardware.h2d_gb_per_s, hardware.d2h_gb_per_s) * share
        for share in (1.0, hardware.duplex_fraction)
    )
    memory = hardware.host_memory
    machine = memory.gb_per_s / max(memory.h2d_cost, memory.d2h_cost) if memory else DMA_GB_PER_S
    total = (
        2 * gpus * one
        if has_own_memory(hardware)
        else max(machine, min(gpus * machine, DMA_GB_PER_S))
    )
    if measured and not has_own_memory(hardware):
        reached = _all_links(measured)
        limited = reached < _SATURATED * 2 * measured.gpus * both
        total = reached if limited else max(reached, total)
    alone, together = link_gb_per_s(gpus, one, both, total)
    slower, both_slower = one / alone, (both / one) / (together / alone)
    return LinkShare(
        alone, together, dict.fromkeys(_OTHER, slower), dict.fromkeys(_OTHER, both_slower)
    )


def _all_links(measured: SeveralGpus) -> float:
    """Returns the highest rate of all links together, in GB/s: with both directions busy or with
    the faster one.
    """
    both = sum(measured.copy_gb_per_s(lane, both=True) for lane in _OTHER)
    return measured.gpus * max(both, *(measured.copy_gb_per_s(lane, both=False) for lane in _OTHER))


def _as_measured(hardware: HardwareSpec, measured: SeveralGpus) -> LinkShare:
    """Returns the rates in `measured`, with factors that give copies of the measured size these
    rates.
    """
    slower, both_slower = dict[str, float](), dict[str, float]()
    for lane, other in _OTHER.items():
        alone, both = (measured.copy_gb_per_s(lane, both=both) for both in (False, True))
        one, kept = _one_gpu(hardware, lane, other, measured.copy_bytes)
        slower[lane], both_slower[lane] = one / alone, kept / (both / alone)
    return LinkShare(
        min(measured.copy_gb_per_s(lane, both=False) for lane in _OTHER),
        min(measured.copy_gb_per_s(lane, both=True) for lane in _OTHER),
        slower,
        both_slower,
    )


def _one_gpu(hardware: HardwareSpec, lane: str, other: str, size: int) -> tuple[float, float]:
    """Returns the GB/s of copies of `size` bytes in the direction `lane` of one GPU, and the share
    of it that they keep while the direction `other` is busy.
    """
    curve = hardware.h2d_curve if lane == "h2d" else hardware.d2h_curve
    rate = hardware.h2d_gb_per_s if lane == "h2d" else hardware.d2h_gb_per_s
    alone = _on_curve(curve, size) if curve else size / (hardware.link_latency_ns + size / rate)
    if hardware.duplex_curve:
        return alone, min(_on_curve(hardware.duplex_curve, size) / alone, 1.0)
    table = hardware.costs
    usual = 1.0 if table else hardware.duplex_fraction
    pairs = (table or hardware).contention
    return alone, pairs.get(lane, {}).get(other, usual)


def _on_curve(curve: Curve, size: int) -> float:
    """Returns the GB/s of a copy of `size` bytes."""
    points = tuple((known, round(known / rate)) for known, rate in curve)
    return size / max(interpolate(points, size)[0], 1)
