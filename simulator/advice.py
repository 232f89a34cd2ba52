"""Advice: what the user could change so that the model fits or runs faster, each change tried.

Where it does not fit, every change is tried on the least memory of each policy (`capacity.py`); what makes it fit comes first. Where it fits, a
change is tried on the chosen plan, with whole layers as copies in the engine: the ratio of two such times is taken as the ratio of the steps.
A search after the change may choose other knobs and gain more; so a gain is `about`. Nothing is said that was not tried, and what the runtime
cannot do yet is marked `would`.
"""

from __future__ import annotations

import msgspec

from megatrain.simulator import policies as policy_library
from megatrain.simulator.assessment import Choice, varied
from megatrain.simulator.capacity import Footprint, frugal, largest_batch, longest_context
from megatrain.simulator.costs import CostModel, cost_model
from megatrain.simulator.costs.changed import Changed
from megatrain.simulator.engine import makespan_ns
from megatrain.simulator.hardware import HardwareSpec
from megatrain.simulator.memory import Account
from megatrain.simulator.metrics import tokens_per_second
from megatrain.simulator.plan import Plan
from megatrain.simulator.schedule import Op
from megatrain.simulator.slot_search import ONE_COPY
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


class Adviser:
    """Tries changes around one choice."""

    def __init__(self, choice: Choice, hardware: HardwareSpec, costs: CostModel, names: list[str], footprints: list[Footprint]) -> None:
        self.choice, self.hardware, self.costs, self.names, self.footprints = choice, hardware, costs, names, footprints
        self.plan, self.work = choice.plan, choice.plan.workload
        self.speed = tokens_per_second(self.work, choice.step_seconds)
        self._times: dict[object, int] = {}

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
        smaller = [self._changed("loss-chunk", chunk, self.footprints, msgspec.structs.replace(work, loss_chunk=chunk)) for chunk in chunks]
        found += [entry for entry in smaller if entry.fits][:1] or smaller[-1:]
        if batch := largest_batch(self.footprints, work):
            found.append(self._changed("batch", batch, self.footprints, msgspec.structs.replace(work, batch=batch)))
        elif context := longest_context(self.footprints, work):
            short = msgspec.structs.replace(work, batch=1, sequence=context)
            found.append(self._changed("seq", context, self.footprints, short, "batch", 1))
        if work.clipping == "global":
            free = msgspec.structs.replace(work, clipping="none")
            plan = msgspec.structs.replace(self.plan, workload=free)
            found.append(self._changed("clipping", "none", frugal(plan, self.costs, self.names), free))
        return found + self._more_memory() + self._smaller_moments()

    def _changed(self, option: str, value: object, footprints: list[Footprint], work: Workload, second: str = "", other: object = "") -> Suggestion:
        account = min((footprint.account(work) for footprint in footprints), key=_excess)
        options = {option: str(value)} | ({second: str(other)} if second else {})
        return Suggestion(
            change=" ".join(f"--{name} {text}" for name, text in options.items()), options=options, fits=account.fits,
            bytes_missing=account.excess_bytes, bytes_saved=self._total - _total(account),
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
        text = " ".join(f"--{name} {value}" for name, value in options.items())
        return Suggestion(change=f"{text}, {format_bytes(more)} more", options=options, fits=True)

    def _smaller_moments(self) -> list[Suggestion]:
        best = min((footprint.account() for footprint in self.footprints), key=lambda account: _with_half_moments(account).excess_bytes)
        half = _with_half_moments(best)
        saved = _total(best) - _total(half)
        return [Suggestion(change="moments in bf16", would=True, fits=half.fits, bytes_missing=half.excess_bytes, bytes_saved=saved)]

    # What would make it faster

    def _faster(self) -> list[Suggestion]:
        work, found = self.work, list[Suggestion | None]()
        found.append(self._timed({"batch": 2 * work.batch}, msgspec.structs.replace(work, batch=2 * work.batch)) if work.batch < 2**20 else None)
        if work.accumulation <= 512:
            found.append(self._timed({"accumulation": 2 * work.accumulation}, msgspec.structs.replace(work, accumulation=2 * work.accumulation)))
        if work.clipping == "global":
            found.append(self._timed({"clipping": "none"}, msgspec.structs.replace(work, clipping="none")))
        found += [self._resident(), self._fast_moments()]
        return [entry for entry in found if entry is not None]

    def _time(self, plan: Plan, costs: CostModel | None = None, key: object = "") -> int:
        """Nanoseconds of a step with whole layers as copies. More than two micro-batches by what the second adds to the first."""
        count = plan.workload.accumulation
        if count > 2:
            one, two = (self._time(_accumulating(plan, some), costs, key) for some in (1, 2))
            return two + (count - 2) * (two - one)
        plan = varied(plan, chunk_bytes=ONE_COPY)
        known = (plan.policy, plan.workload, plan.knobs, key)
        if known not in self._times:
            if costs is None:
                costs = self.costs if plan.workload == self.work else cost_model(self.hardware, plan.model, plan.workload)
            self._times[known] = makespan_ns(policy_library.lower(plan), costs)
        return self._times[known]

    def _timed(self, options: dict[str, object], work: Workload) -> Suggestion | None:
        """The chosen plan with another workload, or where it does not fit so, its policy at its most frugal."""
        plan = msgspec.structs.replace(self.plan, workload=work)
        if work.accumulation > 1 and not plan.knobs.gradient_slabs:
            plan = varied(plan, gradient_slabs=2)  # what is summed on the host goes through one
        account = Footprint(_accumulating(plan, min(work.accumulation, 2)), self.costs).account()
        if not account.fits:
            fitting = [(footprint, footprint.account(work)) for footprint in self.footprints if footprint.plan.policy == self.plan.policy]
            footprint, account = next(((footprint, account) for footprint, account in fitting if account.fits), (None, account))
            if footprint is None or work.clipping != self.work.clipping or min(work.accumulation, 2) != min(self.work.accumulation, 2):
                return None
            plan = msgspec.structs.replace(footprint.plan, workload=work)
        gain = self._time(self.plan) / self._time(plan) * work.step_tokens / self.work.step_tokens - 1
        texts = {name: str(value) for name, value in options.items()}
        return self._gained(" ".join(f"--{name} {text}" for name, text in texts.items()), texts, gain, _total(self.choice.account) - _total(account))

    def _gained(self, change: str, options: dict[str, str], gain: float, saved: int, *, would: bool = False) -> Suggestion:
        return Suggestion(change=change, options=options, would=would, fits=True, bytes_saved=saved, tokens_per_second=self.speed * (1 + gain), gain=gain)

    def _resident(self) -> Suggestion | None:
        """Device memory enough for nothing to stream: the most that device memory can give."""
        if self.plan.policy == "resident" or "resident" not in self.names:
            return None
        plan = msgspec.structs.replace(self.plan, policy="resident", knobs=type(self.plan.knobs)())
        account = Footprint(_accumulating(plan, min(self.work.accumulation, 2)), self.costs).account()
        if account.device_peak_bytes > _MOST_DEVICE * account.device_limit_bytes:
            return None
        options = {"device-memory": _gib(account.device_peak_bytes)}
        gain = self._time(self.plan) / self._time(plan) - 1
        return self._gained(f"--device-memory {options['device-memory']}, and nothing streams", options, gain, _total(self.choice.account) - _total(account))

    def _fast_moments(self) -> Suggestion | None:
        """Half of the moments' bytes to move and to keep."""

        def change(op: Op) -> Op:
            moved = op.kind in ("load_state", "save_state") and op.parameters and op.bytes >= _MOMENTS * op.parameters
            return msgspec.structs.replace(op, bytes=op.bytes - op.parameters * _MOMENTS // 2) if moved else op

        half = _with_half_moments(self.choice.account)
        gain = self._time(self.plan) / self._time(self.plan, Changed(self.costs, change), "moments") - 1
        return self._gained("moments in bf16", {}, gain, _total(self.choice.account) - _total(half), would=True)


def _accumulating(plan: Plan, count: int) -> Plan:
    return msgspec.structs.replace(plan, workload=msgspec.structs.replace(plan.workload, accumulation=count))


def _total(account: Account) -> int:
    return account.device_peak_bytes + account.host_peak_bytes


def _excess(account: Account) -> tuple[int, int]:
    return account.excess_bytes, _total(account)


def _gib(size: int) -> str:
    """At least `size`, as an option's value."""
    return f"{-(-size // _GIB)}GiB"


def _with_half_moments(account: Account) -> Account:
    pools = {pool: size // 2 if pool.endswith((".moments", ".moments_chunks")) else size for pool, size in account.pools.items()}
    return msgspec.structs.replace(account, pools=pools)
