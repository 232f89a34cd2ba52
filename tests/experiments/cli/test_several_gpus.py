"""Tests of `--gpus`: what is left open is chosen for all GPUs, and in the same way by all verbs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from short_model import checked, out

from megatrain.experiments.cli import main as cli
from megatrain.experiments.cli.verdict import layout
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.schedule.plan import Plan

MODEL = ("config.json", "--hardware", "h200")
ROWS = ("--batch", "8", "--seq", "1024")
LONG = ("--batch", "1", "--seq", "16384")

pytestmark = pytest.mark.usefixtures("short_config", "without_advice")


@pytest.fixture(autouse=True)
def as_much_for_four_gpus_as_for_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL takes the memory of two GPUs, for which the limits of these tests are."""
    monkeypatch.setattr(
        HardwareSpec, "collectives", lambda self, gpus: self.collective_bytes if gpus > 1 else 0
    )


def limits(device: str, host: str) -> tuple[str, ...]:
    return ("--device-memory", device, "--host-memory", host)


@pytest.mark.parametrize(
    ("words", "one", "several"),
    [
        (
            (*ROWS, *limits("5GiB", "0.5GiB"), "--state", "any"),
            {"state": "master24"},
            {"state": "exact"},
        ),
        (
            (*LONG, *limits("3.8GiB", "16GiB")),
            {"token_piece": None, "loss_chunk": 4096},
            {"token_piece": 2048, "loss_chunk": 1024},
        ),
    ],
    ids=["state", "piece and chunk"],
)
@pytest.mark.usefixtures("searched_once")
def test_the_workload_is_chosen_for_all_gpus(
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    one: dict[str, Any],
    several: dict[str, Any],
) -> None:
    """The verdict of `check` is on one GPU, and its part on four is that of `plan --gpus 4`."""
    out(capsys, "plan", *MODEL, *words, "--gpus", "4", "--out", "plan.toml")
    plan = Plan.load(Path("plan.toml"))
    assert plan.prediction
    verdict = checked(capsys, *MODEL, *words, "--gpus", "4")
    alone = checked(capsys, *MODEL, *words)
    shared = verdict["multi_gpu"]
    assert verdict["workload"] == alone["workload"]
    assert {name: alone["workload"][name] for name in one} == one
    assert {name: getattr(plan.workload, name) for name in several} == several
    assert {name: shared["workload"][name] for name in several} == several
    assert shared["feasible"]
    assert shared["step_seconds"] == plan.prediction.step_seconds
    printed = " ".join(out(capsys, "check", *MODEL, *words, "--gpus", "4").split())
    chosen = "--state exact" if "state" in several else "--token-piece 2048"
    assert f" a step with {chosen} (" in printed


def test_the_memory_for_exchanges_is_written_like_other_sizes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out(capsys, "plan", *MODEL, *ROWS, "--gpus", "2", "--out", "plan.toml")
    for text, size in (("64KiB", 2**16), ("0", 0)):
        change = ("--set", f"exchange_bytes={text}")
        out(capsys, "plan", "--from", "plan.toml", *change, "--out", "new.toml")
        assert Plan.load(Path("new.toml")).knobs.exchange_bytes == size


def test_options_that_are_named_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*LONG, *limits("5GiB", "16GiB"), "--token-piece", "4096", "--loss-chunk", "512")
    verdict = checked(capsys, *MODEL, *words, "--gpus", "4")
    found = verdict["multi_gpu"]["workload"]
    assert (found["token_piece"], found["loss_chunk"]) == (4096, 512)


@pytest.mark.parametrize(
    ("memory", "one", "several"),
    [(limits("3.1GiB", "16GiB"), 8, 4), (limits("4.5GiB", "0.7GiB"), 4, 8)],
    ids=["smaller", "larger"],
)
def test_the_micro_batch_is_the_largest_that_fits_all_gpus(
    capsys: pytest.CaptureFixture[str], memory: tuple[str, ...], one: int, several: int
) -> None:
    verdict = checked(capsys, *MODEL, *memory, "--gpus", "4")
    shared = verdict["multi_gpu"]
    assert (verdict["workload"]["batch"], shared["workload"]["batch"]) == (one, several)
    assert shared["feasible"]
    out(capsys, "plan", *MODEL, *memory, "--gpus", "4", "--out", "plan.toml")
    plan = Plan.load(Path("plan.toml"))
    assert plan.prediction
    assert plan.workload.batch == several
    assert shared["step_seconds"] == plan.prediction.step_seconds
    words = ("--batch", str(2 * several), "--gpus", "4", "--out", "plan.toml")
    assert cli.main(["plan", *MODEL, *memory, *words]) == 3
    capsys.readouterr()
    printed = " ".join(out(capsys, "check", *MODEL, *memory, "--gpus", "4").split())
    assert f" a step with --batch {several} (" in printed


@pytest.mark.parametrize(
    ("memory", "one", "several"),
    [(limits("3.1GiB", "16GiB"), 8, 4), (limits("4.5GiB", "0.7GiB"), 1, 8)],
    ids=["smaller", "larger"],
)
def test_a_split_that_does_not_fit_all_gpus_or_one_is_replaced(
    capsys: pytest.CaptureFixture[str], memory: tuple[str, ...], one: int, several: int
) -> None:
    words = (*MODEL, *memory, "--tokens-per-step", "8192")
    assert cli.main(["check", *words, "--gpus", "4", "--json"]) == 0, "N GPUs fit it"
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["workload"]["batch"] == one
    out(capsys, "plan", *words, "--gpus", "4", "--out", "plan.toml")
    work = Plan.load(Path("plan.toml")).workload
    assert (work.batch, work.accumulation) == (several, 4 * 8 // several)
    shared = verdict["multi_gpu"]["workload"]
    assert (shared["batch"], shared["accumulation"]) == (work.batch, work.accumulation)


def test_what_neither_one_gpu_nor_several_fit_names_the_need_of_both(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("check", *MODEL, *limits("1GiB", "0.5GiB"), "--gpus", "4")
    assert cli.main([*words, "--json"]) == 3
    shared = json.loads(capsys.readouterr().out)["multi_gpu"]
    assert shared["host_limit_bytes"] == 2**29
    assert cli.main(list(words)) == 3
    printed = " ".join(capsys.readouterr().out.split())
    ram, vram = (layout.size(shared[f"{place}_peak_bytes"]) for place in ("host", "device"))
    needs = f"{ram} of RAM (512 MiB given) and {vram} of VRAM of each GPU (1 GiB given)"
    assert f"4 GPUs DOES NOT FIT: the nearest plan needs {needs}" in printed


def test_a_plan_for_one_gpu_has_the_default_batch(capsys: pytest.CaptureFixture[str]) -> None:
    out(capsys, "plan", *MODEL, "--out", "plan.toml")
    assert Plan.load(Path("plan.toml")).workload.batch == 32


def test_gpus_without_a_model_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--hardware", "h200", "--gpus", "4"]) == 2
    assert "--gpus: found 4 without MODEL; allowed: one GPU" in capsys.readouterr().err


def test_the_split_of_a_step_is_that_of_one_gpu_and_the_chunk_that_of_all(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("--seq", "16384", "--tokens-per-step", "32768", *limits("3.8GiB", "16GiB"))
    out(capsys, "plan", *MODEL, *words, "--gpus", "4", "--out", "plan.toml")
    plan = Plan.load(Path("plan.toml"))
    verdict = checked(capsys, *MODEL, *words, "--gpus", "4")
    shared = verdict["multi_gpu"]["workload"]
    for name in ("batch", "accumulation", "token_piece", "loss_chunk"):
        assert shared[name] == getattr(plan.workload, name)
    assert plan.workload.accumulation == 4 * verdict["workload"]["accumulation"]


def test_a_step_that_cannot_be_shared_has_the_workload_of_one_gpu(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = (*ROWS, *limits("5GiB", "16GiB"), "--clipping", "layer", "--gpus", "4")
    verdict = checked(capsys, *MODEL, *words, status=3)
    assert verdict["feasible"], "one GPU can train it"
    assert "data parallel" in verdict["multi_gpu"]["note"]
    assert verdict["multi_gpu"]["workload"] is None
    assert cli.main(["plan", *MODEL, *words, "--out", "plan.toml"]) == 2
    refusal = verdict["multi_gpu"]["refused"]
    assert f": {refusal}\n" in capsys.readouterr().err
    assert "clipping: found layer; allowed: global" in refusal


def test_if_no_format_fits_the_gpus_the_plan_is_refused_for_its_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One GPU would need a smaller format, with which GPUs cannot share a step."""
    words = (*ROWS, *limits("3GiB", "2GiB"), "--state", "any")
    verdict = checked(capsys, *MODEL, *words, "--gpus", "4", status=3)
    assert verdict["workload"]["state"] == "master24"
    assert not verdict["multi_gpu"]["refused"]
    assert not verdict["multi_gpu"]["feasible"]
    assert cli.main(["plan", *MODEL, *words, "--gpus", "4", "--out", "plan.toml"]) == 3
    assert "found no plan that fits" in capsys.readouterr().err
    assert not Path("plan.toml").exists()


@pytest.mark.parametrize(
    ("words", "status", "first", "second"),
    [
        ((*ROWS, *limits("5GiB", "16GiB")), 0, "fits on 4 GPUs: {speed} tokens/s", "fits"),
        (
            limits("1GiB", "0.5GiB"),
            3,
            "does not fit on 4 GPUs: the nearest plan needs ",
            "does not fit",
        ),
        (
            (*ROWS, *limits("5GiB", "16GiB"), "--optimizer", "muon"),
            3,
            "with optimizer muon cannot be shared by 4 GPUs",
            "fits",
        ),
    ],
    ids=["fits", "too little memory", "refused"],
)
def test_the_first_line_answers_for_all_gpus(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], status: int, first: str, second: str
) -> None:
    command = ("check", *MODEL, *words, "--gpus", "4")
    ended = cli.main([*command, "--json"])
    speed = json.loads(capsys.readouterr().out)["multi_gpu"]["tokens_per_second"]
    assert cli.main(list(command)) == ended == status
    printed = " ".join(capsys.readouterr().out.split())
    answer = "NO" if status else "YES"
    found = re.match(
        rf"{answer} Full fine-tuning of [^()]*\([^()]*\)[^()]*? (.*?)\. It (.*?) on ", printed
    )
    assert found
    assert found[1].startswith(first.format(speed=layout.speed(speed)))
    assert found[2] == second
