"""Tests of `megatrain train` with a plan for several hosts. The ranks of all hosts are on this
machine, with gloo, and each host has its `torchrun`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from started_ranks import Agents, Driver

from megatrain.experiments.cli import main as cli
from megatrain.runtime.checkpoint.checkpoint import verify
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule.plan import Placement, Plan

WORDS = (
    *("--data", "corpus", "--init", "random", "--device", "cpu", "--lr", "1e-2"),
    *("--save-every", "2", "--keep-last", "9"),
)


@pytest.fixture
def plans(workplace: Path, make_plan: Callable[..., Plan]) -> Path:
    """Makes the plans `1.toml`, `2x1.toml` and `2x2.toml` of one workload in the workplace."""
    for name, gpus, hosts, placed in (
        ("1", 1, 1, {"weights": "h"}),
        ("2x1", 2, 2, {"weights": "0,h", "moments": "all", "gradients": "e"}),
        ("2x2", 4, 2, {"weights": "all", "gradients": "all"}),
    ):
        plan = make_plan(
            "overlapped",
            layers=3,
            gpus=gpus,
            hosts=hosts,
            accumulation=8,
            sum_group=2,
            micro_batch_group=2,
            sequence=16,
            vocabulary=272,
            dtype="fp32",
            placement=Placement(**placed),
        )
        plan = msgspec.structs.replace(plan, digest=lower(plan).digest, hardware="h200")
        plan.save(workplace / f"{name}.toml")
    return workplace


def metrics(run: str) -> list[dict[str, Any]]:
    """Returns the rows of a run's metrics, without times and the digest of the schedule."""
    rows = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    left_out = ("seconds", "tokens_per_second", "schedule", "check")
    return [{key: row[key] for key in row if key not in left_out} for row in rows]


@pytest.mark.parametrize(
    ("name", "per_host", "forked"),
    [
        ("2x1", 1, True),
        pytest.param("2x1", 1, False, marks=pytest.mark.nightly),
        pytest.param("2x2", 2, False, marks=pytest.mark.nightly),
    ],
)
def test_two_hosts_are_one_run_that_one_process_resumes(
    plans: Path, driver: Driver, name: str, per_host: int, forked: bool
) -> None:
    """Losses, norms and the exported model have the same bits as those of one process.

    The normal test forks each `torchrun` and its ranks, which saves the imports of PyTorch.
    """
    words = ("train", f"{name}.toml", "--out", "two", *WORDS, "--steps", "4")
    with Agents(plans, 2, per_host) as agents:
        if forked:
            driver.torchruns(plans, 2, per_host, *words)
        else:
            agents.start("megatrain", *words)
        assert cli.main(["train", "1.toml", "--out", "alone", *WORDS, "--steps", "4"]) == 0
        if forked:
            statuses = driver.wait()
            printed = (driver.printed(0) + driver.printed(1)).splitlines()
        else:
            statuses, printed = agents.wait(120), agents.printed()
        assert statuses == [0, 0], printed
        assert not agents.left()
        assert sum("step 4/4" in line for line in printed) == 1, "rank 0 alone reports"
    shutil.copytree("two", "to-one")
    assert cli.main(["train", "1.toml", "--resume", "to-one", "--from-step", "2"]) == 0
    expected = metrics("alone")
    assert len(expected) == 4
    for run in ("two", "to-one"):
        assert metrics(run) == expected
        model = max(Path(run).glob("model*/model.safetensors"))
        assert model.read_bytes() == Path("alone/model/model.safetensors").read_bytes()
    assert len(verify(Path("two/checkpoints/step-00000002")).shards) == 2 * per_host
    assert [path.name for path in Path("two").iterdir() if path.name.startswith(".")] == []


@pytest.mark.nightly
def test_a_killed_rank_of_the_other_host_ends_torchrun_on_all(plans: Path) -> None:
    """Each remaining rank prints at most one line, and on each host one names the killed rank. No
    process is left, and the checkpoint is whole.
    """
    words = ("2x2.toml", "--out", "run", *WORDS, "--steps", "100000")
    with Agents(plans, 2, 2) as agents:
        agents.start("megatrain", "train", *words)
        end = time.monotonic() + 120
        while not Path("run/checkpoints/step-00000002").is_dir():
            assert time.monotonic() < end, agents.printed()
            time.sleep(0.05)
        ranks = agents.ranks()
        assert sorted(ranks) == [0, 1, 2, 3]
        os.kill(ranks[3].pid, signal.SIGKILL)
        killed = time.monotonic()
        assert agents.wait(60) == [1, 1]
        assert time.monotonic() - killed < 50, "before the time limit of a collective"
        assert not agents.left()
        lines = [
            [line for line in agents.printed(host) if line.startswith("megatrain: ")]
            for host in (0, 1)
        ]
    lost = f"rank 3 (process {ranks[3].pid} on host 1, "
    for host in (0, 1):
        # torchrun ends the second rank of a host as soon as the first has ended
        assert 1 <= len(lines[host]) <= 2 - host, lines
        assert any(lost in line for line in lines[host]), lines
    verify(max(Path("run/checkpoints").glob("step-*")))
