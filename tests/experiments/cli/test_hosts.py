"""Tests of `--hosts` and `--network`, and of plans for several hosts in other commands."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from pages import read
from short_model import checked, out

from megatrain.experiments.cli import main as cli
from megatrain.simulator.schedule.plan import Plan

MODEL = ("config.json", "--hardware", "h200", "--batch", "8", "--seq", "1024")
MEASURED = Path(__file__).parents[3] / "experiments/results/h200-qwen2.5-7b-whole/hardware.toml"
SMALL_MACHINE = ("--host-memory", "100MiB", "--device-memory", "5500MiB")
"""One GPU has no room for exact state, and four GPUs have."""
HOSTS = ("--gpus", "4", "--hosts", "2", "--network", "0.5")

pytestmark = pytest.mark.usefixtures("short_config")


def words(text: str) -> str:
    """Returns the text with one space between words."""
    return " ".join(text.split())


def test_check_says_what_the_network_costs(capsys: pytest.CaptureFixture[str]) -> None:
    found = checked(capsys, *MODEL, *HOSTS)["multi_gpu"]
    assert (found["gpus"], found["hosts"], found["network"]["gb_per_s"]) == (4, 2, 0.5)
    faster = checked(capsys, *MODEL, *HOSTS[:-1], "50")["multi_gpu"]
    assert faster["step_seconds"] < found["step_seconds"]
    one_host = checked(capsys, *MODEL, "--gpus", "4")["multi_gpu"]
    assert (one_host["hosts"], one_host["network"]) == (1, None)
    printed = words(out(capsys, "check", *MODEL, *HOSTS))
    assert "4 GPUs 2 hosts of 2 GPUs: " in printed
    assert "; several hosts were not measured; links at " in printed
    assert "Network makes the step " in printed
    received = found["network"]["received_bytes"] / 1e9
    assert f"each host receives {received:,.1f} GB a step, at 0.5 GB/s (assumed)" in printed


def test_a_plan_has_its_hosts_and_network(capsys: pytest.CaptureFixture[str]) -> None:
    """`plan` finds the plan of `check`. Other commands predict it without naming the network."""
    verdict = checked(capsys, *MODEL, *HOSTS)["multi_gpu"]
    printed = words(out(capsys, "plan", *MODEL, *HOSTS, "--out", "plan.toml"))
    assert "fits on 2 hosts of 2 GPUs of H200, each GPU with " in printed
    assert "Network makes the step " in printed
    plan = Plan.load(Path("plan.toml"))
    assert (plan.gpus, plan.hosts, plan.network_gb_per_s) == (4, 2, 0.5)
    assert plan.prediction is not None
    assert plan.prediction.step_seconds == verdict["step_seconds"]
    assert ", 4 GPUs of 2 hosts, schedule" in out(capsys, "simulate", "plan.toml")


@pytest.mark.parametrize(
    "several",
    [
        HOSTS,
        ("--gpus", "2"),
        ("--gpus", "2", "--policy", "overlapped"),
        ("--gpus", "4", *SMALL_MACHINE),
        ("--gpus", "4", "--state", "any", *SMALL_MACHINE),
    ],
    ids=["hosts", "one host", "a policy that shares", "too large for one GPU", "another state"],
)
@pytest.mark.usefixtures("without_advice", "searched_once")
def test_check_says_how_to_write_the_plan_for_several_gpus(
    several: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["check", *MODEL, *several, "--json"])
    verdict = json.loads(capsys.readouterr().out)["multi_gpu"]
    cli.main(["check", *MODEL, *several])
    printed = words(capsys.readouterr().out).replace("\\ ", "")
    command = re.search(
        rf"megatrain (plan config.json [^#]+) # writes the plan for {several[1]} GPUs", printed
    )
    assert command
    out(capsys, *command[1].split())
    plan = Plan.load(Path("several.toml"))
    assert plan.prediction is not None
    assert plan.prediction.step_seconds == verdict["step_seconds"]


@pytest.mark.parametrize("command", [("check",), ("plan", "--out", "plan.toml")])
def test_a_network_needs_several_hosts(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command, *MODEL, "--gpus", "4", "--network", "50"]) == 2
    assert "found 50 and one host" in capsys.readouterr().err
    assert not Path("plan.toml").exists()


def test_host_memory_is_for_each_host(capsys: pytest.CaptureFixture[str]) -> None:
    limit = ("--host-memory", "64GiB")
    out(capsys, "plan", *MODEL, *HOSTS, *limit, "--out", "plan.toml")
    assert Plan.load(Path("plan.toml")).host_limit_bytes == 32 * 2**30
    out(capsys, "plan", *MODEL, "--gpus", "4", *limit, "--out", "plan.toml")
    assert Plan.load(Path("plan.toml")).host_limit_bytes == 16 * 2**30


def test_a_plan_can_be_changed_to_several_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    out(capsys, "plan", *MODEL, "--gpus", "4", "--out", "plan.toml")
    changes = ("--set", "hosts=2", "--set", "network=0.5")
    printed = out(capsys, "plan", "--from", "plan.toml", *changes, "--out", "new.toml")
    assert " on 4 GPUs of 2 hosts; it was " in printed
    before, after = (Plan.load(Path(name)) for name in ("plan.toml", "new.toml"))
    assert (after.hosts, after.network_gb_per_s, after.digest) == (2, 0.5, before.digest)
    assert after.prediction is not None
    assert before.prediction is not None
    assert after.prediction.step_seconds > before.prediction.step_seconds
    one = ("--set", "hosts=1")
    printed = out(capsys, "plan", "--from", "new.toml", *one, "--out", "again.toml")
    assert " on 4 GPUs of 1 host; it was " in printed
    again = Plan.load(Path("again.toml")).prediction
    assert again is not None
    assert again.step_seconds == before.prediction.step_seconds


@pytest.mark.parametrize("verb", ["check", "plan"])
@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--gpus", "4", "--hosts", "3"), "--hosts: found 3 with --gpus 4; allowed: 1 to 4,"),
        (("--hosts", "2"), "--hosts: found 2 with --gpus 1; allowed: 1 to 4,"),
        (("--hosts", "0"), "--hosts: found '0'; allowed: a whole number >= 1"),
        (("--gpus", "4", "--hosts", "2"), "--network: found none, with --hosts 2; allowed: the GB"),
        (
            ("--gpus", "4", "--hosts", "2", "--network", "0"),
            "--network: found '0'; allowed: a number >= 0.001",
        ),
        (("--network", "fast"), "--network: found 'fast'; allowed: a number >= 0.001"),
    ],
)
def test_hosts_that_cannot_be_are_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], verb: str, options: tuple[str, ...], line: str
) -> None:
    target = ("--out", "plan.toml") if verb == "plan" else ()
    assert cli.main([verb, *MODEL, *options, *target]) == 2
    shown = capsys.readouterr()
    assert not shown.out
    (printed,) = shown.err.splitlines()
    assert printed.startswith(f"megatrain: {line}")
    assert not Path("plan.toml").exists()


def test_a_plan_without_a_network_names_the_fix(capsys: pytest.CaptureFixture[str]) -> None:
    out(capsys, "plan", *MODEL, "--gpus", "4", "--out", "plan.toml")
    arguments = ["plan", "--from", "plan.toml", "--set", "hosts=2", "--out", "new.toml"]
    assert cli.main(arguments) == 2
    (printed,) = capsys.readouterr().err.splitlines()
    assert "network_gb_per_s: found no rate, and 2 hosts" in printed
    assert "set network=50 in a plan with `megatrain plan --from`" in printed


def table_of_the_docs() -> list[list[str]]:
    """Returns the cells of the rows of the table in `docs/several_gpus.md`."""
    section = read("docs/several_gpus.md").partition("## Several hosts")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.*) \|$", section, re.MULTILINE)
    return [row.split(" | ") for row in rows if row.startswith(("7B", "32B"))]


@pytest.mark.parametrize(
    ("row", "accumulation"),
    [
        pytest.param(row, count, marks=[] if (row, count) == (3, 1) else pytest.mark.nightly)
        for row in range(8)
        for count in (1, 4)
    ],
)
def test_the_table_of_the_docs_is_what_plan_predicts(
    capsys: pytest.CaptureFixture[str], row: int, accumulation: int
) -> None:
    rows = table_of_the_docs()
    assert len(rows) == 8
    model, rate, speed, step, network, received, speed_of_four, network_of_four = rows[row]
    alone = rate == "one host"
    hosts = () if alone else ("--hosts", "2", "--network", rate)
    printed = words(
        out(
            capsys,
            *("plan", f"qwen2.5-{model.lower()}", "--hardware", "h200", "--gpus", "8", *hosts),
            *("--host-memory", "960GiB" if alone else "480GiB"),
            *("--batch", "32", "--seq", "1024", "--compile"),
            *("--accumulation", str(accumulation), "--out", "plan.toml"),
        )
    )
    longer = network if accumulation == 1 else network_of_four
    expected = speed if accumulation == 1 else speed_of_four
    assert f"Speed {expected} tokens/s" in printed
    assert ("Network" in printed) == (not alone)
    assert alone or f"makes the step {longer} longer" in printed
    if accumulation == 1:
        assert f") {step} a step of 8 x 32 x 1,024 tokens" in printed
        assert alone or f"each host receives {received} a step" in printed


def test_more_gpus_than_a_host_can_have_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    words_ = ("--gpus", "32", "--hosts", "4", "--network", "50", "--host-memory", "480GiB")
    printed = words(out(capsys, "plan", *MODEL, *words_, "--out", "plan.toml"))
    assert "tokens/s" in printed
    assert Plan.load(Path("plan.toml")).gpus == 32
    assert "4 hosts of 8 GPUs" in words(out(capsys, "check", *MODEL, *words_))


def test_several_hosts_have_no_range_on_a_calibrated_machine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for gpus in ("2", "4"):
        printed = words(
            out(
                capsys,
                *(
                    "plan",
                    "qwen2.5-7b",
                    "--hardware",
                    str(MEASURED),
                    "--gpus",
                    gpus,
                    "--hosts",
                    "2",
                ),
                *("--network", "50", "--batch", "32", "--seq", "1024", "--compile"),
                *("--out", f"{gpus}.toml"),
            )
        )
        speed = printed.partition("Speed ")[2]
        assert " to " not in speed.partition(")")[0]
        assert f"so the range for {gpus} on 2 hosts is not known" in speed
