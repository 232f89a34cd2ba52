"""Tests of plans for several GPUs, executed by ranks on the CPU with gloo.

Ranks have the bits of one GPU. Other tests are of refusals, and of killed or stopped ranks.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from reference_step import Reference
from started_ranks import Driver
from whole_models import model_of

from megatrain.experiments import ranks as ranks_program
from megatrain.experiments.baselines import fsdp2
from megatrain.experiments.ranks import batches_of, main
from megatrain.runtime import machine
from megatrain.runtime.batch import Batch
from megatrain.runtime.execution.executor import Executor
from megatrain.runtime.execution.preflight import preflight
from megatrain.runtime.files.model_files import random_weights
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.machine import default_device
from megatrain.runtime.optimizer.adamw import row_sums, sum_of_rows, sum_of_squares
from megatrain.runtime.optimizer.settings import AdamW
from megatrain.runtime.ranks import RankLost, Ranks, WithoutPlan, identity, joined, joining
from megatrain.runtime.ranks.rank_board import Board
from megatrain.runtime.training.evaluating import same_batches
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule.arithmetic import NORM_ROW
from megatrain.simulator.schedule.plan import Placement, Plan
from megatrain.simulator.schedule.timeline import Timeline

CPU = torch.device("cpu")
SETTINGS = AdamW(max_norm=0.05, weight_decay=0.1)
"""The optimizer settings of `megatrain.experiments.ranks` and of the sessions."""
CASES: dict[str, dict[str, Any]] = {
    "in their order": {"accumulation": 4, "dtype": "fp32"},
    "groups, with all state on the device": {
        "accumulation": 8,
        "sum_group": 2,
        "micro_batch_group": 2,
        "dtype": "fp32",
        "exchange_bytes": 2**30,  # in one piece
        "placement": Placement(weights="all", moments="all", gradients="all"),
    },
    "one group a rank": {
        "accumulation": 4,
        "sum_group": 2,
        "micro_batch_group": 2,
        "weight_slots": 1,
        "gradient_slots": 3,
        "state_slots": 1,
        "chunk_bytes": 2**14,
        "exchange_bytes": 2**15,
        "placement": Placement(weights="e,0", master_low="0-1", moments="1,h", gradients="0,2"),
    },
    "tied": {
        "accumulation": 4,
        "tied": True,
        "dtype": "fp32",
        "vocabulary": 272,
        "exchange_bytes": 2**15,
        "placement": Placement(weights="e,1", gradients="e,0"),
    },
    "other layers": {
        "accumulation": 2,
        "family": "qwen2",
        "vocabulary": 272,
        "documents": True,
        "checkpoint_interval": 2,
        "placement": Placement(
            saved_activations="0", offloaded_inputs="all", moments="all", master_low="all"
        ),
    },
    "experts and their loss": {
        "model": model_of(
            "mixtral", num_hidden_layers=2, output_router_logits=True, router_aux_loss_coef=0.7
        ),
        "accumulation": 4,
        "dtype": "fp32",
        "placement": Placement(saved_activations="0"),
    },
    "experts drawn at random": {
        "model": model_of("phimoe", num_hidden_layers=2),
        "accumulation": 8,
        "sum_group": 2,
        "micro_batch_group": 2,
        "device_limit_bytes": 2**26,
    },
}
FOR_ALL_COUNTS = (
    "in their order",
    "groups, with all state on the device",
    "tied",
    "experts drawn at random",
)


WITH_SEVERAL_HOSTS = ("in their order", "one group a rank")
"""Cases that the normal tests run with a rank on each of two hosts."""


@pytest.fixture
def saved_plan(executable: Callable[..., Plan], tmp_path: Path) -> Callable[..., str]:
    """Returns a function that saves a plan of `overlapped` and returns its path."""

    def make(name: str, **changes: Any) -> str:
        path = tmp_path / f"{name}.toml"
        layers = {} if "model" in changes else {"layers": 3}
        executable("overlapped", **layers, **changes).save(path)
        return str(path)

    return make


def results(text: str) -> list[dict[str, Any]]:
    """Returns the rows of JSON that a run prints, without times and memory."""
    rows = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return [
        {key: value for key, value in row.items() if key != "seconds"}
        for row in rows
        if "device_peak_bytes" not in row
    ]


@pytest.mark.parametrize(
    ("count", "names"),
    [
        (2, [name for name in CASES if name not in WITH_SEVERAL_HOSTS]),
        pytest.param(2, WITH_SEVERAL_HOSTS, marks=pytest.mark.nightly),
        pytest.param(4, FOR_ALL_COUNTS, marks=pytest.mark.nightly),
    ],
    ids=["2", "2-others", "4"],
)
def test_ranks_give_the_bits_of_one_gpu(
    driver: Driver,
    saved_plan: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    count: int,
    names: Sequence[str],
) -> None:
    """Losses, norms and masters of three steps have the same bits with any number of ranks."""
    plans = [saved_plan(f"{count}-{name}", gpus=count, **CASES[name]) for name in names]
    driver.start([[[plan] for plan in plans]] * count)
    for name in names:
        assert main([saved_plan(name, **CASES[name])]) == 0
    alone = results(capsys.readouterr().out)
    assert driver.wait() == [0] * count, driver.printed(0)
    assert results(driver.printed(0)) == alone
    assert len({row["masters"] for row in alone if "masters" in row}) == len(names)
    assert "step" not in driver.printed(1), "one rank reports"


@pytest.mark.parametrize(
    ("count", "hosts"), [(2, 2), (4, 2), pytest.param(4, 4, marks=pytest.mark.nightly)]
)
def test_ranks_of_several_hosts_give_the_bits_of_one_gpu(
    driver: Driver,
    saved_plan: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    count: int,
    hosts: int,
) -> None:
    """The ranks of all hosts are on this machine. They only know each other by the network."""
    names = WITH_SEVERAL_HOSTS if count == 2 else ("in their order", "groups in pieces")
    cases = {**CASES, "groups in pieces": {**CASES["one group a rank"], "accumulation": 8}}
    plans = [saved_plan(f"{name}-hosts", gpus=count, hosts=hosts, **cases[name]) for name in names]
    driver.start([[[plan] for plan in plans]] * count)
    for name in names:
        assert main([saved_plan(name, **cases[name])]) == 0
    alone = results(capsys.readouterr().out)
    assert driver.wait() == [0] * count, driver.printed(0)
    assert results(driver.printed(0)) == alone


def test_ranks_run_a_baseline_on_the_micro_batches_of_a_plan(
    driver: Driver, saved_plan: Callable[..., str]
) -> None:
    """Each rank has its micro-batches. Rank 0 prints the mean loss of all ranks."""
    plan = saved_plan("baseline", gpus=2, accumulation=4, vocabulary=64)
    options = [plan, "--system", "fsdp2", "--steps", "2"]
    driver.start([[options]] * 2)
    assert driver.wait() == [0, 0], driver.printed(0)
    rows = [json.loads(row) for row in driver.printed(0).splitlines() if row.startswith("{")]
    assert rows[0]["system"] == "fsdp2"
    steps = [row for row in rows if "step" in row]
    assert [row["step"] for row in steps] == [1, 2]
    for row in steps:
        assert row["loss"] == pytest.approx(math.log(64), rel=0.2), "of random weights"
        assert 0 < row["seconds"] == pytest.approx(sum(row["parts"].values()))
    assert len(rows[-1]["host_peak_bytes"]) == 2
    assert "step" not in driver.printed(1), "one rank reports"


@pytest.mark.parametrize(
    ("gpus", "options", "message"),
    [
        (1, ["zero3"], "--system zero3: found "),
        (2, ["fsdp2"], "ranks: found 1; allowed: 2, the GPUs of the plan;"),
        (1, ["fsdp2", "--no-digest"], "--no-digest: found --system fsdp2; allowed: --system ours;"),
        (1, ["fsdp2", "--rate", "1"], "--rate: found --system fsdp2; allowed: --system ours;"),
        (1, ["fsdp2", "--deterministic"], "--deterministic: found --system fsdp2; allowed: "),
    ],
)
def test_a_baseline_that_cannot_run_is_one_line(
    saved_plan: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    gpus: int,
    options: list[str],
    message: str,
) -> None:
    assert main([saved_plan("plan", gpus=gpus, accumulation=gpus), "--system", *options]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"megatrain: {message}")
    assert captured.err.count("\n") == 1
    assert not captured.out


def test_an_error_of_a_baseline_is_one_line(
    saved_plan: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: out of memory\nand advice")

    monkeypatch.setattr(fsdp2, "prepare", fail)
    assert main([saved_plan("plan"), "--system", "fsdp2"]) == 1
    assert capsys.readouterr().err == (
        "megatrain: --system fsdp2: RuntimeError: CUDA error: out of memory\n"
    )


def test_ranks_have_the_allocator_of_a_training_run(
    saved_plan: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a plan that fills a GPU may run out of memory because of fragmentation."""
    for name in machine._ALLOCATOR:
        monkeypatch.setenv(name, "")  # so the test's end removes it again
        monkeypatch.delenv(name)
    assert main([saved_plan("one", accumulation=1), "--steps", "1", "--no-digest"]) == 0
    assert os.environ[machine._ALLOCATOR[0]] == "expandable_segments:True"


@pytest.mark.parametrize("words", [[], ["--deterministic"]])
def test_ranks_use_deterministic_kernels_if_they_are_told_to(
    saved_plan: Callable[..., str], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    calls = list[str]()
    monkeypatch.setattr(ranks_program, "make_deterministic", lambda: calls.append("made"))
    assert main([saved_plan("one", accumulation=1), "--steps", "1", "--no-digest", *words]) == 0
    assert calls == (["made"] if words else [])


def test_memory_of_each_rank_and_the_timeline_of_rank_0(
    driver: Driver, saved_plan: Callable[..., str], tmp_path: Path
) -> None:
    plan, timeline = saved_plan("two", gpus=2, **CASES["in their order"]), tmp_path / "last.json"
    driver.start([[[plan, "--steps", "2", "--no-digest", "--timeline", str(timeline)]]] * 2)
    assert driver.wait() == [0, 0], driver.printed(0)
    *steps, peaks = (
        json.loads(line) for line in driver.printed(0).splitlines() if line.startswith("{")
    )
    assert [row["step"] for row in steps] == [1, 2]
    assert all(len(peaks[f"{place}_peak_bytes"]) == 2 for place in ("device", "host"))
    assert min(peaks["device_peak_bytes"]) > 0
    measured = Timeline.load(timeline)
    assert measured.digest == lower(Plan.load(Path(plan))).digest
    assert 0 < measured.makespan_ns < steps[-1]["seconds"] * 1e9


@pytest.mark.nightly
def test_torchrun_starts_the_ranks(
    saved_plan: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    case = CASES["in their order"]
    assert main([saved_plan("one", **case)]) == 0
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    outcome = subprocess.run(
        [sys.executable, *words, "megatrain.experiments.ranks", saved_plan("two", gpus=2, **case)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert results(outcome.stdout) == results(capsys.readouterr().out)


def test_a_rank_with_another_plan_is_refused(
    driver: Driver, saved_plan: Callable[..., str]
) -> None:
    """Every rank refuses in one line, before it allocates anything."""
    plan = saved_plan("plan", gpus=2, accumulation=2)
    other = saved_plan("other", gpus=2, accumulation=2, loss_chunk=13)
    driver.start([[[plan]], [[other]]])
    assert driver.wait() == [2, 2]
    for rank in range(2):
        assert results(driver.printed(rank)) == []
        lines = [
            line for line in driver.printed(rank).splitlines() if line.startswith("megatrain: ")
        ]
        mine, theirs = (identity(Plan.load(Path(each)))["plan"] for each in (plan, other))
        assert lines == [
            f"megatrain: ranks: plan: found {theirs} on rank 1;"
            f" allowed: {mine}, as on rank 0; fix: start all"
            " ranks with the same plan, settings and version"
        ]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--steps", "0"], "--steps: found '0'; allowed: a whole number >= 1"),
        (["--rate", "nan"], "--rate: found 'nan'; allowed: a number >= 0"),
        (["--timeout", "-1"], "--timeout: found '-1'; allowed: a number >= 0.1"),
        (["--gpus"], "megatrain.experiments.ranks: found --gpus; allowed: an option"),
        (["--timeline", "."], ".: found a folder; allowed: a file to write"),
    ],
)
def test_wrong_options_are_refused_in_one_line(
    saved_plan: Callable[..., str], capsys: pytest.CaptureFixture[str], words: list[str], line: str
) -> None:
    assert main([saved_plan("plan"), *words]) == 2
    shown = capsys.readouterr()
    assert not shown.out
    (printed,) = shown.err.splitlines()
    assert printed.startswith(f"megatrain: {line}")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--rate", "0.5"], "rate: found 0.5 on rank 1; allowed: 0.01, as on rank 0"),
        (["--steps", "2"], "steps: found 2 on rank 1; allowed: 3, as on rank 0"),
    ],
)
def test_a_rank_with_another_rate_or_other_steps_is_refused(
    driver: Driver, saved_plan: Callable[..., str], words: list[str], named: str
) -> None:
    plan = saved_plan("plan", gpus=2, accumulation=2)
    driver.start([[[plan]], [[plan, *words]]])
    assert driver.wait() == [2, 2]
    for rank in range(2):
        assert results(driver.printed(rank)) == []
        assert f"megatrain: ranks: {named}" in driver.printed(rank)


def test_what_ranks_compare_has_names() -> None:
    named = identity(WithoutPlan(2), AdamW(max_norm=0.5), {"steps": 3}, "other")
    assert (named["max_norm"], named["steps"], named["setting 3"]) == ("0.5", "3", "'other'")
    assert named["version of PyTorch"] == torch.__version__
    long = [identity(WithoutPlan(2), {"curve": [number] * 200})["curve"] for number in (1, 2)]
    assert {len(text) for text in long} == {16}
    assert long[0] != long[1]


def ranks_with(*others: Any) -> Ranks:
    """Returns rank 0 of several ranks. `values` then has its value and those of the others."""
    found = Ranks(0, 1 + len(others), [0] * (1 + len(others)))
    found.values = lambda value: [value, *others]  # type: ignore[method-assign]
    return found


def test_the_first_value_that_differs_is_named() -> None:
    same = {"data": "1", "steps": "2"}
    ranks_with(same, same).agree(same)
    for other, named in (
        ({"data": "1", "steps": "3"}, "ranks: steps: found 3 on rank 2; allowed: 2, as on rank 0"),
        ({"data": "1"}, "ranks: steps: found none on rank 2; allowed: 2, as on rank 0"),
        ({**same, "seed": "4"}, "ranks: seed: found 4 on rank 2; allowed: none, as on rank 0"),
    ):
        with pytest.raises(UserError, match=f"^{re.escape(named)}; fix: give more$"):
            ranks_with(same, other).agree(same, "give more")


def test_evaluation_batches_are_compared_group_by_group() -> None:
    batches = [Batch(torch.full((1, 4), number), torch.zeros(1, 4).long()) for number in range(5)]

    class Recorder(Ranks):
        def values(self, value: Any) -> list[Any]:
            shown.append(value["evaluation data"])
            return [value, others[len(shown) - 1] if others else value]

    others, shown = list[Any](), list[str]()
    same = Recorder(0, 2, [0, 0])
    assert list(same_batches(batches, 2, same)) == batches
    *groups, last = shown
    assert last == "no more data"
    assert len(set(groups)) == 3
    for changed in (groups[1] + "0", last):
        others, shown = [{"evaluation data": each} for each in (groups[0], changed)], []
        with pytest.raises(UserError, match=r"^ranks: evaluation data: found "):
            list(same_batches(batches, 2, same))
        assert len(shown) == 2


@pytest.mark.parametrize(
    ("sent", "timeout_s", "state"),
    [(signal.SIGKILL, 60, "has ended"), (signal.SIGSTOP, 2, "is stopped")],
)
def test_a_lost_rank_ends_the_others_with_one_line(
    driver: Driver, saved_plan: Callable[..., str], sent: signal.Signals, timeout_s: int, state: str
) -> None:
    """The line names the rank, the op and the lane.

    A stopped rank is noticed after the timeout of a collective.
    """
    plan = saved_plan("plan", gpus=2, accumulation=2)
    run = [[plan, "--steps", "1000000", "--timeout", str(timeout_s)]]
    processes = driver.start([run, run])
    try:
        while not results(driver.printed(0)):
            time.sleep(0.02)
        os.kill(processes[1], sent)
        end = time.monotonic() + 60
        while "megatrain: " not in driver.printed(0):
            assert time.monotonic() < end, "the other rank does not end"
            time.sleep(0.02)
    finally:
        os.kill(processes[1], signal.SIGKILL)
    assert driver.wait() == [1, -signal.SIGKILL]
    (line,) = [line for line in driver.printed(0).splitlines() if line.startswith("megatrain: ")]
    where = r"megatrain: (\S+ on lane exchange of rank 0|rank 0, between steps): rank 1"
    doing = r"(in \S+ on lane \w+( and \S+ on lane \w+)*|between ops)"
    assert re.fullmatch(rf"{where} \(process {processes[1]}\) {state}, {doing}", line)


def test_a_plan_for_several_gpus_needs_its_ranks(
    executable: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = executable("overlapped"), executable("overlapped", gpus=2, accumulation=2)
    with (
        pytest.raises(UserError, match=r"ranks: found 1; allowed: 2, .*--nproc-per-node 2"),
        joined(two, CPU),
    ):
        pass
    with pytest.raises(UserError, match="plan: gpus: found 2; allowed: 1 in a single process"):
        Executor(two, config_of(two.model), SETTINGS, CPU)
    with pytest.raises(UserError, match="plan: gpus: found 2; allowed: 1 in a single process"):
        preflight(two, SETTINGS, CPU)
    preflight(two, SETTINGS, None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(
            UserError, match=r"ranks: found 2 \(WORLD_SIZE\); allowed: 1, .*without torchrun"
        ),
        joined(one, CPU),
    ):
        pass
    for text in ("", "x", "0", "-1", "1.5"):
        monkeypatch.setenv("WORLD_SIZE", text)
        with pytest.raises(UserError, match=f"WORLD_SIZE: found '{text}'"), joined(one, CPU):
            pass


@pytest.mark.parametrize(
    ("name", "text"), [("LOCAL_RANK", "one"), ("LOCAL_RANK", "-1"), ("LOCAL_WORLD_SIZE", "0")]
)
def test_an_invalid_variable_of_torchrun_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv(name, text)
    with pytest.raises(UserError, match=f"{name}: found '{text}'; allowed: a number of at least"):
        default_device()


def test_a_process_without_a_gpu_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """This also holds if torchrun's number of processes is not known."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(UserError, match="ranks: GPUs: found 1; allowed: 2"):
        default_device()


def test_ranks_that_do_not_connect_are_refused(
    executable: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    for name, value in (
        ("WORLD_SIZE", "2"),
        ("RANK", "1"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", str(port)),
    ):
        monkeypatch.setenv(name, value)
    plan = executable("overlapped", gpus=2, accumulation=2)
    with (
        pytest.raises(UserError, match=r"ranks: found fewer than 2 connected ranks on this host"),
        joined(plan, CPU, timeout_s=0.5),
    ):
        pass


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_one_gpu_sums_groups_first_as_the_reference(
    executable: Callable[..., Plan], session: Callable[..., Any], dtype: str
) -> None:
    """Summing groups of two first gives other bits than summing one after the other."""
    changes = {"layers": 2, "accumulation": 6, "micro_batch_group": 2, "dtype": dtype}
    plan = executable("overlapped", sum_group=2, placement=Placement(gradients="e,1"), **changes)
    weights = random_weights(0)
    masters = {
        layer.name: {t.name: weights(layer.name, t.name, t.shape) for t in layer.tensors}
        for layer in plan.model.stack.values()
    }
    config = config_of(plan.model)
    reference = Reference(plan.model, plan.workload, config, SETTINGS, masters, CPU)
    with session(plan) as grouped, session(executable("overlapped", **changes)) as plain:
        for number in (1, 2):
            batches = batches_of(plan, number)
            result = grouped.executor.step(batches, rate=1e-2, number=number)
            plain.executor.step(batches, rate=1e-2, number=number)
            found = (result.loss, result.gradient_norm)
            assert found == reference.step(batches, rate=1e-2, number=number)
        # sums of a few bf16 values are mostly exact in fp32
        assert dtype == "bf16" or grouped.masters() != plain.masters()
        for layer in plan.model.stack.values():
            for name, master in grouped.state.masters(layer).items():
                assert torch.equal(master, reference.masters[layer.name][name])


@pytest.mark.parametrize("elements", [1, NORM_ROW, 5 * NORM_ROW + 64, 8 * NORM_ROW])
def test_rows_of_parts_sum_to_the_squares_of_the_whole(elements: int) -> None:
    whole = torch.randn(elements, generator=torch.Generator().manual_seed(elements))
    part = 2 * NORM_ROW
    sums = []
    for own in whole.split(part):
        rows = torch.zeros(2)
        row_sums(own, rows)
        sums.append(rows)
    rows = torch.cat(sums)[: -(-elements // NORM_ROW)]
    assert sum_of_rows(rows) == sum_of_squares(whole)


def test_only_ranks_that_have_ended_count_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain.runtime.ranks.ranks._LOOKING_S", 0.1)
    assert Ranks(0, 2, [os.getpid(), os.getpid()]).lost("NX") is None


def test_a_rank_that_has_not_reached_a_collective_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that hangs without being stopped is named with the ops of its other lanes."""
    monkeypatch.setattr("megatrain.runtime.ranks.ranks._LOOKING_S", 0.0)
    boards = [Board(), Board()]
    ranks = Ranks(0, 2, [os.getpid(), os.getpid()], boards)
    for board in boards:
        board.begin("exchange", "GW0f.m0")
        board.end("exchange")
    boards[1].begin("compute", "F1.m0")
    boards[1].begin("h2d", "W2f.m0.c0")
    boards[0].begin("exchange", "GW1f.m0")
    lost = ranks.lost("GW1f.m0")
    assert str(lost) == (
        f"GW1f.m0 on lane exchange of rank 0: rank 1 (process {os.getpid()}) has not reached it,"
        " in F1.m0 on lane compute and W2f.m0.c0 on lane h2d"
    )
    boards[1].error = "host memory:\nfound none"
    assert f"rank 1 (process {os.getpid()}) has stopped: host memory: found none" == str(
        ranks.lost("GW1f.m0")
    )


def test_a_failure_between_steps_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain.runtime.ranks.ranks._LOOKING_S", 0.0)
    ranks = Ranks(0, 2, [os.getpid(), os.getpid()])

    def fail() -> None:
        raise RuntimeError("Connection closed by peer\nException raised from read")

    with pytest.raises(RankLost) as lost:
        ranks._finish(SimpleNamespace(is_completed=lambda: True, wait=fail))
    assert str(lost.value) == "rank 0, between steps: Connection closed by peer"


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), RuntimeError("aborted")])
def test_an_error_in_a_step_on_gpus_is_that_of_the_rank_that_ended(
    failure: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(0, 2, [os.getpid(), os.getpid()])
    with pytest.raises(type(failure)), ranks.watched(torch.device("cuda")):
        raise failure
    monkeypatch.setattr(ranks, "_processes", [os.getpid(), 2**22 + 1])  # no such process
    with pytest.raises(RankLost, match=r"rank 1 .* has ended"), ranks.watched(torch.device("cuda")):
        raise failure


def test_the_collectives_of_a_step_on_gpus_are_aborted_when_a_rank_has_ended() -> None:
    aborted = threading.Event()
    group = SimpleNamespace(abort=aborted.set)
    ranks = Ranks(0, 2, [os.getpid(), 2**22 + 1], within=group)  # no such process
    with pytest.raises(RankLost, match=r"rank 1 .* has ended"), ranks.watched(torch.device("cuda")):
        aborted.wait(20)  # as a collective that waits for the rank
    assert aborted.is_set()


@pytest.mark.parametrize("state", ["is stopped", "hangs"])
def test_a_step_on_gpus_ends_the_process_if_another_rank_is_stopped_or_hangs(
    state: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An exception is not enough, because a collective of NCCL waits for the other rank forever."""
    statuses, ended = list[int](), threading.Event()

    def end(status: int) -> None:
        statuses.append(status)
        ended.set()

    monkeypatch.setattr("megatrain.runtime.ranks.ranks.os._exit", end)
    monkeypatch.setattr("megatrain.runtime.ranks.ranks._LOOK_EVERY_S", 0.01)
    boards = [Board(), Board()]
    boards[0].begin("exchange", "GW1f.m0")
    boards[1].begin("compute", "F1.m0")
    with subprocess.Popen(["sleep", "60"]) as other:
        try:
            if state == "is stopped":
                boards[1].begin("exchange", "GW1f.m0")  # the rank has reached the collective
                other.send_signal(signal.SIGSTOP)
            ranks = Ranks(0, 2, [os.getpid(), other.pid], boards, timeout_s=0.3)
            with ranks.watched(torch.device("cuda")):
                assert ended.wait(20)
        finally:
            other.kill()
    assert statuses == [1]
    assert capsys.readouterr().err == (
        f"megatrain: rank 0, in GW1f.m0 on lane exchange: rank 1 (process {other.pid}) {state},"
        " in F1.m0 on lane compute\n"
    )


def test_a_step_on_gpus_waits_for_a_rank_that_is_late_but_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = list[RankLost]()
    monkeypatch.setattr("megatrain.runtime.ranks.ranks._LOOK_EVERY_S", 0.01)
    monkeypatch.setattr("megatrain.runtime.ranks.ranks._end_process", ended.append)
    boards = [Board(), Board()]
    boards[0].begin("exchange", "GW9f.m0")
    ranks = Ranks(0, 2, [os.getpid(), os.getpid()], boards, timeout_s=0.3)
    with ranks.watched(torch.device("cuda")):
        for layer in range(9):
            boards[1].begin("exchange", f"GW{layer}f.m0")
            time.sleep(0.1)
    boards[1].begin("exchange", "GW9f.m0")
    with ranks.watched(torch.device("cuda")):  # both wait for the device
        time.sleep(1.0)
    assert not ended


@pytest.mark.parametrize("state", ["is stopped", "hangs"])
def test_a_rank_may_compile_for_longer_than_the_time_limit(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that is stopped does not compile."""
    over, ended = threading.Event(), list[RankLost]()
    monkeypatch.setattr("megatrain.runtime.ranks.ranks._LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(
        "megatrain.runtime.ranks.ranks._end_process", lambda lost: (ended.append(lost), over.set())
    )
    boards = [Board(), Board()]
    boards[0].begin("exchange", "GW1f.m0")
    boards[1].begin("compute", "F1.m0")
    with subprocess.Popen(["sleep", "60"]) as other:
        try:
            if state == "is stopped":
                other.send_signal(signal.SIGSTOP)
            ranks = Ranks(0, 2, [os.getpid(), other.pid], boards, timeout_s=0.3)
            with ranks.watched(torch.device("cuda"), new=True):
                over.wait(20 if state == "is stopped" else 1.5)
            assert bool(ended) == (state == "is stopped")
            if state == "hangs":
                monkeypatch.setattr("megatrain.runtime.ranks.ranks.NEW_TIMEOUT_S", 0.5)
                with ranks.watched(torch.device("cuda"), new=True):
                    assert over.wait(20), "longer, but not for ever"
        finally:
            other.kill()


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts open files on Linux")
def test_the_file_that_ranks_share_is_closed_at_once_and_removed_at_the_end() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with joining._shared_file() as file:
        assert file.is_file()
        assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert not file.exists()
