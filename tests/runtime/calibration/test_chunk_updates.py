"""Tests of the timing of chunk updates: the sizes, the data, and that real updates run."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from megatrain.runtime.calibration import cpu_adam_bench as chunk_updates
from megatrain.runtime.calibration.cpu_adam_bench import ChunkUpdates
from megatrain.simulator.model.state_format import FORMATS
from megatrain.simulator.schedule import Schedule

KINDS = ("cpu_update", "cpu_update:wide")


@pytest.fixture
def chunks() -> Iterator[ChunkUpdates]:
    made = ChunkUpdates(2**23, torch.bfloat16, 2)
    yield made
    made.close()


def test_sizes_up_to_half_of_the_state_are_timed_with_both_gradients(
    chunks: ChunkUpdates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here an update takes as many nanoseconds as it has elements."""
    update = ChunkUpdates._update

    def counted(self: ChunkUpdates, part: slice, gradient: torch.Tensor) -> int:
        assert update(self, part, gradient) > 0
        return int(part.stop - part.start)

    monkeypatch.setattr(ChunkUpdates, "_update", counted)
    assert chunks.measure(0.0) == {
        (kind, size): [size] * chunk_updates._LEAST for kind in KINDS for size in (2**14, 2**22)
    }


def test_every_part_is_updated_in_turn(
    chunks: ChunkUpdates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_updates, "_LEAST", 2)
    monkeypatch.setattr(chunk_updates, "_SIZES", (2**22,))
    chunks.measure(0.0)
    assert (chunks._moments[1] > 0).float().mean() > 0.99
    assert chunks._weights.isfinite().all()


@pytest.mark.parametrize(
    ("count", "halves"),
    [(2**12, [(0, 2047), (2048, 4095)]), (3001, [(0, 1499), (1501, 3000)]), (1, [(0, 0)])],
)
def test_next_to_other_lanes_the_halves_are_updated_in_turn(
    count: int, halves: list[tuple[int, int]]
) -> None:
    made = ChunkUpdates(count, torch.bfloat16, 1)
    made._gradients["cpu_update"].fill_(0.5)
    update = made.in_turn()
    for half in halves:
        before = made._moments[1].clone()
        update()
        changed = (made._moments[1] != before).nonzero()
        assert (int(changed[0]), int(changed[-1])) == half
    made.close()


def test_a_small_state_has_no_parts() -> None:
    small = ChunkUpdates(2**10, torch.bfloat16, 1)
    assert small.measure(0.0) == {}
    small.close()


def test_fp32_weights_have_one_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_updates, "_SIZES", (2**10,))
    made = ChunkUpdates(2**12, torch.float32, 2)
    assert made.measure(0.0).keys() == {("cpu_update", 2**10)}
    made.close()


def test_a_failure_leaves_no_memory_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    monkeypatch.setattr(chunk_updates.Arenas, "close", lambda _: closed.append(True))
    monkeypatch.setattr(chunk_updates.optimizer, "workers", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ChunkUpdates(2**10, torch.bfloat16, 2)
    assert len(closed) == 1


def test_a_late_failure_ends_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    monkeypatch.setattr(
        chunk_updates.optimizer,
        "workers",
        lambda _: SimpleNamespace(close=lambda: closed.append("threads")),
    )
    monkeypatch.setattr(chunk_updates.Arenas, "close", lambda _: closed.append("memory"))
    monkeypatch.setattr(chunk_updates, "AdamW", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ChunkUpdates(2**10, torch.bfloat16, 2)
    assert closed == ["threads", "memory"]


def test_the_number_of_pytorch_s_threads_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_updates, "_SIZES", (64,))
    chunks = ChunkUpdates(2**8, torch.float32, 2)
    assert chunks.measure(0.0)
    chunks.close()
    assert torch.get_num_threads() == 1


def test_the_time_is_divided_among_sizes_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here an update takes a second. Two sizes with two gradients have 2.5 of 10 seconds each."""
    seconds = [0.0]
    used: set[int] = set()

    def update(*_: object) -> int:
        seconds[0] += 1
        used.add(torch.get_num_threads())
        return 7

    monkeypatch.setattr(
        chunk_updates,
        "time",
        SimpleNamespace(perf_counter=lambda: seconds[0], perf_counter_ns=lambda: 0),
    )
    monkeypatch.setattr(chunk_updates, "_SIZES", (64, 128, 256))
    monkeypatch.setattr(chunk_updates, "_LEAST", 2)
    monkeypatch.setattr(ChunkUpdates, "_update", update)
    chunks = ChunkUpdates(2**8, torch.bfloat16, 3)
    try:
        assert chunks.measure(10.0) == {
            (kind, size): [7] * 3 for kind in KINDS for size in (64, 128)
        }
        assert chunks.window(4.5) == {("cpu_update", 128): [7] * 5}
        assert chunks.measure(0.0)["cpu_update", 64] == [7] * 2
    finally:
        chunks.close()
    assert used == {3}, "updates that PyTorch computes would use other threads than in a step"


def test_an_update_takes_the_time_between_two_readings_of_the_clock(
    chunks: ChunkUpdates, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = iter([500, 507])
    monkeypatch.setattr(
        chunk_updates, "time", SimpleNamespace(perf_counter_ns=lambda: next(readings))
    )
    assert chunks._update(slice(0, 64), chunks._gradients["cpu_update"]) == 7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("state", list(FORMATS))
def test_the_state_takes_at_most_18_bytes_for_each_parameter(
    dtype: torch.dtype, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calibration leaves as much host memory for it. Formats other than `exact` are for bf16."""
    made, count = list[Schedule](), 2**14
    monkeypatch.setattr(
        chunk_updates, "Arenas", lambda schedule, *_, **__: made.append(schedule) or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        ChunkUpdates(count, dtype, 1, state)
    size = sum(buffer.bytes for buffer in made[0].buffers)
    assert size <= chunk_updates.BYTES * count
    if (dtype, state) == (torch.bfloat16, "exact"):
        assert size == chunk_updates.BYTES * count


def test_closing_ends_the_threads_and_frees_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    workers = SimpleNamespace(close=lambda: closed.append("threads"))
    monkeypatch.setattr(chunk_updates.optimizer, "workers", lambda _: workers)
    monkeypatch.setattr(chunk_updates.Arenas, "close", lambda _: closed.append("memory"))
    chunks = ChunkUpdates(2**10, torch.bfloat16, 2)
    assert closed == []
    chunks.close()
    assert closed == ["threads", "memory"]


@pytest.mark.parametrize("state", ["master24", "bf16-sr"])
def test_updates_in_another_format_have_curves_of_their_own(state: str) -> None:
    chunks = ChunkUpdates(2**16 + 5, torch.bfloat16, 2, state)
    try:
        before = chunks._moments.clone()
        found = chunks.measure(0.01)
        assert set(found) == {(f"cpu_update:{state}{how}", 2**14) for how in ("", ":wide")}
        assert (chunks._low is None) == (state == "bf16-sr")
        assert not chunks._moments.equal(before)
        chunks.in_turn()()
    finally:
        chunks.close()
