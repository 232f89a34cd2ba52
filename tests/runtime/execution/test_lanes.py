"""Tests of lanes without an executor: when their tasks run, wait and stop."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from megatrain.runtime.execution.lanes import HostMark, Lane, LaneGroup, OpFailed, Task


@pytest.fixture
def lanes() -> Iterator[LaneGroup]:
    group = LaneGroup([Lane("cpu", 1, None), Lane("update", 1, None)])
    yield group
    group.close()


def a_task(name: str, run: Callable[[], object], *waits: Task) -> Task:
    return Task(name, run, HostMark(), [other.mark for other in waits])


def test_a_lane_runs_its_tasks_only_when_it_is_told_to_and_then_once() -> None:
    ran: list[str] = []
    lane = Lane("cpu", 1, None)
    lane.queue = [a_task("A", lambda: ran.append("A")), a_task("B", lambda: ran.append("B"))]
    time.sleep(0.2)
    assert ran == []
    lane.play()
    lane.finish()
    lane.close()
    assert ran == ["A", "B"]


def test_a_task_waits_for_those_of_other_lanes_in_every_step(lanes: LaneGroup) -> None:
    ran: list[str] = []
    first = a_task("first", lambda: ran.append("first"))
    second = a_task("second", lambda: ran.append("second"), first)
    third = a_task("third", lambda: ran.append("third"), second)
    for _ in range(2):
        ran.clear()
        lanes.play({"cpu": [second], "update": [first, third]})
        assert ran == ["first", "second", "third"]
        assert first.mark.end_ns <= second.mark.start_ns <= second.mark.end_ns


def test_after_a_failure_no_later_task_runs_and_the_next_step_does(lanes: LaneGroup) -> None:
    ran: list[str] = []

    def fail() -> None:
        raise ValueError("no such row\nand a long story")

    failing = a_task("A", fail)
    same_lane = a_task("B", lambda: ran.append("B"))
    other_lane = a_task("C", lambda: ran.append("C"), failing)
    with pytest.raises(OpFailed) as error:
        lanes.play({"cpu": [failing, same_lane], "update": [other_lane]})
    assert str(error.value) == "A on lane cpu: ValueError: no such row"
    assert (error.value.op, error.value.lane) == ("A", "cpu")
    assert ran == []
    lanes.play({"update": [same_lane]})
    assert ran == ["B"]


def test_of_two_failures_the_one_of_the_first_lane_is_told(lanes: LaneGroup) -> None:
    both = threading.Barrier(2)

    def fail(text: str) -> Callable[[], None]:
        def run() -> None:
            both.wait()
            raise ValueError(text)

        return run

    with pytest.raises(OpFailed, match=r"^A on lane cpu: ValueError: first$"):
        lanes.play({"update": [a_task("B", fail("second"))], "cpu": [a_task("A", fail("first"))]})


@pytest.fixture
def with_own() -> Iterator[LaneGroup]:
    """A group whose lane `update` runs on the calling thread."""
    group = LaneGroup([Lane("cpu", 1, None), Lane("update", 3, None)], own="update")
    yield group
    group.close()


def test_one_lane_runs_on_the_calling_thread_with_its_number_of_threads(
    with_own: LaneGroup,
) -> None:
    ran: list[tuple[threading.Thread, int]] = []

    def note() -> None:
        ran.append((threading.current_thread(), torch.get_num_threads()))

    before = torch.get_num_threads()
    first = a_task("first", note)
    second = a_task("second", note, first)
    with_own.play({"cpu": [second], "update": [first]})
    (own, threads), (other, others) = ran
    assert own is threading.current_thread() is not other
    assert (threads, others) == (3, 1)
    assert torch.get_num_threads() == before


def test_a_failure_ends_the_waiting_of_the_calling_thread(with_own: LaneGroup) -> None:
    ran: list[str] = []

    def fail() -> None:
        raise ValueError("no such row")

    failing = a_task("A", fail)
    never = a_task("B", lambda: ran.append("B"), failing)
    with pytest.raises(OpFailed, match=r"^A on lane cpu: ValueError: no such row$"):
        with_own.play({"cpu": [failing], "update": [never]})
    assert ran == []
    with_own.play({"update": [a_task("C", lambda: ran.append("C"))]})
    assert ran == ["C"]


@pytest.mark.parametrize("interrupted", [True, False])
def test_an_interruption_of_the_calling_thread_stops_the_other_lanes(
    with_own: LaneGroup, interrupted: bool
) -> None:
    """Ctrl-C in an op passes through, and the lane that waits for this op does not run."""
    ran: list[str] = []

    def interrupt() -> None:
        if interrupted:
            raise KeyboardInterrupt

    first = a_task("A", interrupt)
    second = a_task("B", lambda: ran.append("B"), first)
    if not interrupted:
        with_own.play({"cpu": [second], "update": [first]})
        assert ran == ["B"]
        return
    with pytest.raises(KeyboardInterrupt):
        with_own.play({"cpu": [second], "update": [first]})
    assert ran == []
    with_own.play({"cpu": [a_task("C", lambda: ran.append("C"))]})
    assert ran == ["C"]


def test_closed_lanes_keep_nothing_of_an_interrupted_op() -> None:
    group = LaneGroup([Lane("cpu", 1, None), Lane("update", 1, None)], own="update")
    held: list[weakref.ref[torch.Tensor]] = []

    def interrupt() -> None:
        tensor = torch.ones(2)
        held.append(weakref.ref(tensor))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        group.play({"update": [a_task("A", interrupt)]})
    group.close()
    gc.collect()
    assert held[0]() is None


def test_a_thread_that_cannot_start_leaves_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "lane-update":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    group = LaneGroup([Lane("cpu", 1, None), Lane("update", 1, None)])
    with pytest.raises(RuntimeError, match="start new thread"):
        group.play({})
    group.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lane-")]
