"""Tests of `--token-piece` from the verdict to the trained model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from short_model import shortened

from megatrain.experiments.cli.options import OneLineParser
from megatrain.experiments.cli.verdict import from_options
from megatrain.experiments.commands import check
from megatrain.runtime.files.exported_models import newest_model
from megatrain.simulator.costs import cost_model
from megatrain.simulator.costs.calibrated import Calibrated
from megatrain.simulator.costs.datasheet import Datasheet
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule import has_saved_attention
from megatrain.simulator.schedule.plan import Knobs, Plan

WORK = ("--batch", 2, "--seq", 16, "--loss-chunk", 16, "--dtype", "fp32")
PIECE = ("--token-piece", 5)
LAYERS = 8
LONG = ("check", f"qwen2.5-7b-{LAYERS}.json", "--hardware", "h200", "--host-memory", "512GiB")
Command = Callable[..., Any]


@pytest.fixture(autouse=True)
def short_model(workplace: Path) -> None:
    """Changes into the workplace and writes the config of the model of `LONG`."""
    shortened("qwen2.5-7b", LAYERS, workplace)


def good(outcome: Any) -> str:
    assert (outcome.status, outcome.err) == (0, "")
    return str(outcome.out)


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.usefixtures("without_advice", "searched_once")
def test_the_share_of_attention_is_said_if_it_is_large(command: Command) -> None:
    """It grows with the square of the length, and the rest of a layer with the length."""
    found = {
        sequence: json.loads(good(command(*LONG, "--seq", sequence, "--json")))
        for sequence in (1024, 131072, 524288)
    }
    rest = {
        sequence: each["lane_seconds"]["compute"] - each["attention_seconds"]
        for sequence, each in found.items()
    }
    assert 0 < found[1024]["attention_seconds"] < 0.1 * rest[1024]
    # The shorter plan computes some layers twice.
    assert rest[524288] / rest[131072] < 4.1
    assert found[524288]["attention_seconds"] > 6 * found[131072]["attention_seconds"]
    for sequence, shown in ((1024, False), (131072, True)):
        share = found[sequence]["attention_seconds"] / found[sequence]["step_seconds"]
        line = f"Step GPU computes 100% (attention {share:.0%})"
        assert (line in flat(good(command(*LONG, "--seq", sequence)))) is shown


@pytest.mark.usefixtures("without_advice")
def test_the_share_of_attention_leaves_out_recomputes_that_saved_it(command: Command) -> None:
    words = (*LONG[1:], "--seq", 131072, "--batch", 1)
    found = json.loads(good(command("check", *words, "--json")))
    good(command("plan", *words, "--out", "p.toml"))
    plan = Plan.load(Path("p.toml"))
    recomputes = [op for op in lower(plan).ops if op.kind == "recompute"]
    assert recomputes
    assert all(has_saved_attention(op.shape) for op in recomputes)
    sheet = Datasheet(HardwareSpec.load("h200"), plan.model, plan.workload)
    layer_ns = sum(sheet.attention_ns(kind, "0") for kind in ("forward", "backward"))
    assert found["attention_seconds"] == pytest.approx(LAYERS * layer_ns / 1e9)


@pytest.mark.usefixtures("without_advice")
def test_a_mixture_is_planned_in_pieces(command: Command) -> None:
    words = ("--hardware", "h200", "--host-memory", "1TiB", "--json", "--seq", 524288)
    found = json.loads(good(command("check", shortened("qwen3-30b-a3b", 4), *words)))
    assert (found["feasible"], found["workload"]["batch"]) == (True, 1)
    assert found["workload"]["token_piece"] >= 2048


def namespace_of(*words: object) -> argparse.Namespace:
    """Returns the options of `megatrain check`, with the dtype that it takes."""
    parser = OneLineParser(prog="megatrain check")
    check.describe(parser)
    parser.set_defaults(dtype="bf16")
    return parser.parse_args([str(word) for word in words])


def test_a_run_is_planned_trained_stopped_resumed_and_exported(command: Command) -> None:
    words = ("plan", "tiny", "--hardware", "h200", *WORK)
    planned = " ".join(good(command(*words, *PIECE, "--out", "p.toml")).split())
    assert "layers compute 5 tokens at a time (--token-piece)" in planned
    assert Plan.load(Path("p.toml")).workload.token_piece == 5
    good(command(*words, "--token-piece", 7, "--out", "other.toml"))
    train = ("train", "p.toml", "--data", "corpus", "--device", "cpu", "--save-every", 2)
    # A constant rate does not depend on the number of steps.
    train = (*train, "--schedule.kind", "constant")
    good(command(*train, "--steps", 4, "--out", "straight"))
    good(command(*train, "--steps", 2, "--out", "run"))
    refused = command("train", "other.toml", "--resume", "run", "--steps", 4, "--device", "cpu")
    assert refused.status == 2
    assert "token_piece" in refused.err
    good(command("train", "--resume", "run", "--steps", 4, "--device", "cpu"))
    models = [
        (folder / "model.safetensors").read_bytes()
        for run in ("straight", "run")
        if (folder := newest_model(Path(run)))
    ]
    assert models[0] == models[1]


@pytest.mark.usefixtures("searched_once", "without_advice")
def test_pieces_are_not_chosen_if_one_sequence_fits_as_fast_without(command: Command) -> None:
    short, long, named = (
        json.loads(good(command(*LONG, "--json", "--seq", *words)))
        for words in ((131072,), (524288,), (131072, "--batch", 1, "--token-piece", 4096))
    )
    assert short["workload"]["token_piece"] is None
    assert (long["feasible"], long["workload"]["batch"]) == (True, 1)
    assert long["workload"]["token_piece"] >= 2048
    assert named["workload"]["token_piece"] == 4096
    assert named["longest_context"] > 524288 > short["longest_context"]
    assert short["longest_context_in_pieces"] >= named["longest_context"]
    assert named["longest_context_in_pieces"] is long["longest_context_in_pieces"] is None
    text = good(command(*LONG, "--seq", 131072))
    assert f", {short['longest_context_in_pieces']:,} with --token-piece 2048" in flat(text)
    text = good(command(*LONG, "--seq", 524288))
    assert text.replace("\\\n", "").count(f"--token-piece {long['workload']['token_piece']}") == 2


@pytest.mark.usefixtures("without_advice")
def test_pieces_are_chosen_for_a_long_sequence_if_they_are_faster(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model fits without pieces, but then some layers compute their attention twice."""
    words = ("check", "qwen2.5-0.5b", "--hardware", "rtx4090", "--seq", 262144, "--json")
    chosen = json.loads(good(command(*words)))
    monkeypatch.setattr("megatrain.experiments.cli.verdict.from_options.LONG_SEQUENCE", 2**30)
    whole = json.loads(good(command(*words)))
    assert (whole["feasible"], whole["workload"]["token_piece"]) == (True, None)
    assert chosen["workload"]["token_piece"] >= 2048
    assert chosen["workload"]["batch"] == whole["workload"]["batch"] == 1
    assert 1.1 * chosen["step_seconds"] < whole["step_seconds"]


@pytest.mark.parametrize(
    ("plans", "tried", "chosen"),
    [
        pytest.param(
            {None: (88, 28), 65536: (82, 24), 32768: (81, 20), 16384: (70, 3), 8192: (71, 3)},
            [None, 65536, 32768, 16384, 8192],
            16384,
            id="faster",
        ),
        pytest.param(
            {None: (88, 28), 65536: (82, 24), 32768: (83, 20), 16384: (70, 9), 8192: (71, 9)},
            [None, 65536, 32768, 16384, 8192],
            16384,
            id="less-attention",
        ),
        pytest.param(
            {None: (88, 28), 65536: (82, 24), 32768: (83, 24)},
            [None, 65536, 32768],
            65536,
            id="slower",
        ),
        pytest.param(
            {None: (88, 28), 65536: (82, 24), 32768: (82, 24)},
            [None, 65536, 32768],
            65536,
            id="equal",
        ),
        pytest.param(
            {None: (88, 1), 65536: (80, 0), 32768: (81, 0)},
            [None, 65536, 32768],
            65536,
            id="one-layer",
        ),
        pytest.param({None: (88, 0)}, [None], None, id="no-attention-computed-twice"),
    ],
)
def test_smaller_pieces_are_tried_as_long_as_they_gain(
    plans: dict[int | None, tuple[int, int]],
    tried: list[int | None],
    chosen: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`plans` has the seconds of a step, and the number of layers that compute their attention
    twice, for each piece.
    """
    seen: list[int | None] = []

    def best(args: Any, *_: object) -> Any:
        seen.append(args.token_piece)
        seconds, twice = plans[args.token_piece]
        return SimpleNamespace(feasible=True, step_seconds=seconds, plan=twice)

    monkeypatch.setattr(from_options, "_best", best)
    monkeypatch.setattr(from_options, "_recomputed_attention", lambda plan: plan)
    words = ("qwen2.5-7b", "--hardware", "h200", "--batch", 1, "--seq", 159132)
    hardware, model = HardwareSpec.load("h200"), ModelSpec.load("qwen2.5-7b")
    args = from_options.with_fitting_piece(namespace_of(*words), hardware, model)
    assert (seen, args.token_piece) == (tried, chosen)


@pytest.mark.usefixtures("without_advice")
def test_the_micro_batch_of_pieces_is_the_fastest(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest micro-batch is 32. 4 takes less time per sequence.

    2 is slower, so nothing smaller is tried.
    """
    times = {32: 33.0, 16: 16.4, 8: 8.0, 4: 3.9, 2: 2.1, 1: 0.5}
    batches: list[int] = []

    def choices(args: Any, *_: object) -> list[Any]:
        batches.append(args.batch)
        return [SimpleNamespace(feasible=True, step_seconds=times[args.batch])]

    words = ("check", "qwen2.5-0.5b", "--hardware", "rtx4090", "--seq", 256)
    args = namespace_of(*words[1:], "--token-piece", 128)
    hardware, model = HardwareSpec.load("rtx4090"), ModelSpec.load("qwen2.5-0.5b")
    with monkeypatch.context() as patch:
        patch.setattr(from_options, "choices", choices)
        assert from_options.with_fitting_batch(args, hardware, model).batch == 4
        assert batches == [32, 16, 8, 4, 2]
    monkeypatch.setattr(from_options, "BATCHES", (2, 1))
    text = " ".join(good(command(*words, "--token-piece", 128)).split())
    assert ", the fastest micro-batch up to 32 that fits, MFU " in text


@pytest.mark.usefixtures("without_advice")
def test_compiled_layers_in_pieces_are_planned(command: Command) -> None:
    """Without pieces, compiled layers fit with 524,288 tokens, but not with this many."""
    long = ("--seq", 786432, "--compile", "--json")
    found = json.loads(good(command(*LONG, *long)))
    assert (found["feasible"], found["workload"]["compiled"]) == (True, True)
    assert found["workload"]["token_piece"] >= 2048


def test_a_calibration_has_no_pieces(command: Command) -> None:
    outcome = command("calibrate", "tiny", *WORK, *PIECE, "--name", "here", "--out", "h.toml")
    assert outcome.status == 2
    assert "--token-piece: found 5" in outcome.err


def measured_times(**changes: Any) -> dict[str, int]:
    """Returns the durations of the compute ops of a plan, in ns, on a calibrated machine."""
    stored = Path(__file__).parents[3] / "experiments" / "results" / "h200-qwen2.5-3b"
    hardware, model = (
        HardwareSpec.load(str(stored / "hardware.toml")),
        ModelSpec.load("qwen2.5-3b").with_layers(2),
    )
    work = Workload(batch=1, sequence=32768, **changes)
    costs = cost_model(hardware, model, work)
    assert isinstance(costs, Calibrated)
    plan = Plan(
        policy="overlapped",
        hardware="h200",
        source="",
        model=model,
        workload=work,
        knobs=Knobs(checkpoint_interval=1),
        device_limit_bytes=2**40,
        host_limit_bytes=2**40,
    )
    return {op.id: costs.duration_ns(op) for op in lower(plan).ops if op.lane == "compute"}


def test_a_measured_machine_derives_the_times_of_pieces() -> None:
    times = {piece: measured_times(token_piece=piece) for piece in (None, 16384, 2048)}
    for op in ("F0.m0", "B0.m0"):
        assert times[None][op] < times[16384][op] < times[2048][op]
    assert times[16384]["R0.m0"] < times[None]["R0.m0"]
    assert times[16384]["H.m0"] == times[None]["H.m0"]


@pytest.mark.parametrize("piece", [None, 16384])
def test_a_measured_machine_derives_the_times_of_groups_of_heads(piece: int | None) -> None:
    one, two = (measured_times(token_piece=piece, head_groups=groups) for groups in (None, 2))
    for op in ("F0.m0", "R0.m0", "B0.m0"):
        assert one[op] < two[op] < 1.02 * one[op]
    assert one["H.m0"] == two["H.m0"]


@pytest.mark.usefixtures("without_advice")
def test_no_pieces_are_chosen_if_a_search_finds_a_plan_without_them(command: Command) -> None:
    """The plans with the least memory do not fit with this loss chunk, but another plan does.

    The command that `check` suggests for its verdict has the chunk.
    """
    words = ("check", "pythia-6.9b", "--hardware", "apple-m4-max", "--seq", 8192, "--json")
    chosen = json.loads(good(command(*words)))
    work = chosen["workload"]
    named = (*words, "--batch", work["batch"], "--loss-chunk", work["loss_chunk"])
    verdict = json.loads(good(command(*named)))
    assert verdict["workload"] == work
    assert verdict["step_seconds"] == chosen["step_seconds"]


def test_groups_of_heads_are_planned_and_not_calibrated(command: Command) -> None:
    words = ("--hardware", "h200", "--seq", 131072, "--batch", 1, "--head-groups", 4)
    text = good(command(*LONG[:2], *words))
    assert "attention computes one of 4 groups of heads at a time" in flat(text)
    assert text.replace("\\\n", "").count("--head-groups 4") == 2
    good(command("plan", LONG[1], *words, "--out", "p.toml"))
    assert Plan.load(Path("p.toml")).workload.groups == 4
    outcome = command("calibrate", "tiny", *WORK, "--head-groups", 2, "--out", "h.toml")
    assert outcome.status == 2
    assert "--head-groups: found 2" in outcome.err


@pytest.mark.usefixtures("without_advice")
@pytest.mark.parametrize("machine", ["gh200-96", "dgx-spark"])
def test_the_longest_context_of_a_short_row_counts_pieces(command: Any, machine: str) -> None:
    """Regression test: a limit was named above which `check --seq` says YES, because pieces were
    counted only if the row was long.
    """
    words = ("check", "qwen2.5-7b", "--hardware", machine, "--json")
    short = json.loads(command(*words, "--batch", "1").out)
    assert short["longest_context"] < short["longest_context_in_pieces"]
    longest = str(short["longest_context_in_pieces"])
    assert command(*words, "--batch", "1", "--seq", longest).status == 0
