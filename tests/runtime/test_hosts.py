"""Tests of plans for several hosts. The ranks of all hosts are on this machine, with gloo."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from started_ranks import Driver

from megatrain.experiments.ranks import main
from megatrain.simulator.schedule.plan import Placement, Plan

CASES: dict[str, dict[str, Any]] = {
    "in their order": {"accumulation": 4, "dtype": "fp32"},
    "groups in pieces": {
        "accumulation": 8,
        "sum_group": 2,
        "micro_batch_group": 2,
        "exchange_bytes": 2**15,
        "placement": Placement(weights="e,0", master_low="0-1", moments="1,h", gradients="0,2"),
    },
}


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    made = Driver(tmp_path_factory.mktemp("ranks"))
    yield made
    made.close()


@pytest.fixture
def saved_plan(executable: Callable[..., Plan], tmp_path: Path) -> Callable[..., str]:
    """Returns a function that saves a plan of `overlapped` and returns its path."""

    def make(name: str, **changes: Any) -> str:
        path = tmp_path / f"{name}.toml"
        executable("overlapped", layers=3, **changes).save(path)
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


@pytest.mark.parametrize(("count", "hosts"), [(2, 2), (4, 2), (4, 4)])
def test_hosts_give_the_bits_of_one_process(
    driver: Driver,
    saved_plan: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    count: int,
    hosts: int,
) -> None:
    """Losses, norms and masters of three steps have the same bits on any number of hosts."""
    plans = [
        saved_plan(f"{hosts}-{name}", gpus=count, hosts=hosts, **case)
        for name, case in CASES.items()
    ]
    driver.start([[[plan] for plan in plans]] * count)
    for name, case in CASES.items():
        assert main([saved_plan(name, **case)]) == 0
    alone = results(capsys.readouterr().out)
    assert driver.wait() == [0] * count, driver.printed(0)
    assert results(driver.printed(0)) == alone
    assert len({row["masters"] for row in alone if "masters" in row}) == len(CASES)
