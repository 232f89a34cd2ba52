"""Adaptation: a callback that plans again from measured steps, and switches to a faster plan.

Every plan gives the same bits, so a switch changes nothing but the speed.
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

from megatrain.experiments.cli.file_arguments import hardware_of
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
"""The least saving of a switch, as a share of the remaining time. The time of the switch itself is
subtracted from the saving."""
MEASURED_STEPS = WARM_UP_STEPS + COMPARED_STEPS
"""The number of steps before planning again."""
_PROBE_BYTES = 64 * 2**20
"""The largest number of bytes that is written to measure the rate of the disk."""
_KINDS_NAMED = 2
"""The largest number of kinds of operations that a note names."""
_LEAST_OF_DIFFERENCE, _LEAST_OF_STEP = 0.1, 0.01
"""A kind of operation is named only if it explains at least these shares of the difference between
measured and predicted step, and of the measured step."""
_HARDWARE = "hardware.toml"
_NOT_ENTERED = "not_entered.txt"
"""The name of a mark in the folder of an accepted plan, until memory is allocated for the plan."""


class Proposal(NamedTuple):
    """A plan for a training, made from its measured steps."""

    choice: Choice
    """The plan, and its prediction."""
    hardware: HardwareSpec
    """The machine, with corrections from the measured steps."""
    present_seconds: float
    """The predicted step time under the present plan, on this machine."""
    largest: str
    """The kinds of operations that explain most of the difference between measurement and
    prediction, as text in parentheses."""

    @property
    def ratio(self) -> float:
        """The predicted step time under the plan, divided by that under the present plan."""
        return self.choice.step_seconds / self.present_seconds


class Adaptation(Callback):
    """Plans again after the first steady steps of a training, and switches if this saves time.

    After a switch, it measures the same number of steps. If the new plan is slower than the former
    one, it switches back, if this saves time. It then does nothing more in this call of `fit`.
    """

    def __init__(self, policies: list[str] | None = None) -> None:
        """`policies` are the names of the policies of the new plan. None means all policies that
        can be the fastest.
        """
        self._policies = policies
        self._phase: Literal["measure", "switch", "judge", "return", "done"] = "measure"
        self._seconds: list[float] = []
        self._folder = Path()
        self._untried: Path | None = None
        """The folder of the accepted plan, until the plan's first step has ended."""
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
            shutil.rmtree(mark.parent, ignore_errors=True)  # the run ended before the switch
        left = trainer.config.training.steps - trainer.first_step + 1
        if 0 < left < MEASURED_STEPS:
            trainer.note(
                f"the plan stays: {left} step{'s are' if left > 1 else ' is'} left, and planning"
                f" again needs {MEASURED_STEPS}"
            )
        if self._began is not None:
            self._opening_seconds = time.monotonic() - self._began

    def on_switch(self, trainer: TrainingRun, seconds: float) -> None:
        phase, self._phase = self._phase, "done"
        other = trainer.plan.digest != self._former
        if phase == "switch" and other:
            self._phase, self._seconds, self._switch_seconds = "judge", [], seconds
        if (phase == "switch" and other) or (phase == "return" and not other):
            trainer.note(
                f"the training continues under the {'other' if other else 'former'} plan;"
                f" switching took {format_seconds(seconds)}"
            )

    def on_end(self, trainer: TrainingRun, error: BaseException | None) -> None:
        if self._untried is not None and isinstance(error, KeyboardInterrupt):
            # A signal ended the run before the plan's first step, so the plan may be tried again.
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
        """Plans again, and switches to the new plan if that saves enough time.

        Args:
            trainer: the training.
            measured: the median of the measured step times, in seconds.
            left: the number of steps that are left.
        """
        begin = time.monotonic()
        proposal = propose(trainer, measured, self._policies)
        # The prediction may be wrong by the same factor under both plans.
        expected = measured * proposal.ratio
        plan, place = proposal.choice.plan, self._folder / PLANS / proposal.choice.plan.digest
        text = (
            f"measured {format_seconds(measured)} a step{proposal.largest}; planned again in"
            f" {format_seconds(time.monotonic() - begin)}: "
        )
        same = plan.digest == trainer.plan.digest
        if same or not proposal.choice.feasible or proposal.ratio >= 1:
            trainer.note(f"{text}the plan stays, since no faster one was found")
            return
        change = described_change(trainer.plan, plan)
        # The plan has this prediction, with which later steps are compared.
        text += (
            f"{change}; predicted {format_seconds(proposal.choice.step_seconds)} a step instead of"
            f" {format_seconds(proposal.present_seconds)}, {100 * (1 - proposal.ratio):.1f} % less"
        )
        cost = 0.0
        if _share_saved(measured, expected, left, cost) > LEAST_GAIN:
            cost = self._switching_seconds(trainer)
            text += f"; switching takes about {format_seconds(cost)}"
        text += f"; {left:,} step{'s are' if left != 1 else ' is'} left: "
        if _share_saved(measured, expected, left, cost) <= LEAST_GAIN:
            least = f"{100 * LEAST_GAIN:.0f} % of the time left"
            trainer.note(f"{text}the plan stays, since a switch would save less than {least}")
        elif place.exists():
            trainer.note(f"{text}the plan stays, since this run has tried the other before")
        else:
            place.mkdir(parents=True)
            try:
                mark = "The run has not switched to this plan.\n"
                write_text(place / _NOT_ENTERED, mark)
                write_hardware(place / _HARDWARE, proposal.hardware, "megatrain train --adapt")
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
        """Compares the new plan with the former one, and switches back if the former was faster.

        The arguments are those of `_adapt`, measured under the new plan.
        """
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
            trainer.note(f"{text}slower, so the training returns to the former one")

    def _switching_seconds(self, trainer: TrainingRun) -> float:
        """Returns the estimated seconds of a switch.

        They are the time that this training took to allocate memory and load weights, plus the time
        to write and read a checkpoint at the measured rate of the run's disk.
        """
        size = checkpoint_bytes(trainer.executor)
        return self._opening_seconds + 2 * size / write_rate(self._folder, min(size, _PROBE_BYTES))


def propose(trainer: TrainingRun, measured: float, policies: list[str] | None = None) -> Proposal:
    """Returns the best plan for the workload and the memory limits of a training.

    The cost model is corrected by the measured durations of the training's operations. `measured`
    is the measured step time in seconds, and `policies` are those of `Adaptation`. Raises UserError
    if the hardware file cannot be read, or if nothing can be planned for it.
    """
    plan, schedule = trainer.plan, trainer.executor.schedule
    before = hardware_of(trainer.origin / "plan.toml", plan.hardware)
    uncorrected = msgspec.structs.replace(before, corrections={})
    predicted = simulate(schedule, cost_model(uncorrected, plan.model, plan.workload))
    factors = corrections(predicted, trainer.timelines, schedule)
    hardware = msgspec.structs.replace(before, corrections={**before.corrections, **factors})
    with without_garbage_collection():
        best = candidates(
            plan.model,
            hardware,
            plan.workload,
            source=plan.source,
            hardware_name=_HARDWARE,
            device_limit=plan.device_limit_bytes,
            host_limit=plan.host_limit_bytes,
            policies=policies,
        )[0]
        now = assess(plan, cost_model(hardware, plan.model, plan.workload))
    named = largest(predicted, factors, schedule, measured)
    return Proposal(best, hardware, now.step_seconds, named)


def largest(
    predicted: Timeline, factors: Mapping[str, float], schedule: Schedule, measured: float
) -> str:
    """Returns the kinds of operations that explain most of the difference between the measured and
    the predicted step, as text in parentheses, or an empty string.

    A kind is named only if its own difference has the same sign, and is at least 10 % of the
    difference and 1 % of the step. An operation of a few microseconds may take ten times as long as
    predicted, and explain nothing.

    Args:
        predicted: The predicted timeline.
        factors: `KIND@LANE` -> measured time divided by predicted time.
        schedule: The schedule of the timeline.
        measured: The measured step time in seconds.
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
    """Returns the policy and knobs that differ, such as `policy a -> b, weight_slots 2 -> 3`."""
    policy = find(after.policy)
    pairs = [("policy", before.policy, after.policy)]
    for name in policy.knobs:
        shown = format_bytes if name.endswith("_bytes") else str
        old, new = (shown(getattr(plan.knobs, name)) for plan in (before, after))
        pairs.append((name, old, new))
    for name in policy.placements:
        old, new = (getattr(plan.knobs.placement, name) or "none" for plan in (before, after))
        pairs.append((name, old, new))
    return ", ".join(f"{name} {old} -> {new}" for name, old, new in pairs if old != new)


def _share_saved(now: float, other: float, left: int, cost: float) -> float:
    """Returns the share of the remaining time that a switch saves. It is negative for a loss.

    Args:
        now: the step time without the switch, in seconds.
        other: the step time after the switch, in seconds.
        left: the number of steps that are left.
        cost: the time that the switch takes, in seconds.
    """
    return (left * (now - other) - cost) / (left * now) if left else 0.0


def write_rate(folder: Path, size: int) -> float:
    """Returns the rate in bytes per second at which `size` bytes are written to a file in `folder`.

    Raises UserError if they cannot be written.
    """
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
