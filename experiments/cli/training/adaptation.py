"""Adaptation: a callback that plans again from what a training measured, and switches plans.

Every plan gives the same bits, so that a switch changes nothing but the time.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from megatrain.experiments.cli.options import hardware_of
from megatrain.experiments.cli.training.step_comparison import COMPARED_STEPS
from megatrain.experiments.cli.without_garbage_collection import without_garbage_collection
from megatrain.experiments.files.hardware_file import write_hardware
from megatrain.runtime.checkpoint.checkpoint import checkpoint_bytes
from megatrain.runtime.training.callback import Callback, Step
from megatrain.runtime.training.run_folder import PLANS, save_plan
from megatrain.runtime.training.training_run import TrainingRun
from megatrain.runtime.warm_up import WARM_UP_STEPS
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import write_text
from megatrain.simulator.base.units import format_bytes, format_seconds
from megatrain.simulator.compare.corrections import corrections, durations
from megatrain.simulator.costs import cost_model
from megatrain.simulator.engine.discrete_event import simulate
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.planner.search import Choice, assess, candidates
from megatrain.simulator.policies import find
from megatrain.simulator.schedule import Schedule
from megatrain.simulator.schedule.plan import Plan
from megatrain.simulator.schedule.timeline import Timeline

LEAST_GAIN = 0.03
"""The smallest saving that a switch must give, as a share of the remaining time. The saving is net
of the time of the switch."""
_PROBE_BYTES = 64 * 2**20
_KINDS_NAMED = 2
_LEAST_OF_DIFFERENCE, _LEAST_OF_STEP = 0.1, 0.01
"""least shares that a kind of operation explains if it is named, of the difference between the
measured and the predicted step, and of the measured step"""
_HARDWARE = "hardware.toml"
_NOT_ENTERED = "not_entered.txt"
"""mark in the folder of a plan that was accepted, until memory is allocated for it"""


class Proposal(NamedTuple):
    """A plan for a training, made from what the training has measured."""

    choice: Choice
    hardware: HardwareSpec
    """the machine, with its corrections"""
    seconds: float
    """predicted seconds of a step: the measured step, times the ratio of both predictions"""
    largest: str
    """the kinds of operation that explain most of the difference from the prediction"""


class Adaptation(Callback):
    """Plans again after the first steady steps of a training, and switches if this saves time.

    After a switch, it measures as many steps. If the other plan is slower than the former one was,
    it returns to that once, if this saves time. It does no more in one call of `fit`.
    """

    def __init__(self) -> None:
        self._phase: Literal["measure", "switch", "judge", "return", "done"] = "measure"
        self._seconds: list[float] = []
        self._folder = Path()
        self._untried: Path | None = None
        """folder of the plan that was accepted, until its first step has begun and ended"""
        self._former, self._former_seconds = "", 0.0
        self._began: float | None = None
        self._opening_seconds = self._switch_seconds = 0.0

    def on_allocate(self, done: int, total: int) -> None:
        if self._began is None:
            self._began = time.monotonic()
        if self._untried is not None:
            (self._untried / _NOT_ENTERED).unlink(missing_ok=True)

    def on_start(self, trainer: TrainingRun) -> None:
        if trainer.out is None:
            raise UserError(
                "Adaptation",
                found="a training without a run folder",
                allowed="Trainer(..., out=FOLDER)",
                fix="pass `out`",
            )
        self._folder = trainer.out
        for mark in list((self._folder / PLANS).glob(f"*/{_NOT_ENTERED}")):
            shutil.rmtree(mark.parent, ignore_errors=True)  # of a run that ended before the switch
        if self._began is not None:
            self._opening_seconds = time.monotonic() - self._began

    def on_switch(self, trainer: TrainingRun, seconds: float) -> None:
        phase, self._phase = self._phase, "done"
        other = trainer.plan.digest != self._former
        if phase == "switch" and other:
            self._phase, self._seconds, self._switch_seconds = "judge", [], seconds
        if (phase == "switch" and other) or phase == "return":
            trainer.note(
                f"the training continues under the {'other' if other else 'former'} plan;"
                f" switching took {format_seconds(seconds)}"
            )

    def on_end(self, trainer: TrainingRun, error: BaseException | None) -> None:
        if self._untried is not None and isinstance(error, KeyboardInterrupt):
            # A signal came before the first step. It says nothing against the plan.
            shutil.rmtree(self._untried, ignore_errors=True)
        self._forget_untried()

    def _forget_untried(self) -> None:
        """Removes the folder of a plan to which the training did not switch."""
        if self._untried is not None and (self._untried / _NOT_ENTERED).exists():
            shutil.rmtree(self._untried, ignore_errors=True)
        self._untried = None

    def on_step(self, trainer: TrainingRun, step: Step) -> None:
        self._forget_untried()
        if self._phase not in ("measure", "judge"):
            return
        if step.number < trainer.first_step + WARM_UP_STEPS:
            return
        self._seconds.append(step.seconds)
        if len(self._seconds) < COMPARED_STEPS:
            return
        measured, left = (
            statistics.median(self._seconds),
            trainer.config.training.steps - step.number,
        )
        act = self._adapt if self._phase == "measure" else self._judge
        self._phase = "done"
        try:
            act(trainer, measured, left)
        except UserError as error:
            trainer.note(f"the plan stays: {error}")

    def _adapt(self, trainer: TrainingRun, measured: float, left: int) -> None:
        """Plans again, and switches to the plan that was found if that saves enough time."""
        begin = time.monotonic()
        found = propose(trainer, measured)
        plan, place = found.choice.plan, self._folder / PLANS / found.choice.plan.digest
        text = (
            f"measured {format_seconds(measured)} a step{found.largest}; planned again in"
            f" {format_seconds(time.monotonic() - begin)}: "
        )
        same = plan.digest == trainer.plan.digest
        if same or not found.choice.feasible or found.seconds >= measured:
            trainer.note(f"{text}the plan stays, since no faster one was found")
            return
        change = described_change(trainer.plan, plan)
        text += f"{change}; predicted {_gain(measured, found.seconds)}"
        cost = 0.0
        if _share_saved(measured, found.seconds, left, cost) > LEAST_GAIN:
            cost = self._switching_seconds(trainer)
            text += f"; switching takes about {format_seconds(cost)}"
        text += f"; {left:,} step{'s are' if left != 1 else ' is'} left: "
        if _share_saved(measured, found.seconds, left, cost) <= LEAST_GAIN:
            least = f"{100 * LEAST_GAIN:.0f} % of the time left"
            trainer.note(f"{text}the plan stays, since a switch would save less than {least}")
        elif place.exists():
            trainer.note(f"{text}the plan stays, since this run has tried the other before")
        else:
            place.mkdir(parents=True)
            try:
                mark = "The run has not switched to this plan.\n"
                write_text(place / _NOT_ENTERED, mark)
                write_hardware(place / _HARDWARE, found.hardware, "megatrain train --adapt")
                save_plan(plan, place, trainer.source, place)
                trainer.switch(place / "plan.toml")
            except UserError:
                # A plan that was refused may fit when the run is resumed.
                shutil.rmtree(place, ignore_errors=True)
                raise
            self._former, self._former_seconds = trainer.plan.digest, measured
            self._phase, self._untried = "switch", place
            trainer.note(f"{text}the training switches to this plan")

    def _judge(self, trainer: TrainingRun, measured: float, left: int) -> None:
        """Compares the other plan with the former one, and returns to that if it was faster."""
        text = (
            f"measured {format_seconds(measured)} a step under the other plan,"
            f" {format_seconds(self._former_seconds)} under the former one: "
        )
        if measured <= self._former_seconds:
            trainer.note(f"{text}{100 * (1 - measured / self._former_seconds):.1f} % less")
        elif _share_saved(measured, self._former_seconds, left, self._switch_seconds) <= 0:
            trainer.note(f"{text}slower, but returning would take longer than it saves")
        else:
            trainer.switch(self._folder / PLANS / self._former / "plan.toml")
            self._phase = "return"
            trainer.note(f"{text}slower, so that the training returns to the former one")

    def _switching_seconds(self, trainer: TrainingRun) -> float:
        """Returns the time that a switch takes: as long as this training took to allocate and load,
        and the writing and reading of a checkpoint at the rate of the run's disk.
        """
        size = checkpoint_bytes(trainer.executor)
        return self._opening_seconds + 2 * size / write_rate(self._folder, min(size, _PROBE_BYTES))


def propose(trainer: TrainingRun, measured: float) -> Proposal:
    """Returns the best plan for the workload and the limits of a training, by a cost model that is
    corrected by its measured steps. A step takes `measured` seconds.

    Raises UserError if the machine's file cannot be read, or if nothing can be planned for it.
    """
    plan, schedule = trainer.plan, trainer.executor.schedule
    known = hardware_of(trainer.origin / "plan.toml", plan.hardware)
    plain = msgspec.structs.replace(known, corrections={})
    predicted = simulate(schedule, cost_model(plain, plan.model, plan.workload))
    factors = corrections(predicted, trainer.timelines, schedule)
    hardware = msgspec.structs.replace(known, corrections={**known.corrections, **factors})
    with without_garbage_collection():
        best = candidates(
            plan.model,
            hardware,
            plan.workload,
            source=plan.source,
            hardware_name=_HARDWARE,
            device_limit=plan.device_limit_bytes,
            host_limit=plan.host_limit_bytes,
        )[0]
        now = assess(plan, cost_model(hardware, plan.model, plan.workload))
    seconds = measured * best.step_seconds / now.step_seconds
    return Proposal(best, hardware, seconds, largest(predicted, factors, schedule, measured))


def largest(
    predicted: Timeline, factors: Mapping[str, float], schedule: Schedule, measured: float
) -> str:
    """Returns the kinds that explain most of the difference between the measured and the predicted
    step, in parentheses.

    An operation of a few microseconds may take ten times as long as predicted and explain nothing.
    So a kind is named only if its own difference goes in the same direction, and if it is at least
    10 % of the difference and 1 % of the step.

    Args:
        predicted: The predicted timeline.
        factors: The measured time of each `KIND@LANE` by the predicted time.
        schedule: The schedule of the timeline.
        measured: The seconds of a measured step.
    """
    before, difference = durations([predicted], schedule), 1e9 * measured - predicted.makespan_ns
    least = max(_LEAST_OF_DIFFERENCE * abs(difference), _LEAST_OF_STEP * 1e9 * measured)
    sign = 1 if difference > 0 else -1
    added = {key: sign * (factors[key] - 1) * before[key] for key in factors if "@" in key}
    kinds = [key for key, time in added.items() if time >= least]
    kinds.sort(key=lambda key: -added[key])
    named = [
        f"{key.replace('@', ' on ')} {factors[key]:,.{0 if factors[key] >= 10 else 2}f} times"
        for key in kinds[:_KINDS_NAMED]
    ]
    return f" ({', '.join(named)} as long as predicted)" if named else ""


def described_change(before: Plan, after: Plan) -> str:
    """Returns the policy and the knobs that differ, `policy a -> b, weight_slots 2 -> 3`."""
    policy = find(after.policy)
    pairs = [("policy", before.policy, after.policy)]
    for name in policy.knobs:
        shown = format_bytes if name == "chunk_bytes" else str
        old, new = (shown(getattr(plan.knobs, name)) for plan in (before, after))
        pairs.append((name, old, new))
    for name in policy.placements:
        old, new = (getattr(plan.knobs.placement, name) or "none" for plan in (before, after))
        pairs.append((name, old, new))
    return ", ".join(f"{name} {old} -> {new}" for name, old, new in pairs if old != new)


def _gain(before: float, after: float) -> str:
    """Returns a step's time and how much less it is, `0.90 s a step, 25.0 % less`."""
    return f"{format_seconds(after)} a step, {100 * (1 - after / before):.1f} % less"


def _share_saved(now: float, other: float, left: int, cost: float) -> float:
    """Returns the share of the time that `left` steps take, at `now` seconds each, that a switch to
    steps of `other` seconds saves. The switch takes `cost` seconds.
    """
    return (left * (now - other) - cost) / (left * now) if left else 0.0


def write_rate(folder: Path, size: int) -> float:
    """Returns the bytes per second at which `size` bytes are written to the disk with `folder`."""
    block = os.urandom(min(size, 2**20))
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            begin = time.monotonic()
            for _ in range(-(-size // len(block))):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            return size / max(time.monotonic() - begin, 1e-9)
    except OSError as error:
        raise UserError(
            str(folder),
            found=str(error.strerror).lower(),
            allowed="a disk with room for a checkpoint",
            fix="free some space",
        ) from None
