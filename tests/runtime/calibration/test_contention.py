"""Tests of contention: rates of a window and of its parts, the shares derived from them, and the
spread of every number.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from whole_models import model_of

from megatrain.runtime.calibration import contention
from megatrain.runtime.calibration.cpu_adam_bench import ChunkUpdates
from megatrain.runtime.calibration.timing import spread
from megatrain.runtime.layers.functional_layers import FunctionalLayers, config_of
from megatrain.runtime.memory.arenas import Arenas
from megatrain.simulator.hardware.cost_table import KernelInterleaving
from megatrain.simulator.schedule import LANES
from megatrain.simulator.schedule.plan import Plan


def test_spread_is_the_interquartile_range_over_the_median() -> None:
    assert spread([100, 90, 110, 95, 105]) == 0.15  # quartiles 92.5 and 107.5
    assert spread([-100, -90, -110, -95, -105]) == 0.15
    assert spread([100, 101, 103]) == 0.0297  # of 0.029703
    assert spread([7.0]) == spread([0, 0, 0]) == 0.0


def test_steady_work_has_one_rate_and_a_stall_shows_in_its_part() -> None:
    """Steady work has the same rate in the window and in all parts of it.

    A pause lowers only the rate of its part. The work is ten units per second for eight seconds,
    and the pause is in the third second.
    """
    stamps = [number / 10 for number in range(81)]
    assert contention._rates(stamps, 0.0, 8.0) == pytest.approx([10.0] * 9)
    paused = [stamp for stamp in stamps if not 2.05 < stamp < 2.95]
    whole, *parts = contention._rates(paused, 0.0, 8.0)
    assert whole == pytest.approx(71 / 8)
    assert parts == pytest.approx([10, 10, 1, 10, 10, 10, 10, 10])
    assert sum(parts) / 8 == pytest.approx(whole)


def test_a_unit_longer_than_the_common_window_is_timed_without_the_first() -> None:
    assert contention._rates([0.0, 2.0, 4.0, 7.0], 5.0, 6.0)[0] == pytest.approx(2 / 5)


def test_shares_come_from_units_of_work_a_second() -> None:
    """A lane's share is its rate next to other busy lanes divided by its rate alone.

    On machine B of h200.md, the cores keep 0.64 next to both directions of the link. The product of
    the two pairs would be 0.58.
    """
    speeds = {
        ("h2d",): {"h2d": 55.4},
        ("d2h",): {"d2h": 55.3},
        ("cpu",): {"cpu": 100.0},
        ("h2d", "d2h"): {"h2d": 50.3, "d2h": 50.3},
        ("h2d", "cpu"): {"h2d": 25.0, "cpu": 77.0},
        ("d2h", "cpu"): {"d2h": 23.0, "cpu": 75.0},
        ("h2d", "d2h", "cpu"): {"h2d": 20.0, "d2h": 20.0, "cpu": 64.0},
    }
    assert contention.kept(contention.shares(speeds), {}) == {
        "h2d": {"d2h": 0.908, "cpu": 0.451, "d2h+cpu": 0.361},
        "d2h": {"h2d": 0.91, "cpu": 0.416, "h2d+cpu": 0.362},
        "cpu": {"h2d": 0.77, "d2h": 0.75, "h2d+d2h": 0.64},
    }


def test_a_slowdown_within_the_spread_is_no_contention() -> None:
    """A slowdown that is smaller than the spread of the measurement counts as none.

    These numbers are of H200 machines: the link's share is 0.80 with a spread of 52 %, and the
    cores' share is 0.804 with a spread of 22 %.
    """
    speeds = {
        ("h2d",): {"h2d": 50.0},
        ("cpu",): {"cpu": 100.0},
        ("h2d", "cpu"): {"h2d": 39.9, "cpu": 80.4},
    }
    spreads = {"contention.h2d.cpu": 0.517, "contention.cpu.h2d": 0.216}
    assert contention.kept(contention.shares(speeds), spreads) == {
        "h2d": {"cpu": 1.0},
        "cpu": {"h2d": 0.804},
    }


def test_a_lane_keeps_at_least_a_hundredth_of_its_speed() -> None:
    """Predicted durations are divided by the share."""
    speeds = {
        ("h2d",): {"h2d": 50.0},
        ("cpu",): {"cpu": 100.0},
        ("h2d", "cpu"): {"h2d": 0.1, "cpu": 120.0},
    }
    whole = contention.shares(speeds)
    assert contention.kept(whole, {}) == {"h2d": {"cpu": 0.01}, "cpu": {"h2d": 1.0}}


def test_each_lane_runs_alone_and_in_each_combination(monkeypatch: pytest.MonkeyPatch) -> None:
    """A share is computed from the same part of both windows."""
    ran: list[tuple[str, ...]] = []

    def together(work: dict[str, Any], *_: object) -> dict[str, tuple[float, ...]]:
        ran.append(tuple(work))
        speed = {"h2d": 50.0, "d2h": 40.0, "cpu": 10.0}
        return {
            lane: tuple(speed[lane] / len(work) / (2 if part == 3 else 1) for part in range(9))
            for lane in work
        }

    monkeypatch.setattr(contention, "run_together", together)
    work = dict.fromkeys(("compute", "h2d", "d2h", "cpu"), lambda: None)
    lanes = ("h2d", "d2h", "cpu")
    found = contention.measure_shares(work, [lanes[:2], lanes], {}, torch.device("cpu"))
    assert ran == [("h2d",), ("d2h",), ("cpu",), lanes[:2], lanes]
    assert found["h2d", "d2h"] == (0.5,) * 9
    assert found["cpu", "h2d+d2h"] == pytest.approx([1 / 3] * 9)


def test_a_share_is_the_median_of_all_moments_and_its_spread_that_of_all_parts() -> None:
    """In one of the moments the link is slow."""
    moments: list[contention.Shares] = [
        {("h2d", "d2h"): (0.9, 0.9, 0.9), ("cpu", "h2d"): (0.7, 0.7, 0.7)},
        {("h2d", "d2h"): (0.6, 0.5, 0.7)},
        {("h2d", "d2h"): (0.8, 0.8, 0.8)},
    ]
    whole, spreads = contention.typical(moments)
    assert whole == {("h2d", "d2h"): 0.8, ("cpu", "h2d"): 0.7}
    assert spreads == {
        "contention.h2d.d2h": spread([0.9, 0.9, 0.5, 0.7, 0.8, 0.8]),
        "contention.cpu.h2d": 0.0,
    }


def test_a_slowdown_that_differs_between_moments_is_kept() -> None:
    """At each moment it is clear. How far the moments differ says nothing about its existence."""
    moments: list[contention.Shares] = [
        {("h2d", "cpu"): (share, *[share - 0.01, share + 0.01] * 4)}
        for share in (0.75, 0.98, 0.80, 0.99)
    ]
    whole, spreads = contention.typical(moments)
    within = contention.within_moments(moments)
    assert spreads["contention.h2d.cpu"] > 0.2 > 0.03 > within["contention.h2d.cpu"]
    assert contention.kept(whole, within) == {"h2d": {"cpu": 0.89}}
    assert contention.kept(whole, spreads) == {"h2d": {"cpu": 1.0}}


def test_turns_are_the_wait_of_an_update_and_the_loss_of_compute() -> None:
    """The wait of an update and the loss of compute are derived from their rates alone and
    together. Forwards take 10 ms, and forward with backward 30 ms. Updates of 1 and 4 ms each wait
    1 ms, so they run at 1/2 and 4/5 of their speed.
    """
    layer = contention._ConcurrentUpdate(alone=250, update=200, compute=100 * (1 - 0.8))
    both_ways = contention._ConcurrentUpdate(
        alone=250, update=200, compute=1 / 0.030 * (1 - 0.8 * 0.6)
    )
    wait, loss, backward_loss = contention._interleaving(
        100,
        1 / 0.030,
        contention._ConcurrentUpdate(alone=1000, update=500, compute=0),
        layer,
        both_ways,
    )
    assert (wait, loss) == pytest.approx((1e6, 1.0))
    assert backward_loss == pytest.approx((0.6 - 1 / 3) / (2 / 3))


def test_a_loss_is_a_share_with_three_digits() -> None:
    found = [contention._share(value) for value in (-0.1, 0.0, 0.98765, 1.0, 1.2)]
    assert found == [0.0, 0.0, 0.988, 1.0, 1.0]


@pytest.fixture
def tiny(
    executable: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Any:
    """Returns what contention is measured with, of a tiny model or of the one in `request`."""
    monkeypatch.setattr(contention, "_WINDOW_SECONDS", 0.02)
    monkeypatch.setattr(contention, "_UPDATED", 2**10)
    plan, device = executable(**getattr(request, "param", {})), torch.device("cpu")
    layer, largest = plan.model.stack["0"], 2**16
    schedule = contention.copy_buffers(largest, layer=4 * layer.elements)
    arenas, chunks = (
        Arenas(schedule, device, device_limit_bytes=2**62, host_limit_bytes=2**62),
        ChunkUpdates(2**11, torch.float32, 1),
    )
    yield (
        FunctionalLayers(plan.model, plan.workload, config_of(plan.model), device),
        arenas,
        layer,
        largest,
        chunks.in_turn(),
    )
    chunks.close()
    arenas.close()


def test_every_pair_of_lanes_has_a_spread(tiny: Any) -> None:
    templates, arenas, layer, largest, host_update = tiny
    updates = []

    def counted() -> None:
        host_update()
        updates.append(1)

    slow: contention.Shares = {("h2d", "cpu"): (0.5, 0.4, 0.6), ("cpu", "h2d"): (0.7, 0.6, 0.8)}
    found = contention.measure_contention(
        templates,
        arenas,
        layer,
        largest,
        dict.fromkeys(LANES, 1),
        torch.device("cpu"),
        counted,
        [slow],
    )
    measured = [lane for lane in LANES if lane != "exchange"]  # this number needs several GPUs
    assert len(updates) >= 5 * 3, "the CPU was not measured alone, with compute and with updates"
    of_link = {"h2d", "d2h", "cpu"}
    assert found.spread.keys() == {
        f"contention.{lane}.{other}"
        for lane in measured
        for other in measured
        if lane != other and not {lane, other} <= of_link
    } | {"contention.h2d.cpu", "contention.cpu.h2d"}
    assert found.kept["h2d"]["cpu"] == 0.5
    assert max(found.spread.values()) > 0
    assert found.turns is None, "only a GPU has these"


def test_turns_and_their_spread_can_be_measured(tiny: Any) -> None:
    """The code that measures interleaving on a GPU also runs on the CPU, where its numbers have no
    meaning.
    """
    templates, arenas, layer, largest, _ = tiny
    threads = dict.fromkeys(LANES, 1)
    work = contention._lane_work(templates, arenas, layer, largest, torch.device("cpu"))
    turns, spreads = contention._measure_interleaving(
        templates, arenas, layer, work["compute"], threads, torch.device("cpu")
    )
    assert isinstance(turns, KernelInterleaving)
    assert spreads.keys() == {"turns.wait_ns", "turns.forward_loss", "turns.backward_loss"}


@pytest.mark.parametrize(
    "tiny",
    [{"model": model_of("mixtral", output_router_logits=True, router_aux_loss_coef=0.7)}],
    indirect=True,
)
def test_a_layer_with_a_balancing_loss_has_gradients_as_in_a_step(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the choices of a forward pass they would not be finite."""
    templates, arenas, layer, largest, _ = tiny
    work = contention._lane_work(templates, arenas, layer, largest, torch.device("cpu"))
    backward, found = templates.backward, []
    monkeypatch.setattr(templates, "backward", lambda *given: found.extend(backward(*given)))
    work["compute"]()
    assert found
    assert all(bool(gradient.isfinite().all()) for gradient in found if gradient is not None)


def test_lanes_run_for_as_many_windows_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    class Waited(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if timeout is not None:
                waits.append(timeout)
            return super().wait(timeout)

    monkeypatch.setattr(contention, "_WINDOW_SECONDS", 0.01)
    monkeypatch.setattr(contention.threading, "Event", Waited)
    work = {"compute": lambda: None, "cpu": lambda: None}
    contention.run_together(work, {"compute": 1, "cpu": 1}, torch.device("cpu"), 3)
    assert waits == [pytest.approx(0.03)]


def test_each_lane_runs_on_its_threads_and_often_enough_for_a_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A unit of work may take longer than a window."""
    monkeypatch.setattr(contention, "_WINDOW_SECONDS", 0.0)
    found, threads = dict[str, list[int]](), {"compute": 3, "cpu": 2}
    work = {
        lane: lambda lane=lane: found.setdefault(lane, []).append(torch.get_num_threads())
        for lane in threads
    }
    rates = contention.run_together(work, threads, torch.device("cpu"))
    assert {lane: set(used) for lane, used in found.items()} == {"compute": {3}, "cpu": {2}}
    assert min(len(used) for used in found.values()) >= 5
    assert all(len(lane) == 9 and min(lane) >= 0 for lane in rates.values())


def test_a_lane_that_fails_ends_the_others() -> None:
    """A lane that fails ends the others, which would otherwise wait for it forever.

    A lane fails if a small GPU runs out of memory.
    """

    def fail() -> None:
        raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        contention.run_together(
            {"compute": fail, "cpu": lambda: None}, {"compute": 1, "cpu": 1}, torch.device("cpu")
        )


def test_ctrl_c_ends_all_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise they would work forever, and the process would not end."""

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    def work() -> None:
        threading.Event().wait(0.05)

    before = threading.active_count()
    monkeypatch.setattr(contention.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        contention.run_together(
            {"compute": work, "cpu": work}, {"compute": 1, "cpu": 1}, torch.device("cpu")
        )
    assert threading.active_count() == before
