"""Suggests changes with which the model would fit or run faster. Every suggestion has been tried.

If the model does not fit, each change is tried on the plans that need the least memory
(`capacity.py`), because the planner uses one of these if no other plan fits. Changes that make the
model fit come first, with the speed that a search finds for them. More memory than the machine has
is suggested for the host only. A GPU's memory cannot be enlarged, so other machines and smaller
models of the library are suggested instead (`alternatives.py`).

If the model fits, the whole search is repeated with each change, so the gain is what the user will
see. Changes that gain less than 2 % are left out. A change is not searched if bounds show that it
gains too little. The loss chunk is not changed, even if the planner chose it. Other state formats
are tried on the chosen plan without a search, so a search might gain more. They come after all
other changes, because training with them is not exact AdamW.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Protocol

import msgspec

from megatrain.simulator import policies as policy_library
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.units import exact_size, format_bytes, rounded_up
from megatrain.simulator.costs import CostModel, cost_model
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.memory.account import Account
from megatrain.simulator.model.attention_kernel import is_optional, optional, package
from megatrain.simulator.model.metrics import tokens_per_second
from megatrain.simulator.model.optimizer import ADAMW, WITH_STATE_FORMATS
from megatrain.simulator.model.state_format import FORMATS, smaller_formats
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.assessment import (
    Choice,
    Estimate,
    estimate,
    first_knobs,
    group_sizes,
    with_knobs,
)
from megatrain.simulator.planner.attention_kernel import kernel_gain
from megatrain.simulator.planner.capacity import (
    MemoryFootprint,
    largest_batch,
    longest_context,
    usable,
)
from megatrain.simulator.planner.placement_search import PlacementSearch
from megatrain.simulator.verdict.alternatives import alternatives
from megatrain.simulator.verdict.suggestion import Suggestion, as_options

_GIB = 2**30
_OR_FASTER = "or faster: the plan that needs the least memory"
"""Note on the speed with the least host memory, which no search has improved."""
_PLENTY = 2**59  # more bytes of host memory than any plan needs
_LEAST_GAIN = 0.02  # suggestions that gain less are left out
# A search is skipped if the plans from which it begins gain too little by their lower bounds, even
# if the search improves them by this much.
_IMPROVED = 0.01
# A package is suggested only if decoder layers compute faster by this factor with its kernel.
_LEAST_LAYERS_GAIN = 1.05
_LOSS_CHUNKS = (512, 256, 128)
_A_LITTLE_MORE = (1.0, 1.03, 1.1)
"""Factors on the host memory that the fastest plan needs. They are tried in order, until a search
with this memory finds a plan that is nearly as fast."""
_NEARLY = 1.005  # a step that is longer by at most this factor counts as nearly as fast


class Search(Protocol):
    """The planner's search for one model, machine and set of policies."""

    def __call__(
        self, work: Workload, device_limit: int, host_limit: int, most_seconds: float = math.inf
    ) -> Estimate | None:
        """Returns the best plan for a workload and limits in bytes, or None if none fits.

        If every plan takes `most_seconds` per step or longer, the result may be None or any plan.
        """


class Adviser:
    """Tries changes of the workload and the memory limits of one choice.

    `names` are the policies that may be used, `search` repeats the planner's search, and
    `footprints` are the plans that need the least memory, at least one. `kernel_chosen` says
    whether the planner chooses the attention kernel.
    """

    def __init__(
        self,
        choice: Choice,
        hardware: HardwareSpec,
        costs: CostModel,
        names: list[str],
        search: Search,
        footprints: list[MemoryFootprint],
        *,
        kernel_chosen: bool = False,
    ) -> None:
        self.choice, self.hardware, self.costs, self.names, self.search, self.footprints = (
            choice,
            hardware,
            costs,
            policy_library.updating(names, choice.plan.workload),
            search,
            footprints,
        )
        self.plan, self.work = choice.plan, choice.plan.workload
        self.kernel_chosen = kernel_chosen
        self.speed = tokens_per_second(self.work, choice.step_seconds)
        has_formats = (
            not policy_library.find(self.plan.policy).prediction_only
            and self.work.dtype == "bf16"
            and self.work.optimizer in WITH_STATE_FORMATS
        )
        self._formats = smaller_formats(self.work.state) if has_formats else ()
        """The smaller state formats that the plan could use, the largest first."""

    def _least(self, work: Workload, **limits: int) -> list[MemoryFootprint]:
        """Returns the plans that need the least memory for another workload or other limits."""
        plan = msgspec.structs.replace(self.plan, workload=work, **limits)
        costs = self.costs if work == self.work else cost_model(self.hardware, plan.model, work)
        return list(usable(plan, self.hardware, costs, self.names))

    def suggestions(self) -> tuple[Suggestion, ...]:
        """Returns the suggestions, the best first. At most five keep the state format. Those that
        change it come last.
        """
        if self.choice.feasible:
            tried = [*self._faster(), *map(self._in_format, self._formats)]
            faster = [entry for entry in tried if entry and (entry.gain or 0) >= _LEAST_GAIN]
            faster.sort(key=lambda entry: -(entry.gain or 0))
            return _formats_last(faster)
        changes = [*self._fitting(), *self._fitting_format()]
        useful = [entry for entry in changes if entry.fits or entry.bytes_saved > 0]
        useful.sort(key=lambda entry: (not entry.fits, entry.bytes_missing))
        ordered = _formats_last(useful)
        fitting = [entry for entry in ordered if entry.fits and not entry.compressed]
        enlarged = any("memory" in name for entry in fitting for name in entry.options)
        others = alternatives(
            self.plan, self.hardware, machines=not enlarged, choose_kernel=self.kernel_chosen
        )
        rest = [entry for entry in ordered if entry not in fitting]
        return (*fitting, *others, *sorted(rest, key=lambda entry: not entry.fits))

    # Changes that make the model fit

    def _fitting(self) -> list[Suggestion]:
        """Returns the changes to suggest if the model does not fit, except state formats.

        A change may save memory but not be enough.
        """
        work, suggestions = self.work, list[Suggestion]()
        chunks = [chunk for chunk in _LOSS_CHUNKS if chunk < min(work.loss_chunk, work.tokens)]
        smaller = [
            entry
            for chunk in chunks
            for entry in self._changed(
                {"loss-chunk": chunk}, msgspec.structs.replace(work, loss_chunk=chunk)
            )
        ]
        suggestions += [entry for entry in smaller if entry.fits][:1] or smaller[-1:]
        if batch := largest_batch(self.footprints, work):
            suggestions += self._changed(
                {"batch": batch}, msgspec.structs.replace(work, batch=batch)
            )
        elif context := longest_context(self.footprints, work):
            short = msgspec.structs.replace(work, batch=1, sequence=context)
            suggestions += self._changed({"seq": context, "batch": 1}, short)
        if work.clipping == "global":
            values: dict[str, object] = {"clipping": "adagc"}
            if work.gradients != "exact":
                values["gradients"] = "exact"
            suggestions += self._changed(values, msgspec.structs.replace(work, **values))
            if self._can_code_gradients():
                coded = msgspec.structs.replace(work, gradients="8bit")
                suggestions += self._changed({"gradients": "8bit"}, coded)
        return suggestions + self._more_memory()

    def _can_code_gradients(self) -> bool:
        """Returns whether the gradients that the plan stores could be stored in 8 bits instead."""
        work = self.work
        if self.hardware.unified or self.plan.model.tied:
            return False
        return (work.gradients, work.accumulation, work.optimizer) == ("exact", 1, ADAMW) and any(
            policy_library.find(name).places_state for name in self.names
        )

    def _changed(self, values: dict[str, object], work: Workload) -> list[Suggestion]:
        """Returns the suggestion to use the workload `work`, with its effect on memory. Returns
        nothing if the policies refuse this workload.

        `values` are the changed options and their new values.
        """
        least = self._least(work)
        if not least:
            return []
        account = min((footprint.account() for footprint in least), key=_excess)
        options = {name: str(value) for name, value in values.items()}
        return [
            Suggestion(
                change=as_options(options),
                options=options,
                fits=account.fits,
                bytes_missing=account.excess_bytes,
                bytes_saved=self._total - _total(account),
                tokens_per_second=self._speed(work, least) if account.fits else None,
                note=_note(options, work),
            )
        ]

    def _speed(self, work: Workload, least: list[MemoryFootprint], **limits: int) -> float | None:
        """Returns the tokens per second that a search finds with another workload or other limits.

        If the search finds no plan that fits, the speed of the first of `least` that fits is
        returned. `least` are footprints for the same workload and limits. Returns None if none of
        them fits.
        """
        try:
            best = self.search(work, **self._limits | limits)
        except UserError:  # the policy refuses the workload with every other knob
            best = None
        if best is None:
            fitting = next((footprint for footprint in least if footprint.account().fits), None)
            if fitting is None:
                return None
            best = estimate(fitting.placed(), fitting.costs)
        return tokens_per_second(work, best.step_seconds)

    @property
    def _limits(self) -> dict[str, int]:
        """The memory limits of the plan in bytes, as arguments of the search."""
        return {
            "device_limit": self.plan.device_limit_bytes,
            "host_limit": self.plan.host_limit_bytes,
        }

    @functools.cached_property
    def _total(self) -> int:
        """Bytes, on device and host together, of the plan that comes nearest to fitting."""
        return _total(min((footprint.account() for footprint in self.footprints), key=_excess))

    def _more_memory(self) -> list[Suggestion]:
        """Returns suggestions to add just enough memory for one of the plans to fit.

        1. If more host memory is enough: the least with which a plan fits, and the least with which
           the step is fastest. If it is not enough at this batch: the largest batch that fits with
           enough host memory, and the host memory that it needs.
        2. If more device memory is enough: the least with which a plan fits.
        3. If only more of both is enough: the device and host memory of the nearest plan.

        The suggested device memory is never more than the machine has.
        """
        accounts = [footprint.account() for footprint in self.footprints]
        suggestions: list[Suggestion] = []
        device_fits = [
            footprint
            for footprint in self.footprints
            if (account := footprint.account(host_limit=_PLENTY)).device_peak_bytes
            <= account.device_limit_bytes
        ]
        host_fits = [
            account for account in accounts if account.host_peak_bytes <= account.host_limit_bytes
        ]
        if device_fits:
            least, index = min(
                (self._least_host(footprint), index) for index, footprint in enumerate(device_fits)
            )
            # With so little memory a search finds this plan or a slightly faster one, such as one
            # with a smaller loss chunk, but takes seconds.
            plan = msgspec.structs.replace(device_fits[index].plan, host_limit_bytes=least)
            choice = estimate(MemoryFootprint(plan, self.costs).placed(), self.costs)
            suggestions += [
                msgspec.structs.replace(entry, note=_OR_FASTER)
                for entry in self._memory({"host": least}, choice=choice)
            ]
            suggestions += self._most_useful_host(least)
        elif batch := largest_batch(self.footprints, self.work, host_limit=_PLENTY):
            work = msgspec.structs.replace(self.work, batch=batch)
            least = min(
                self._least_host(footprint, work)
                for footprint in self.footprints
                if footprint.account(work, host_limit=_PLENTY).fits
            )
            if least > self.plan.host_limit_bytes:
                suggestions += self._memory({"host": least}, {"batch": str(batch)})
        if host_fits:
            suggestions += self._memory(
                {"device": min(account.device_peak_bytes for account in host_fits)}
            )
        if not device_fits and not host_fits:
            nearest = min(accounts, key=_excess)
            suggestions += self._memory(
                {"device": nearest.device_peak_bytes, "host": nearest.host_peak_bytes}
            )
        return suggestions

    def _most_useful_host(self, least: int) -> list[Suggestion]:
        """Returns the suggestion to have as much host memory as the fastest plan needs.

        Returns nothing if that is at most `least`, the least host memory with which a plan fits.
        """
        if self.hardware.unified:
            return []
        fastest = self.search(self.work, **self._limits | {"host_limit": _PLENTY})
        if fastest is None or rounded_up(needed := fastest.account.host_peak_bytes) <= least:
            return []
        # With just enough memory, a search may end at a slower plan.
        for more in _A_LITTLE_MORE:
            size = rounded_up(round(more * needed))
            found = self.search(self.work, **self._limits | {"host_limit": size})
            if found and found.step_seconds <= _NEARLY * fastest.step_seconds:
                note = "more host memory gains nothing at this micro-batch"
                return [
                    msgspec.structs.replace(entry, note=note)
                    for entry in self._memory({"host": size}, choice=found)
                ]
        return []

    def _least_host(self, footprint: MemoryFootprint, work: Workload | None = None) -> int:
        """Returns the least host memory with which the footprint fits, in bytes.

        It is a whole number of GiB, or of MiB if it is below 8 GiB. State moves to the device as
        far as there is room.
        """
        most = rounded_up(footprint.account(work, host_limit=_PLENTY).host_peak_bytes)
        unit = _GIB if most >= 8 * _GIB else 2**20
        short, enough = 0, most // unit
        while enough - short > 1:
            middle = (enough + short) // 2
            short, enough = (
                (short, middle)
                if footprint.account(work, host_limit=middle * unit).fits
                else (middle, enough)
            )
        return enough * unit

    def _memory(
        self,
        needs: dict[str, int],
        others: dict[str, str] | None = None,
        choice: Estimate | None = None,
    ) -> list[Suggestion]:
        """Returns the suggestion to have more memory.

        Returns nothing if that is more device memory than the machine has.

        Args:
            needs: `device` or `host` -> bytes of memory needed.
            others: Further options that the suggestion changes.
            choice: The plan with that memory. None searches for it.
        """
        limits = {"device": self.plan.device_limit_bytes, "host": self.plan.host_limit_bytes}
        if self.hardware.unified:  # both options limit the same memory
            needs = dict.fromkeys(limits, sum(needs.values()))
        needs = {place: rounded_up(size) for place, size in needs.items()}
        if needs.get("device", 0) > self.hardware.device_bytes:
            return []
        options = (others or {}) | {
            f"{place}-memory": exact_size(size) for place, size in needs.items()
        }
        more = sum(max(size - limits[place], 0) for place, size in needs.items()) // (
            2 if self.hardware.unified else 1
        )
        work = msgspec.structs.replace(
            self.work, batch=int(options.get("batch", str(self.work.batch)))
        )
        if choice:
            speed: float | None = tokens_per_second(work, choice.step_seconds)
        else:
            least = self._least(
                work, **{f"{place}_limit_bytes": size for place, size in needs.items()}
            )
            speed = self._speed(
                work, least, **{f"{place}_limit": size for place, size in needs.items()}
            )
        return [
            Suggestion(
                change=f"{as_options(options)}, {format_bytes(more)} more",
                options=options,
                fits=True,
                tokens_per_second=speed,
                note=_note(others or {}, work),
            )
        ]

    def _fitting_format(self) -> list[Suggestion]:
        """Returns the suggestion to use the largest state format with which the model fits. If it
        fits with none, the smallest format is returned.
        """
        found = list[Suggestion]()
        for state in self._formats:
            work = msgspec.structs.replace(self.work, state=state)
            found = self._changed({"state": state}, work) or found
            if found and found[0].fits:
                break
        return [msgspec.structs.replace(entry, compressed=True) for entry in found]

    # Changes that make the model run faster

    def _faster(self) -> list[Suggestion]:
        """Returns the changes to suggest if the model fits, except state formats. Their gains may
        be small or negative.
        """
        work, changes = self.work, dict[str, object]()
        if work.gradients == "exact" and work.clipping == "global":
            changes["clipping"] = "none"
        if work.gradients != "exact":
            changes["gradients"] = "exact"
        searched = [
            self._searched({name: str(value)}, msgspec.structs.replace(work, **{name: value}))
            for name, value in changes.items()
        ]
        if work.fp8:
            searched.append(
                self._searched({"dtype": "bf16"}, msgspec.structs.replace(work, fp8=None))
            )
        return [
            entry
            for entry in [
                self._more_tokens(),
                *searched,
                self._compiled(),
                self._other_kernel(),
                self._resident(),
            ]
            if entry is not None
        ]

    def _more_tokens(self) -> Suggestion | None:
        """Returns the suggestion to double the tokens of a step: by the batch, or by the
        accumulation if that is faster. Returns None if neither gains enough.
        """
        work, doubled = self.work, None
        if work.batch < 2**20:
            batch = 2 * work.batch
            doubled = self._searched(
                {"batch": str(batch)}, msgspec.structs.replace(work, batch=batch)
            )
        if work.gradients != "exact" or work.accumulation > 512:
            return doubled
        count, least = 2 * work.accumulation, doubled.gain or 0 if doubled else 0
        accumulated = self._searched(
            {"accumulation": str(count)},
            msgspec.structs.replace(work, accumulation=count),
            least_gain=max(least, _LEAST_GAIN),
        )
        if doubled and accumulated:
            return max(doubled, accumulated, key=lambda entry: entry.gain or 0)
        return doubled or accumulated

    def _compiled(self) -> Suggestion | None:
        """Returns the suggestion to compile layers.

        Returns None if they are compiled already, if no layer can be, if the policy is that of
        another system, or if the costs of compiled layers are not known: on a calibrated machine,
        which knows either eager or compiled layers, and on machines with one memory.
        """
        if (
            self.work.compiled
            or self.hardware.costs is not None
            or self.hardware.unified
            or policy_library.find(self.plan.policy).prediction_only
            or not any(layer.compilable for layer in self.plan.model.decoders)
        ):
            return None
        compiled = msgspec.structs.replace(self.work, compiled=True)
        return self._searched({"compile": ""}, compiled)

    def _other_kernel(self) -> Suggestion | None:
        """Returns the suggestion to compute attention with the kernel of an optional package.

        Returns None if the model or the machine cannot use one, if the layers gain too little for
        another package, if the policy is that of another system, or if the machine is calibrated: a
        measured time of a layer cannot be compared with one that follows from rates.
        """
        work, hardware = self.work, self.hardware
        if (
            hardware.costs is not None
            or policy_library.find(self.plan.policy).prediction_only
            or is_optional(work.attention)
        ):
            return None
        model = self.plan.model
        for kernel in optional(model, work):
            changed = msgspec.structs.replace(work, attention=kernel)
            faster, now = (kernel_gain(model, hardware, each) for each in (changed, work))
            if kernel in hardware.attention and 1 + faster >= _LEAST_LAYERS_GAIN * (1 + now):
                return self._searched({"attention": kernel}, changed)
        return None

    def _searched(
        self,
        options: dict[str, str],
        work: Workload,
        *,
        least_gain: float = _LEAST_GAIN,
        **limits: int,
    ) -> Suggestion | None:
        """Returns the suggestion to use another workload or other limits, with the gain that the
        search finds.

        Returns None if nothing fits, if the policy or the model refuses the workload, or if bounds
        of the step time show that the change gains less than `least_gain`.
        """
        new_limits = self._limits | limits
        bounds = self._bounds(work, new_limits["device_limit"], new_limits["host_limit"])
        try:
            likely_gain = least_gain - _IMPROVED
            for least, needed in zip(bounds, (least_gain, likely_gain), strict=False):
                if tokens_per_second(work, least) < (1 + needed) * self.speed:
                    return None
            # Slower steps gain so little that `suggestions` leaves them out.
            most_seconds = work.step_tokens / ((1 + 0.999 * least_gain) * self.speed)
            best = self.search(work, **new_limits, most_seconds=most_seconds)
        except UserError:
            return None
        if best is None:
            return None
        note = ", and nothing streams" if limits and not best.streams else ""
        gain = tokens_per_second(work, best.step_seconds) / self.speed - 1
        return self._gained(
            as_options(options) + note,
            options,
            gain,
            _total(self.choice.account) - _total(best.account),
            note="nothing streams then" if note else _note(options, work),
        )

    def _bounds(self, work: Workload, device_limit: int, host_limit: int) -> Iterator[float]:
        """Yields two step times of the choice's policy in seconds, for another workload and limits.

        The first is a lower bound for every plan. The second is a lower bound for the plans from
        which a search begins, and takes longer to compute. The search improves these plans, but
        seldom by more than half a percent over the bound. A time that is not known is left out.
        """
        if not policy_library.find(self.plan.policy).places_state:
            return
        plan = msgspec.structs.replace(
            self.plan, workload=work, device_limit_bytes=device_limit, host_limit_bytes=host_limit
        )
        plan = with_knobs(plan, rebuild_outputs=first_knobs(plan).rebuild_outputs)
        costs = cost_model(self.hardware, plan.model, work)
        searches = [
            PlacementSearch(with_knobs(plan, micro_batch_group=size), costs)
            for size in group_sizes(plan)
        ]
        # Single micro-batches leave the most memory for saved activations.
        yield (searches[0].least_ns() + costs.step_overhead_ns) / 1e9
        likely = [found[0] for search in searches if (found := search.likely())]
        if likely:
            yield (min(likely) + costs.step_overhead_ns) / 1e9

    def _gained(
        self,
        change: str,
        options: dict[str, str],
        gain: float,
        saved: int,
        *,
        note: str,
        compressed: bool = False,
    ) -> Suggestion:
        return Suggestion(
            change=change,
            options=options,
            compressed=compressed,
            fits=True,
            bytes_saved=saved,
            tokens_per_second=self.speed * (1 + gain),
            gain=gain,
            note=note,
        )

    def _resident(self) -> Suggestion | None:
        """Returns the suggestion to have enough device memory to stream nothing. Even more memory
        would gain nothing.

        Returns None if nothing streams already, if the machine does not have that much memory, or
        if the policy `resident` may not be used.
        """
        if not self.choice.streams or "resident" not in self.names:
            return None
        few = msgspec.structs.replace(self.work, accumulation=min(self.work.accumulation, 2))
        plan = msgspec.structs.replace(
            self.plan, policy="resident", knobs=type(self.plan.knobs)(), workload=few
        )
        size = rounded_up(MemoryFootprint(plan, self.costs).account().device_peak_bytes)
        # If this plan fits already, the search has found a faster one.
        if not self.plan.device_limit_bytes < size <= self.hardware.device_bytes:
            return None
        return self._searched({"device-memory": exact_size(size)}, self.work, device_limit=size)

    def _in_format(self, state: str) -> Suggestion | None:
        """Returns the suggestion to use another state format, with the gain of the chosen plan.

        Returns None if the plan does not fit with this format, because updates of 8-bit moments may
        need temporary tensors on the GPU.
        """
        work = msgspec.structs.replace(self.work, state=state)
        plan = msgspec.structs.replace(self.plan, workload=work)
        changed = estimate(plan, cost_model(self.hardware, plan.model, work))
        options = {"state": state}
        if not changed.feasible:
            return None
        return self._gained(
            as_options(options),
            options,
            self.choice.step_seconds / changed.step_seconds - 1,
            _total(self.choice.account) - _total(changed.account),
            compressed=True,
            note=_note(options, work),
        )


def _formats_last(suggestions: list[Suggestion], most: int = 5) -> tuple[Suggestion, ...]:
    """Returns the first `most` suggestions that keep the state format, then all that change it."""
    exact = [entry for entry in suggestions if not entry.compressed]
    return (*exact[:most], *(entry for entry in suggestions if entry.compressed))


def _total(account: Account) -> int:
    """Returns the bytes of device and host together."""
    return account.device_peak_bytes + account.host_peak_bytes


def _excess(account: Account) -> tuple[int, int]:
    """Returns a sort key: bytes above the limits, then all bytes."""
    return account.excess_bytes, _total(account)


def _note(options: dict[str, str], work: Workload) -> str:
    """Returns what the changed `options` cost the user, in words. `work` is the workload with these
    options.
    """
    if "state" in options:
        costs = FORMATS[work.state].costs
        return costs if work.optimizer == ADAMW else costs.replace("AdamW", work.optimizer)
    if options.get("clipping") == "adagc":
        return "clips each tensor by its own moving norm, not all by their common norm"
    if options.get("gradients") == "8bit":
        return "stores gradients in 8 bits, rounded at random"
    if "compile" in options:
        return "rounds differently"
    if "clipping" in options:
        return "gives up clipping"
    if "attention" in options:
        return f"needs the package {package(work.attention)}, rounds differently"
    if {"batch", "accumulation", "seq"} & options.keys():
        return f"a step has {work.step_tokens:,} tokens"
    return ""
