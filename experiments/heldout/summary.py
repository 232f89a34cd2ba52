"""Summarizes the errors of the predictions and compares them with the targets. Every error is
(predicted - measured) / measured.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import msgspec

from megatrain.experiments.heldout.rows import HeldoutRow
from megatrain.experiments.heldout.suites import BEST
from megatrain.simulator.compare.error_table import signed_percent

TIE = 0.01
"""Step times that differ by at most this share count as equal. The medians of one plan in two runs
differed by 0.9 % (experiments/results/h200-x2-qwen2.5-7b-peers).
"""
LEAST_PLANS = 12
"""The least number of executed plans in a group for which a regret is computed."""
STEP_MEAN, STEP_WORST = 0.03, 0.08
"""Targets for the mean and the worst error of the step time, as shares of the measured time."""
DEVICE_WORST, DEVICE_SMALLEST, HOST_WORST, REPLAY_WORST = 0.015, -0.005, 0.01, 0.01
"""Targets for the errors of memory and replay, as shares of the measured value."""


class ErrorSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Errors as shares, not percents. A field is None if no row gives it."""

    cases: int
    """Cases of the suite with a row."""
    executed: int
    """Plans that were executed. The other cases failed or have the same plan as another case."""
    failed: int
    """Cases that failed."""
    step_mape: float | None
    """Mean absolute error of the step time."""
    step_worst: float | None
    """Largest error of the step time by magnitude, signed."""
    step_bias: float | None
    """Mean signed error of the step time."""
    visited_again: int = 0
    """Plans that were executed more than once, with other plans in between."""
    spread_between_repetitions: float | None = None
    """Median over these plans of `spread_between_repetitions`."""
    spread_between_repetitions_worst: float | None = None
    """Maximum over these plans of `spread_between_repetitions`."""
    device_mape: float | None
    """Mean absolute error of the device peak."""
    device_worst: float | None
    """Largest error of the device peak by magnitude, signed."""
    device_smallest: float | None
    """Most negative error of the device peak: the largest underestimate."""
    host_worst: float | None
    """Largest error of the host memory by magnitude, signed."""
    replay_worst: float | None
    """Largest error of the replay by magnitude, signed."""
    tau: dict[str, float]
    """Group -> Kendall's tau of the order of its policies. Steps within 1 % are ties."""
    tau_strict: dict[str, float]
    """Group -> Kendall's tau of the order of its policies. Only equal steps are ties."""
    tau_of_plans: dict[str, float]
    """Group -> Kendall's tau of the order of all its plans. Steps within 1 % are ties."""
    regret: dict[str, float]
    """Group of at least 12 executed plans -> measured time of the planner's choice divided by that
    of the fastest plan, minus 1.
    """

    def targets(self) -> list[tuple[str, float | None, str, bool]]:
        """Returns (name, value, target, met) for each target."""

        def line(
            what: str, value: float | None, target: str, met: Callable[[float], bool]
        ) -> tuple[str, float | None, str, bool]:
            return what, value, target, value is not None and met(value)

        return [
            line(
                "step time, mean absolute error",
                self.step_mape,
                "<= 3 %",
                lambda value: value <= STEP_MEAN,
            ),
            line(
                "step time, worst",
                self.step_worst,
                "<= 8 %",
                lambda value: abs(value) <= STEP_WORST,
            ),
            line(
                "device peak, worst",
                self.device_worst,
                "<= 1.5 %",
                lambda value: abs(value) <= DEVICE_WORST,
            ),
            line(
                "device peak, most too small",
                self.device_smallest,
                ">= -0.5 %",
                lambda value: value >= DEVICE_SMALLEST,
            ),
            line(
                "host memory, worst",
                self.host_worst,
                "<= 1 %",
                lambda value: abs(value) <= HOST_WORST,
            ),
            line(
                "replay, worst",
                self.replay_worst,
                "<= 1 %",
                lambda value: abs(value) <= REPLAY_WORST,
            ),
            line(
                "Kendall's tau of policies, mean",
                _mean(self.tau.values()),
                ">= 0.9",
                lambda value: value >= 0.9,
            ),
            line(
                "regret, worst",
                max(self.regret.values(), default=None),
                "<= 2 %",
                lambda value: value <= 0.02,
            ),
        ]


def kendall_tau(pairs: Sequence[tuple[float, float]], tie: float = 0.0) -> float:
    """Returns Kendall's tau-b (1945) of pairs of positive numbers: (concordant pairs - discordant
    pairs) / sqrt(pairs that are not tied on the left * pairs that are not tied on the right). Two
    numbers are tied if they differ by at most `tie` times the smaller one.

    >>> kendall_tau([(1, 10), (2, 30), (3, 20)]), kendall_tau([(1, 2), (1.005, 1.99), (2, 3)], 0.01)
    (0.3333333333333333, 1.0)
    """

    def order(one: float, other: float) -> int:
        return 0 if abs(one - other) <= tie * min(one, other) else 1 if one > other else -1

    both = [(order(a, c), order(b, d)) for (a, b), (c, d) in itertools.combinations(pairs, 2)]
    untied = math.prod(sum(signs[side] != 0 for signs in both) for side in (0, 1))
    return sum(left * right for left, right in both) / math.sqrt(untied) if untied else 0.0


def step_error(row: HeldoutRow) -> float:
    """Returns the signed error of the step time as a share."""
    assert row.plan.prediction is not None
    assert row.step_seconds is not None
    return row.plan.prediction.step_seconds / row.step_seconds - 1


def spread_between_repetitions(row: HeldoutRow) -> float:
    """Returns the slowest repetition's time divided by the fastest one's, minus 1."""
    return max(row.repetitions) / min(row.repetitions) - 1


def device_error(row: HeldoutRow) -> float:
    """Returns the signed error of the device peak as a share."""
    assert row.plan.prediction is not None
    assert row.device_peak_bytes is not None
    return row.plan.prediction.device_peak_bytes / row.device_peak_bytes - 1


def host_error(row: HeldoutRow) -> float | None:
    """Returns the signed error of the host memory as a share, or None if the plan's host pools are
    smaller than 1 GiB.
    """
    assert row.plan.prediction is not None
    if not row.host_bytes or not row.host_pool_bytes or row.host_pool_bytes < 2**30:
        return None
    return row.plan.prediction.host_peak_bytes / row.host_bytes - 1


def summarize_errors(rows: Iterable[HeldoutRow]) -> ErrorSummary:
    """Returns the errors of the rows. A plan that several cases share counts once."""
    rows = list(rows)
    ran = [row for row in rows if not row.failure]
    once = [row for row in ran if not row.same_as]
    steps, devices = [step_error(row) for row in once], [device_error(row) for row in once]
    hosts = [error for row in once if (error := host_error(row)) is not None]
    replays = [row.replay_error for row in once if row.replay_error is not None]
    apart = [spread_between_repetitions(row) for row in once if len(row.repetitions) > 1]
    groups: dict[str, list[HeldoutRow]] = defaultdict(list)
    for row in ran:
        groups[row.group].append(row)
    policies = {
        name: [row for row in found if row.policy != BEST and not row.variant]
        for name, found in groups.items()
    }
    plans = {
        name: list({row.plan.digest: row for row in found}.values())
        for name, found in groups.items()
    }
    regret = {
        name: value
        for name, found in groups.items()
        if len(plans[name]) >= LEAST_PLANS and (value := _regret(found)) is not None
    }
    return ErrorSummary(
        cases=len(rows),
        executed=len(once),
        failed=len(rows) - len(ran),
        step_mape=_mean(map(abs, steps)),
        step_worst=max(steps, key=abs, default=None),
        step_bias=_mean(steps),
        visited_again=len(apart),
        spread_between_repetitions=statistics.median(apart) if apart else None,
        spread_between_repetitions_worst=max(apart, default=None),
        device_mape=_mean(map(abs, devices)),
        device_worst=max(devices, key=abs, default=None),
        device_smallest=min(devices, default=None),
        host_worst=max(hosts, key=abs, default=None),
        replay_worst=max(replays, key=abs, default=None),
        tau={name: _tau(found, TIE) for name, found in policies.items() if len(found) >= 3},
        tau_strict={name: _tau(found) for name, found in policies.items() if len(found) >= 3},
        tau_of_plans={name: _tau(found, TIE) for name, found in plans.items() if len(found) >= 3},
        regret=regret,
    )


def _tau(rows: list[HeldoutRow], tie: float = 0.0) -> float:
    return kendall_tau(
        [
            (row.plan.prediction.step_seconds, row.step_seconds)
            for row in rows
            if row.plan.prediction and row.step_seconds
        ],
        tie,
    )


def _regret(rows: list[HeldoutRow]) -> float | None:
    chosen = next((row.step_seconds for row in rows if row.policy == BEST), None)
    fastest = min(row.step_seconds for row in rows if row.step_seconds)
    return chosen / fastest - 1 if chosen else None


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.mean(found) if found else None


def format_value(what: str, value: float | None) -> str:
    """Returns the value of a line of `ErrorSummary.targets` as text.

    >>> format_value("Kendall's tau of policies, mean", 0.934)
    '0.934'
    >>> format_value("step time, worst", 0.0741)
    '+7.4 %'
    """
    if value is None:
        return "-"
    if "tau" in what:
        return f"{value:.3f}"
    return signed_percent(value).removeprefix("+" if "mean" in what else "")


def judged(value: float | None, met: bool) -> str:
    """Returns `met`, `MISSED`, or `not measured` for a target without a value."""
    return "met" if met else "MISSED" if value is not None else "not measured"
