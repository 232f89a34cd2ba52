"""SeveralGpus: what the GPUs of one host do to each other while all of them work, as measured by
`megatrain calibrate --several`.
"""

from __future__ import annotations

import msgspec

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.hardware.limits import CALIBRATE_AGAIN, at_least, refuse_unknown, within
from megatrain.simulator.schedule.plan import MOST_GPUS

MEASURED = (
    "h2d_gb_per_s",
    "d2h_gb_per_s",
    "h2d_both_gb_per_s",
    "d2h_both_gb_per_s",
    "gather",
    "exchange",
    "sum_gb_per_s",
    "compute_beside_gather",
    "compute_beside_exchange",
    "gather_wait",
    "exchange_wait",
)
"""The numbers that have a spread."""


class CollectiveRate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The time of a collective while nothing else runs: latency + received bytes / rate, fitted to
    collectives of several sizes.
    """

    latency_ns: int
    """Time of a collective of no bytes, in nanoseconds."""
    gb_per_s: float
    """10^9 bytes per second that each GPU receives from all others."""


class SeveralGpus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measurements of `gpus` GPUs of one host that work at the same time. A rate is that of the
    slowest GPU, because a step waits for it. Raises UserError if a number is out of range.

    A wait is the additional time that a kernel of a collective takes beside compute, divided by the
    time of the longest matrix product of the layers that compute.
    """

    gpus: int
    """Number of GPUs, at least 2."""
    measured_on: str
    """The name that the driver reports for the GPUs."""
    date: str
    """The date of the measurement."""
    copy_bytes: int
    """Size of the copies over the links to the host, in bytes."""
    h2d_gb_per_s: float
    """GB/s of a GPU's link while all GPUs copy to the device only."""
    d2h_gb_per_s: float
    """GB/s of a GPU's link while all GPUs copy to the host only."""
    h2d_both_gb_per_s: float
    """GB/s to the device while all GPUs copy in both directions."""
    d2h_both_gb_per_s: float
    """GB/s to the host while all GPUs copy in both directions."""
    gather: CollectiveRate
    """All-gathers, as of weights."""
    exchange: CollectiveRate
    """All-to-alls, as of gradients, without the sum of what is received."""
    sum_gb_per_s: float
    """GB/s at which a GPU adds the received parts of a gradient, counting the bytes read and the
    bytes written."""
    compute_beside_gather: float
    """Share of its speed, (0, 1], that compute keeps while all-gathers run all the time."""
    compute_beside_exchange: float
    """The same while gradients are exchanged and summed all the time."""
    gather_wait: float
    """The wait of an all-gather."""
    exchange_wait: float
    """The wait of each kernel of an exchange: an all-to-all or a sum."""
    collective_bytes: int
    """GPU memory that the library of the collectives keeps on each GPU, in bytes."""
    spread: dict[str, float]
    """Field -> the interquartile range of its repetitions divided by their median, the largest of
    all GPUs. For `gather` and `exchange`, it is the sum over all sizes of the range of the times,
    or of their differences from the fitted ones if that is larger, divided by the sum of all
    times."""

    def __post_init__(self) -> None:
        where = f"several ({self.gpus} GPUs)"
        within(f"{where}: gpus", self.gpus, 2, MOST_GPUS)
        at_least(f"{where}: copy_bytes", self.copy_bytes, 1)
        within(f"{where}: collective_bytes", self.collective_bytes, 0, 2**40)
        for name in MEASURED[:4]:
            within(f"{where}: {name}", getattr(self, name), 0.001, 5000.0)
        within(f"{where}: sum_gb_per_s", self.sum_gb_per_s, 0.001, 1e6)
        for name in ("gather", "exchange"):
            rate: CollectiveRate = getattr(self, name)
            within(f"{where}: {name}.latency_ns", rate.latency_ns, 0, 10**9)
            within(f"{where}: {name}.gb_per_s", rate.gb_per_s, 0.001, 1e6)
        for name in ("compute_beside_gather", "compute_beside_exchange"):
            within(f"{where}: {name}", getattr(self, name), 0.01, 1)
        for name in ("gather_wait", "exchange_wait"):
            within(f"{where}: {name}", getattr(self, name), 0, 1e6)
        for name, value in self.spread.items():
            refuse_unknown(f"{where}: spread", name, MEASURED)
            within(f"{where}: spread.{name}", value, 0, 1e6)

    def copy_gb_per_s(self, lane: str, *, both: bool) -> float:
        """Returns the GB/s of the copies of `lane`, `h2d` or `d2h`, with one or both directions
        busy.
        """
        rate: float = getattr(self, f"{lane}_both_gb_per_s" if both else f"{lane}_gb_per_s")
        return rate

    def wait(self, kind: str) -> float:
        """Returns the wait of each kernel of a collective of `kind`, a kind of op."""
        return self.exchange_wait if kind == "exchange_gradients" else self.gather_wait

    def compute_beside(self, kind: str) -> float:
        """Returns the share of its speed that compute keeps beside a collective of `kind`."""
        exchanges = kind == "exchange_gradients"
        return self.compute_beside_exchange if exchanges else self.compute_beside_gather

    def spread_of(self, kind: str, lane: str) -> float:
        """Returns the spread of the duration of an op of `kind` on `lane` in which GPUs disturb
        each other, or 0 if it is not measured here. For gradients, it is the larger one of the
        exchange and the sum.
        """
        if lane in ("h2d", "d2h"):
            return self.spread.get(f"{lane}_gb_per_s", 0.0)
        if lane != "exchange":
            return 0.0
        if kind != "exchange_gradients":
            return self.spread.get("gather", 0.0)
        return max(self.spread.get(name, 0.0) for name in ("exchange", "sum_gb_per_s"))


def check_measured_counts(where: str, measured: tuple[SeveralGpus, ...]) -> None:
    """Raises UserError unless the numbers of GPUs of `measured` are ascending."""
    counts = [each.gpus for each in measured]
    if counts != sorted(set(counts)):
        raise UserError(
            where,
            found=f"measurements of {', '.join(map(str, counts))} GPUs",
            allowed="one for each number of GPUs, in ascending order",
            fix=CALIBRATE_AGAIN,
        )


def nearest(measured: tuple[SeveralGpus, ...], gpus: int) -> SeveralGpus | None:
    """Returns the measurement of the number of GPUs that is nearest to `gpus`, the larger of two
    that are equally near. None if `gpus` is 1, or if there is no measurement.
    """
    if gpus == 1:
        return None
    return min(measured, key=lambda each: (abs(each.gpus - gpus), -each.gpus), default=None)
