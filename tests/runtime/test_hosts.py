"""Tests of the ranks of several hosts: gathers, boards, lost ranks and refusals.

`test_ranks.py` has the test of their bits.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatrain.runtime.ranks import RankLost, Ranks, board_mirror, check_started, ranks
from megatrain.runtime.ranks.board_mirror import BoardMirror
from megatrain.runtime.ranks.rank_board import Board
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.schedule.plan import Plan


def of_two_hosts(rank: int = 0, count: int = 4, **more: Any) -> Ranks:
    """Returns one of the ranks of two hosts, which are all this process."""
    return Ranks(rank, count, [os.getpid()] * count, nodes=["one", "two"], **more)


class SilentMirror:
    """A mirror that has not heard from some ranks for a minute."""

    def __init__(self, *silent: int) -> None:
        self._silent = silent

    def silence_s(self, rank: int) -> float:
        return 60.0 if rank in self._silent else 0.0


@pytest.mark.parametrize(("rank", "before"), [(0, 0), (1, 2), (2, 1), (3, 2)])
def test_the_first_rank_of_each_host_fills_caches_before_the_others(
    monkeypatch: pytest.MonkeyPatch, rank: int, before: int
) -> None:
    met = list[str]()
    one = of_two_hosts(rank)
    monkeypatch.setattr(one, "meet", lambda: met.append("meet"))
    with one.in_turn():
        met.append("block")
    assert met == [*["meet"] * before, "block", *["meet"] * (2 - before)]


def test_boards_are_copied_between_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_mirror, "_EVERY_S", 0.02)
    store, boards, seen = dist.HashStore(), [Board(), Board()], [Board(), Board()]
    mirrors = [
        BoardMirror(store, rank, boards[rank], {1 - rank: seen[1 - rank]}) for rank in (0, 1)
    ]
    for mirror in mirrors:
        mirror.start()
    boards[1].begin("compute", "F1.m0")
    boards[1].error = "host memory: found none"
    mirrors[1].flush()
    end = time.monotonic() + 20
    while not seen[1].error:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert (seen[1].error, seen[1].activity) == (boards[1].error, "in F1.m0 on lane compute")
    mirrors[1].stop()
    time.sleep(0.5)
    assert mirrors[0].silence_s(1) > 0.3
    assert mirrors[1].silence_s(0) > 0.3, "nothing is read after the end"
    mirrors[0].stop()
    assert not any(mirror._thread.is_alive() for mirror in mirrors)


def test_the_last_words_of_a_rank_are_written_even_while_it_reads_other_boards() -> None:
    reading, go_on = threading.Event(), threading.Event()

    class SlowStore(dist.HashStore):  # type: ignore[misc]  # the stub has no such class
        def multi_get(self, keys: list[str]) -> list[bytes]:
            reading.set()
            assert go_on.wait(20)
            return [bytes(len(Board().content()) + 8)]

    store, own = SlowStore(), Board()
    mirror = BoardMirror(store, 0, own, {1: Board()})
    mirror.start()
    mirror._wake.set()
    assert reading.wait(20)
    own.error = "host memory: found none"
    mirror._over.set()  # as `stop` does
    go_on.set()
    mirror.stop()
    assert b"host memory: found none" in store.get("0")


def test_a_store_that_is_gone_makes_the_others_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_mirror, "_EVERY_S", 0.02)
    monkeypatch.setattr(board_mirror, "_FLUSH_S", 0.1)
    gone = threading.Event()

    def answer(*_: object) -> list[bytes]:
        if gone.is_set():
            raise dist.DistNetworkError("Connection reset by peer")
        return [time.monotonic_ns().to_bytes(8, "little") + Board().content()]

    mirror = BoardMirror(SimpleNamespace(set=answer, multi_get=answer), 0, Board(), {1: Board()})
    mirror.start()
    time.sleep(0.4)
    assert mirror.silence_s(1) < 0.3
    gone.set()
    time.sleep(0.5)
    assert mirror.silence_s(1) > 0.3
    mirror.flush()  # returns although nothing can be written
    mirror.stop()


def test_a_rank_of_another_host_is_lost_when_its_board_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranks, "_LOOKING_S", 0.0)
    monkeypatch.setattr(ranks, "_SILENT_S", 0.1)
    assert of_two_hosts(mirror=SilentMirror()).lost("GW1f.m0") is None
    one = of_two_hosts(mirror=SilentMirror(3))
    assert str(one.lost("GW1f.m0")) == (
        f"GW1f.m0 on lane exchange of rank 0: rank 3 (process {os.getpid()} on host 1, two) does"
        " not answer, between ops"
    )
    one._boards[2].error = "interrupted"
    assert str(one.lost("GW1f.m0")) == (
        f"rank 2 (process {os.getpid()} on host 1, two) has stopped: interrupted"
    )


def test_a_step_on_gpus_ends_the_process_if_another_host_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended, over = list[RankLost](), threading.Event()
    monkeypatch.setattr(ranks, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(ranks, "_end_process", lambda error: (ended.append(error), over.set()))
    one = of_two_hosts(timeout_s=0.2, mirror=SilentMirror(2))
    with one.watched(torch.device("cuda")):
        assert over.wait(20)
    (error,) = ended
    assert "rank 2 (process" in str(error)
    assert "on host 1, two) does not answer" in str(error)


@pytest.mark.parametrize(
    ("hosts", "here", "message"),
    [
        (2, "4", r"ranks of this host: found 4 \(LOCAL_WORLD_SIZE\); allowed: 2, .*2 hosts; .*"
         "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d .* on each host"),
        (1, "2", r"found 2 \(LOCAL_WORLD_SIZE\); allowed: 4, because the plan is for one host; .*"
         "--standalone --nproc-per-node 4 .*, or set hosts in the plan"),
        (2, "none", "LOCAL_WORLD_SIZE: found 'none'"),
    ],
)  # fmt: skip
def test_ranks_that_are_divided_over_hosts_in_another_way_are_refused(
    executable: Callable[..., Plan],
    monkeypatch: pytest.MonkeyPatch,
    hosts: int,
    here: str,
    message: str,
) -> None:
    plan = executable("overlapped", gpus=4, hosts=hosts, accumulation=4)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
    with pytest.raises(UserError, match=message):
        check_started(plan)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(4 // hosts))
    check_started(plan)
