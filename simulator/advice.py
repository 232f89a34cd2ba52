"""Advice: what the user could change so that the model fits or runs faster, each change tried.

Where it does not fit, every change is tried on the least memory of each policy (`capacity.py`), with which a search begins that finds nothing else; what
makes it fit comes first. Where it fits, the whole search is done again with the change, so the gain is the one that the user finds. Nothing is said
that was not tried. What the runtime cannot do yet is marked `would`; it is tried on the chosen plan, so a search would find as much or more.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from megatrain.simulator import policies as policy_library
from megatrain.simulator.assessment import Choice
from megatrain.simulator.capacity import Footprint, largest_batch, longest_context, usable
from megatrain.simulator.costs import CostModel, cost_model
from megatrain.simulator.costs.changed import Changed
from megatrain.simulator.engine import makespan_ns
from megatrain.simulator.hardware import HardwareSpec
from megatrain.simulator.memory import Account
from megatrain.simulator.metrics import tokens_per_second
from megatrain.simulator.placing import PlacementSearch
from megatrain.simulator.schedule import Op
from megatrain.simulator.units import format_bytes
from megatrain.simulator.workload import Workload

_GIB = 2**30
_PLENTY = 2**59
_LEAST_GAIN = 0.01
_MOMENTS = 8  # bytes a parameter, fp32; half of them in bf16
_MOST_DEVICE = 4  # times the device memory that there is
_LOSS_CHUNKS = (512, 256, 128)


class Suggestion(msgspec.Struct, frozen=True, kw_only=True):
    """One changed input and what it does."""

    change: str
    """as an option of `megatrain check`, or in words where there is none"""
    options: dict[str, str] = {}
    """option without dashes -> its new value; empty where the command cannot do it"""
    would: bool = False
    """the runtime cannot do this yet"""
    fits: bool
    bytes_missing: int = 0
    """that remain above the limits"""
    bytes_saved: int = 0
    """of device and host memory, against the plan as it stands; less than 0 where it takes more"""
    tokens_per_second: float | None = None
    """about; None where no time was tried"""
    gain: float | None = None
    """of tokens/s, about: 0.1 is 10 % more"""


class Search(Protocol):
    """The planner's search for one model, machine and set of policies."""

    def __call__(self, work: Workload, device_limit: int, host_limit: int) -> Choice:
        """The best plan."""


class Adviser:
    """Tries changes around one choice."""

    def __init__(self, choice: Choice, hardware: HardwareSpec, costs: CostModel, names: list[str], search: Search) -> None:
        self.choice, self.hardware, self.costs, self.names, self.search = choice, hardware, costs, names, search
        self.plan, self.work = choice.plan, choice.plan.workload
        self.speed = tokens_per_second(self.work, choice.step_seconds)
        self.footprints = self._least(self.work)

    def _least(self, work: Workload, **limits: int) -> list[Footprint]:
        """The least memory of each policy for another workload or other limits."""
        plan = msgspec.structs.replace(self.plan, workload=work, **limits)
        costs = self.costs if work == self.work else cost_model(self.hardware, plan.model, work)
        return usable(plan, self.hardware, costs, self.names)

    def suggestions(self, most: int = 5) -> tuple[Suggestion, ...]:
        """The best first, at most so many."""
        if self.choice.feasible:
            faster = [entry for entry in self._faster() if (entry.gain or 0) >= _LEAST_GAIN]
            return tuple(sorted(faster, key=lambda entry: (entry.would, -(entry.gain or 0))))[:most]
        tried = [entry for entry in self._fitting() if entry.fits or entry.bytes_saved > 0]
        return tuple(sorted(tried, key=lambda entry: (not entry.fits, entry.would, entry.bytes_missing)))[:most]

    # What would make it fit

    def _fitting(self) -> list[Suggestion]:
        work, found = self.work, list[Suggestion]()
        chunks = [chunk for chunk in _LOSS_CHUNKS if chunk < min(work.loss_chunk, work.tokens)]
        smaller = [self._changed({"loss-chunk": chunk}, msgspec.structs.replace(work, loss_chunk=chunk)) for chunk in chunks]
        found += [entry for entry in smaller if entry.fits][:1] or smaller[-1:]
        if batch := largest_batch(self.footprints, work):
            found.append(self._changed({"batch": batch}, msgspec.structs.replace(work, batch=batch)))
        elif context := longest_context(self.footprints, work):
            short = msgspec.structs.replace(work, batch=1, sequence=context)
            found.append(self._changed({"seq": context, "batch": 1}, short))
        if work.clipping == "global":
            found.append(self._changed({"clipping": "none"}, msgspec.structs.replace(work, clipping="none")))
        return found + self._more_memory() + self._smaller_moments()

    def _changed(self, values: dict[str, object], work: Workload) -> Suggestion:
        account = min((footprint.account() for footprint in self._least(work)), key=_excess)
        options = {name: str(value) for name, value in values.items()}
        return Suggestion(
            change=_written(options), options=options, fits=account.fits, bytes_missing=account.excess_bytes, bytes_saved=self._total - _total(account)
        )  # fmt: skip

    @property
    def _total(self) -> int:
        return _total(min((footprint.account() for footprint in self.footprints), key=_excess))

    def _more_memory(self) -> list[Suggestion]:
        """The least more host memory, or device memory, or of both, with which one of the policies fits."""
        accounts, found = [footprint.account() for footprint in self.footprints], list[Suggestion]()
        roomy = [footprint.account(host_limit=_PLENTY) for footprint in self.footprints]
        device_fits = [footprint for footprint, account in zip(self.footprints, roomy, strict=True) if account.device_peak_bytes <= account.device_limit_bytes]
        host_fits = [account for account in accounts if account.host_peak_bytes <= account.host_limit_bytes]
        if device_fits:
            found.append(self._memory({"host": min(self._least_host(footprint) for footprint in device_fits)}))
        elif batch := largest_batch(self.footprints, self.work, _PLENTY):
            work = msgspec.structs.replace(self.work, batch=batch)
            able = [footprint for footprint in self.footprints if footprint.account(work, host_limit=_PLENTY).fits]
            least = min(self._least_host(footprint, work) for footprint in able)
            found += [self._memory({"host": least}, {"batch": str(batch)})] if least > self.plan.host_limit_bytes else []
        if host_fits:
            found.append(self._memory({"device": min(account.device_peak_bytes for account in host_fits)}))
        if not device_fits and not host_fits:
            nearest = min(accounts, key=_excess)
            found.append(self._memory({"device": nearest.device_peak_bytes, "host": nearest.host_peak_bytes}))
        return found

    def _least_host(self, footprint: Footprint, work: Workload | None = None) -> int:
        """Host memory with which the footprint fits, the device holding what state it can; in whole GiB."""
        enough = -(-footprint.account(work, host_limit=_PLENTY).host_peak_bytes // _GIB)
        short = 0
        while enough - short > 1:
            middle = (enough + short) // 2
            short, enough = (short, middle) if footprint.account(work, host_limit=middle * _GIB).fits else (middle, enough)
        return enough * _GIB

    def _memory(self, needs: dict[str, int], besides: dict[str, str] | None = None) -> Suggestion:
        """`needs`: place -> bytes; `besides`: other options."""
        limits = {"device": self.plan.device_limit_bytes, "host": self.plan.host_limit_bytes}
        if self.hardware.unified:  # one memory, which both options limit
            needs = dict.fromkeys(limits, sum(needs.values()))
        options = (besides or {}) | {f"{place}-memory": _gib(size) for place, size in needs.items()}
        more = sum(max(size - limits[place], 0) for place, size in needs.items()) // (2 if self.hardware.unified else 1)
        return Suggestion(change=f"{_written(options)}, {format_bytes(more)} more", options=options, fits=True)

    def _smaller_moments(self) -> list[Suggestion]:
        best = min((footprint.account() for footprint in self.footprints), key=lambda account: _with_half_moments(account).excess_bytes)
        half = _with_half_moments(best)
        saved = _total(best) - _total(half)
        return [Suggestion(change="moments in bf16", would=True, fits=half.fits, bytes_missing=half.excess_bytes, bytes_saved=saved)]

    # What would make it faster

    def _faster(self) -> list[Suggestion]:
        work, changes = self.work, dict[str, object]()
        if work.batch < 2**20:
            changes["batch"] = 2 * work.batch
        if work.accumulation <= 512:
            changes["accumulation"] = 2 * work.accumulation
        if work.clipping == "global":
            changes["clipping"] = "none"
        found = [self._searched({name: str(value)}, msgspec.structs.replace(work, **{name: value})) for name, value in changes.items()]
        return [entry for entry in [*found, self._resident(), self._fast_moments()] if entry is not None]

    def _searched(self, options: dict[str, str], work: Workload, **limits: int) -> Suggestion | None:
        """What the search finds with another workload or another limit; None where that does not fit."""
        held = {"device_limit": self.plan.device_limit_bytes, "host_limit": self.plan.host_limit_bytes} | limits
        least = self._least_seconds(work, held["device_limit"], held["host_limit"])
        if least and tokens_per_second(work, least) < (1 + _LEAST_GAIN) * self.speed:
            return None
        found = self.search(work, **held)
        if not found.feasible:
            return None
        streams = not {"h2d", "d2h"}.isdisjoint(found.bounds.lanes_ns)
        note = ", and nothing streams" if limits and not streams else ""
        gain = tokens_per_second(work, found.step_seconds) / self.speed - 1
        return self._gained(_written(options) + note, options, gain, _total(self.choice.account) - _total(found.account))

    def _least_seconds(self, work: Workload, device_limit: int, host_limit: int) -> float:
        """No plan of the choice's policy takes less; 0 where that is not known."""
        if not policy_library.places(self.plan.policy):
            return 0.0
        plan = msgspec.structs.replace(self.plan, workload=work, device_limit_bytes=device_limit, host_limit_bytes=host_limit)
        return PlacementSearch(plan, cost_model(self.hardware, plan.model, work)).least_ns() / 1e9

    def _gained(self, change: str, options: dict[str, str], gain: float, saved: int, *, would: bool = False) -> Suggestion:
        return Suggestion(change=change, options=options, would=would, fits=True, bytes_saved=saved, tokens_per_second=self.speed * (1 + gain), gain=gain)

    def _resident(self) -> Suggestion | None:
        """Device memory enough for nothing to stream: the most that device memory can give."""
        if {"h2d", "d2h"}.isdisjoint(self.choice.bounds.lanes_ns) or "resident" not in self.names:
            return None
        few = msgspec.structs.replace(self.work, accumulation=min(self.work.accumulation, 2))
        plan = msgspec.structs.replace(self.plan, policy="resident", knobs=type(self.plan.knobs)(), workload=few)
        size = Footprint(plan, self.costs).account().device_peak_bytes
        if not self.plan.device_limit_bytes < size <= _MOST_DEVICE * self.plan.device_limit_bytes:  # what fits already would not be chosen with less
            return None
        return self._searched({"device-memory": _gib(size)}, self.work, device_limit=-(-size // _GIB) * _GIB)

    def _fast_moments(self) -> Suggestion:
        """Half of the moments' bytes to move and to keep."""

        def change(op: Op) -> Op:
            moved = op.kind in ("load_state", "save_state") and op.parameters and op.bytes >= _MOMENTS * op.parameters
            return msgspec.structs.replace(op, bytes=op.bytes - op.parameters * _MOMENTS // 2) if moved else op

        schedule = policy_library.lower(self.plan)
        streams = any(op.kind in ("load_state", "save_state") for op in schedule.ops)
        gain = makespan_ns(schedule, self.costs) / makespan_ns(schedule, Changed(self.costs, change)) - 1 if streams else 0.0
        half = _with_half_moments(self.choice.account)
        return self._gained("moments in bf16", {}, gain, _total(self.choice.account) - _total(half), would=True)


def _written(options: dict[str, str]) -> str:
    return " ".join(f"--{name} {value}" for name, value in options.items())


def _total(account: Account) -> int:
    return account.device_peak_bytes + account.host_peak_bytes


def _excess(account: Account) -> tuple[int, int]:
    return account.excess_bytes, _total(account)


def _gib(size: int) -> str:
    """At least `size`, as an option's value."""
    return f"{-(-size // _GIB)}GiB"


def _with_half_moments(account: Account) -> Account:
    moments = {pool for pool, kind in account.kinds.items() if kind.data == "moments"}
    pools = {pool: size // 2 if pool in moments else size for pool, size in account.pools.items()}
    return msgspec.structs.replace(account, pools=pools)
