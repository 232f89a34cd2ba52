"""Chunk updates: which sizes are timed, on what, and that they are updates."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megatrain.runtime import chunk_updates
from megatrain.runtime.chunk_updates import ChunkUpdates

KINDS = ("cpu_update", "cpu_update:wide")


@pytest.fixture
def chunks() -> Iterator[ChunkUpdates]:
    made = ChunkUpdates(2**23, torch.bfloat16, 2)
    yield made
    made.close()


def test_sizes_that_go_into_the_state_twice_are_timed_with_both_gradients(chunks: ChunkUpdates) -> None:
    found = chunks.measure(0.0)
    assert found.keys() == {(kind, size) for kind in KINDS for size in (2**14, 2**22)}
    assert all(len(durations) == chunk_updates._LEAST and min(durations) > 0 for durations in found.values())
    assert min(found["cpu_update", 2**22]) > min(found["cpu_update", 2**14])


def test_every_part_is_updated_in_turn(chunks: ChunkUpdates, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_updates, "_LEAST", 2)
    monkeypatch.setattr(chunk_updates, "_SIZES", (2**22,))
    chunks.measure(0.0)
    assert (chunks._moments[1] > 0).float().mean() > 0.99
    assert chunks._weights.isfinite().all()


@pytest.mark.parametrize(("count", "most", "parts"), [(2**12, 2**10, [2**10] * 4), (2**12, 2**25, [2**11] * 2), (3000, 2**10, [2**10] * 2), (1, 2**10, [1])])
def test_beside_other_lanes_no_part_stays_in_the_cache(count: int, most: int, parts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_updates, "_BESIDE", most)
    made = ChunkUpdates(count, torch.bfloat16, 1)
    update, seen = made.in_turn(), list[int]()
    for _ in parts:
        before = made._moments[1].clone()
        update()
        changed = (made._moments[1] != before).nonzero()
        seen.append(int(changed[-1] - changed[0]) + 1)
    assert seen == pytest.approx(parts, rel=0.02), "the first and last gradient may be zero"
    assert (made._moments[1] > 0).float().sum() > 0.99 * sum(parts)
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


def test_what_fails_leaves_no_memory_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    monkeypatch.setattr(chunk_updates.Arenas, "close", lambda _: closed.append(True))
    monkeypatch.setattr(chunk_updates.optimizer, "workers", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ChunkUpdates(2**10, torch.bfloat16, 2)
    assert len(closed) == 1
